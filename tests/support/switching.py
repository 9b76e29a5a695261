"""Workers in one thread that change their roles while requests run, driven as a router drives them.

`SwitchWorld.happen` runs one event chosen by the seed, as `PairWorld.happen` does. It learns each worker's role from
the replies to its role requests, and sends requests to the pairs or colocated workers of that moment.
"""

from __future__ import annotations

import random
from typing import Any

from splitserve.core.clock import ManualClock
from splitserve.core.config import DisaggregationConfig
from splitserve.core.errors import WorkerUnavailableError
from splitserve.core.messages import GenerateRequest, RoleReply, RoleRequest, RoleStep
from splitserve.core.request import BootstrapInfo, DisaggregationMode, RoomKey
from splitserve.core.sampling import ResolvedSampling
from splitserve.scheduler.ports import Outbox
from splitserve.scheduler.role_switch import SchedulerRoleSwitch
from splitserve.scheduler.roles.colocated import ColocatedRole, Role
from splitserve.scheduler.roles.decode import DecodeRole
from splitserve.scheduler.roles.prefill import PrefillRole
from splitserve.scheduler.running import RunningSet
from splitserve.transfer.manager import KVManager, KVManagerIdentity, KVManagerPorts, TransferKit
from splitserve.transfer.metadata import MetadataBuffers, ReqToMetadataIdxAllocator
from splitserve.transfer.peers import BootstrapAddress, LookupFailure
from splitserve.transfer.room import KVManagerMemory
from splitserve.transfer.transports.fake import FakeNetwork, FakeTransport
from splitserve.transfer.wire import KVArgs, PrefillInfo
from support.control import Channel, FakeDirectory, Wires
from support.fake_grammar import InlinePool
from support.pair import PairLinks
from support.sim import SimSettings, SimWorker

NULL, PREFILL, DECODE = DisaggregationMode.NULL, DisaggregationMode.PREFILL, DisaggregationMode.DECODE


class SimRole:
    """PreparedRole over the fake transport. A prefill role is in the directory while it is open."""

    def __init__(
        self, world: SwitchWorld, worker: SwitchingWorker, mode: DisaggregationMode, running: RunningSet, outbox: Outbox
    ) -> None:
        self.mode = mode
        self.manager: KVManager | None = None
        self._world, self._worker, self._running, self._outbox = world, worker, running, outbox
        if mode is NULL:
            return
        self.address = BootstrapAddress(f"{worker.name}-{world.new_number()}", 1)
        self._transport = FakeTransport(world.data)
        self._metadata, self._slots = MetadataBuffers(8), ReqToMetadataIdxAllocator(8)
        self._transport.register([*worker.engine.regions(), self._metadata.region()])
        args = KVArgs(
            backend="fake",
            model="fake",
            layout=worker.engine.layout,
            metadata_row_bytes=self._metadata.row_bytes,
            num_metadata_rows=8,
        )
        # Each role has a directory client of its own.
        directory = FakeDirectory()
        directory.entries = world.entries
        self.manager = KVManager(
            mode,
            KVManagerPorts(world.clock, Channel(world.control, self.address.host), self._transport, directory),
            KVManagerMemory(self._metadata),
            KVManagerIdentity(args),
            DisaggregationConfig(),
        )
        if mode is PREFILL:
            world.entries[self.address] = [self.manager.prefill_info()]

    def install(self) -> Role:
        clock, cache = self._world.clock, self._worker.cache
        is_prefill = self.mode is PREFILL
        self._running.admission.tokens_at_most = lambda r: r.num_prefill_tokens if is_prefill else r.num_tokens_at_most
        self._running.admits_before = None
        self._worker.installed = self
        if self.manager is None:
            return ColocatedRole(self._running, cache, self._outbox, clock)
        make = PrefillRole if is_prefill else DecodeRole
        return make(self._running, cache, self._outbox, clock, TransferKit(self.manager, self._metadata, self._slots))

    def close(self) -> None:
        if self.manager is None:
            return
        assert self.manager.num_rooms == 0, "a role is closed that still has rooms"
        if self.mode is PREFILL:
            self._world.entries[self.address] = LookupFailure("no prefill worker any more", is_definitive=True)
        self.manager.close()
        self._transport.close()
        self._world.managers.remove(self.manager)


class SimRoles:
    """RoleBuilder. `fails`: the next role cannot be prepared."""

    def __init__(self, world: SwitchWorld, worker: SwitchingWorker, running: RunningSet, outbox: Outbox) -> None:
        self._parts = world, worker, running, outbox
        self.fails = False

    def prepare(self, mode: DisaggregationMode, bootstrap_url: str | None) -> SimRole:
        if self.fails:
            self.fails = False
            raise WorkerUnavailableError("no port is left")
        world, worker, running, outbox = self._parts
        role = SimRole(world, worker, mode, running, outbox)
        if role.manager is not None:
            world.managers.append(role.manager)
        return role


class SwitchingWorker(SimWorker):
    def __init__(self, world: SwitchWorld, name: str, mode: DisaggregationMode, **options: Any) -> None:
        self.name = name
        # The router's view of the worker.
        self.mode, self.takes_requests = mode, True
        self.num_switches = self.num_given_up = 0
        # Role that a switch in progress leads to. None: no switch.
        self.goal: DisaggregationMode | None = None

        def make_role(_: SimWorker, running: RunningSet, outbox: Outbox) -> Role:
            self.builder = SimRoles(world, self, running, outbox)
            self.installed = self.builder.prepare(mode, None)
            self.role_switch = SchedulerRoleSwitch(self.builder, self.installed, InlinePool(), lambda: None)
            return self.installed.install()

        settings = SimSettings(pre_alloc_size=16, **options)
        super().__init__(world.clock, make_role, lambda r: r.num_tokens_at_most, settings)

    def turn(self) -> bool:
        has_computed = super().turn()
        if not has_computed and self._late is None:
            # Nothing is in flight: rest, as the worker's loop does.
            self.scheduler.rest(0.0)
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
        self.managers: list[KVManager] = []
        self._number = 0
        self.workers = []
        for i, mode in enumerate(modes):
            late_steps = random.Random(self.rng.random()) if late else None
            self.workers.append(SwitchingWorker(self, f"w{i}", mode, late_steps=late_steps, **settings))
        # rid -> workers that serve it. The last one answers.
        self.served: dict[str, list[SwitchingWorker]] = {}

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
            bootstrap = BootstrapInfo(*chosen[0].installed.address[:2], RoomKey(room))
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
                worker.order(RoleStep.SETTLE, timeout=self.rng.choice([0.0, 0.5, 1e9]))
            elif step is RoleStep.SETTLE:
                worker.check_nothing_is_held()
                worker.order(RoleStep.COMMIT)
            elif step is RoleStep.COMMIT:
                worker.num_switches += 1
                worker.mode, worker.goal, worker.takes_requests = worker.goal, None, True
            else:
                worker.num_given_up += 1
                worker.goal, worker.takes_requests = None, True
