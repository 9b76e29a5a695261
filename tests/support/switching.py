"""Workers in one thread that change their roles while requests run, driven as a router drives them.

`SwitchWorld.happen` runs one event chosen by the seed, as `PairWorld.happen` does. It learns each worker's role from
the replies to its role requests, and sends requests to the pairs or colocated workers of that moment.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

from splitserve.core.clock import ManualClock
from splitserve.core.config import DisaggregationConfig
from splitserve.core.errors import WorkerUnavailableError
from splitserve.core.messages import GenerateRequest, RoleReply, RoleRequest, RoleStep
from splitserve.core.request import BootstrapInfo, DisaggregationMode, RoomKey
from splitserve.core.sampling import ResolvedSampling
from splitserve.transfer.manager import KVManager, TransferKit
from splitserve.transfer.metadata import MetadataBuffers, ReqToMetadataIdxAllocator
from splitserve.transfer.peers import BootstrapAddress, LookupFailure
from splitserve.transfer.wire import PrefillInfo
from support.control import Channel, FakeDirectory, Wires
from support.fake_transport import FakeNetwork, FakeTransport
from support.pair import PairLinks, SimPorts, simulated_manager
from support.sim import LateLoop, SimSettings, SimWorker

NULL, PREFILL, DECODE = DisaggregationMode.NULL, DisaggregationMode.PREFILL, DisaggregationMode.DECODE


class SwitchingWorker(SimWorker):
    """Worker that can change its role. A prefill role is in the directory while it is open."""

    def __init__(self, world: SwitchWorld, name: str, mode: DisaggregationMode, **options: Any) -> None:
        self.name = name
        self._world = world
        # The router's view of the worker.
        self.mode, self.takes_requests = mode, True
        self.num_switches = self.num_given_up = 0
        # Role that a switch in progress leads to. None: no switch.
        self.goal: DisaggregationMode | None = None
        # Whether the next role cannot be prepared.
        self.fails = False
        # Bootstrap addresses and managers of its roles: of the current one, and of one that is prepared.
        self.addresses: list[BootstrapAddress] = []
        self.managers: list[KVManager[Any]] = []
        super().__init__(world.clock, mode, SimSettings(pre_alloc_size=16, **options))

    @property
    def address(self) -> BootstrapAddress:
        """Bootstrap address of the current role."""
        return self.addresses[0]

    def open_transfer(
        self, mode: DisaggregationMode, bootstrap_url: str | None, closing: ExitStack
    ) -> TransferKit[Any] | None:
        if self.fails:
            self.fails = False
            raise WorkerUnavailableError("no port is left")
        if mode is NULL:
            return None
        world, address = self._world, BootstrapAddress(f"{self.name}-{self._world.new_number()}", 1)
        transport, metadata, slots = FakeTransport(world.data), MetadataBuffers(8), ReqToMetadataIdxAllocator(8)
        # Each role has a directory client of its own.
        directory = FakeDirectory()
        directory.entries = world.entries
        ports = SimPorts(world.clock, Channel(world.control, address.host), transport, directory)
        manager = simulated_manager(self, mode, ports, DisaggregationConfig(), metadata)
        self.addresses.append(address)
        self.managers.append(manager)
        if mode is PREFILL:
            world.entries[address] = [manager.prefill_info()]

        def close() -> None:
            assert manager.num_rooms == 0, "a role is closed that still has rooms"
            if mode is PREFILL:
                world.entries[address] = LookupFailure("no prefill worker any more", is_definitive=True)
            manager.close()
            transport.close()
            self.addresses.remove(address)
            self.managers.remove(manager)

        closing.callback(close)
        return TransferKit(manager, metadata, slots)

    def turn(self) -> bool:
        has_computed = super().turn()
        if not has_computed and not isinstance(self._loop, LateLoop):
            # Nothing is in flight: rest, as the worker's loop does.
            self.scheduler.rest()
        return has_computed

    def order(self, step: RoleStep, **more: Any) -> None:
        self.submit(RoleRequest(call_id=list(RoleStep).index(step), step=step, **more))


class SwitchWorld(PairLinks):
    """Workers in the given initial `modes`, with the network between them."""

    def __init__(self, seed: int, modes: list[DisaggregationMode], *, late: bool = False, **settings: Any) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.control = Wires(step=True)
        self.data = FakeNetwork(step=True)
        # Prefill workers by bootstrap address.
        self.entries: dict[BootstrapAddress, list[PrefillInfo] | LookupFailure] = {}
        self._number = 0
        self.workers = []
        for i, mode in enumerate(modes):
            late_steps = random.Random(self.rng.random()) if late else None
            self.workers.append(SwitchingWorker(self, f"w{i}", mode, late_steps=late_steps, **settings))
        # rid -> workers that serve it. The last one answers.
        self.served: dict[str, list[SwitchingWorker]] = {}

    @property
    def managers(self) -> list[KVManager[Any]]:
        """Managers of all roles that are open."""
        return [manager for worker in self.workers for manager in worker.managers]

    def new_number(self) -> int:
        self._number += 1
        return self._number

    def pool(self, mode: DisaggregationMode) -> list[SwitchingWorker]:
        return [w for w in self.workers if w.mode is mode and w.takes_requests]

    def submit(self, rid: str, prompt: list[int], params: ResolvedSampling) -> bool:
        """Send a request to workers, as a router does. Return False if there is no worker for it."""
        room = self.rng.getrandbits(62)
        pairs = bool(self.pool(PREFILL) and self.pool(DECODE))
        if self.pool(NULL) and (not pairs or self.rng.random() < 0.3):
            chosen, bootstrap = [self.rng.choice(self.pool(NULL))], None
        elif pairs:
            chosen = [self.rng.choice(self.pool(PREFILL)), self.rng.choice(self.pool(DECODE))]
            bootstrap = BootstrapInfo(*chosen[0].address[:2], RoomKey(room))
        else:
            return False
        for worker in chosen:
            worker.submit(GenerateRequest(rid=rid, prompt_ids=prompt, params=params, bootstrap=bootstrap))
        self.served[rid] = chosen
        return True

    def begin_switch(self, worker: SwitchingWorker, goal: DisaggregationMode) -> None:
        worker.goal = goal
        worker.order(RoleStep.PREPARE, mode=goal)

    def happen(self) -> None:
        """Run one random event."""
        match self.rng.randrange(8):
            case 0 | 1:
                worker = self.rng.choice(self.workers)
                worker.turn()
                self._go_on(worker)
            case 2 | 3:
                if self.managers:
                    self.rng.choice(self.managers).tick()
            case other:
                self.happen_between(other)

    def run_until_idle(self, max_events: int = 400_000) -> None:
        for _ in range(max_events):
            self.happen()
            if all(w.is_idle() and w.goal is None for w in self.workers):
                return
        states = [(w.name, w.mode, w.goal, w.scheduler.state()) for w in self.workers]
        raise AssertionError(f"still busy after {max_events} events: {states}")

    def run_until_held(self, max_events: int = 400_000) -> None:
        """Run until every worker has replied to one order, and take the replies."""
        for _ in range(max_events):
            self.rng.choice(self.workers).turn()
            for manager in self.managers:
                manager.tick()
            self.happen_between(self.rng.randrange(4, 8))
            if all(worker.replies for worker in self.workers):
                for worker in self.workers:
                    (reply,), worker.replies = worker.replies, []
                    assert isinstance(reply, RoleReply)
                    assert reply.error == ""
                return
        raise AssertionError("not held")

    def check_nothing_is_held(self) -> None:
        for worker in self.workers:
            worker.check_nothing_is_held()
            assert worker.role.mode is worker.mode
        assert len(self.managers) == sum(w.mode is not NULL for w in self.workers)
        assert all(m.num_rooms == 0 for m in self.managers)

    def _go_on(self, worker: SwitchingWorker) -> None:
        """Act on the replies to role requests, as a front end does: request the next step, or cancel."""
        replies, worker.replies = worker.replies, []
        for reply in replies:
            assert isinstance(reply, RoleReply)
            assert worker.goal is not None
            step = list(RoleStep)[reply.call_id]
            if reply.error or (step is not RoleStep.CANCEL and self.rng.random() < 0.1):
                # The step failed, or the switch is cancelled at random.
                if step is not RoleStep.COMMIT:
                    worker.order(RoleStep.CANCEL)
                    continue
                assert not reply.error
            if step is RoleStep.PREPARE:
                worker.takes_requests = False
                worker.order(RoleStep.DRAIN, timeout=self.rng.choice([0.0, 0.5, 1e9]))
            elif step is RoleStep.DRAIN:
                worker.check_nothing_is_held()
                worker.order(RoleStep.COMMIT)
            elif step is RoleStep.COMMIT:
                worker.num_switches += 1
                worker.mode, worker.goal, worker.takes_requests = worker.goal, None, True
            else:
                worker.num_given_up += 1
                worker.goal, worker.takes_requests = None, True
