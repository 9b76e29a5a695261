"""A prefill and a decode worker in one thread: real schedulers, queues and managers; the network is a list.

`PairWorld.happen` lets one thing happen, chosen by the seed: a worker's turn, a manager's tick, one control message
delivered, one copy of one write landing, time passing. Whatever the order, the outcome must be the same.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from splitserve.clock import ManualClock
from splitserve.config import DisaggregationConfig
from splitserve.core.request import BootstrapInfo, DisaggregationMode, RoomKey
from splitserve.core.sampling import SamplingParams
from splitserve.disaggregation.kit import HandOverKit
from splitserve.disaggregation.manager import KVManager
from splitserve.disaggregation.metadata import MetadataBuffers, ReqToMetadataIdxAllocator
from splitserve.disaggregation.peers import BootstrapAddress, Directory, LookupFailure
from splitserve.disaggregation.transports.fake import FakeNetwork, FakeTransport
from splitserve.disaggregation.wire import KVArgs, PrefillInfo
from splitserve.messages import AbortRequest, GenerateRequest
from splitserve.scheduler.outbox import Outbox
from splitserve.scheduler.roles.base import Role
from splitserve.scheduler.roles.decode import DecodeRole
from splitserve.scheduler.roles.prefill import PrefillRole
from splitserve.scheduler.running import RunningSet
from splitserve.testing.sim import SimWorker


class ControlNetwork:
    """Frames under way between channels: in order between two addresses, delivered when the world says so."""

    def __init__(self) -> None:
        self.channels: dict[str, SimChannel] = {}
        self.under_way: dict[tuple[str, str], deque[bytes]] = {}

    def channel(self, address: str) -> SimChannel:
        self.channels[address] = SimChannel(self, address)
        return self.channels[address]

    def deliver(self, rng: random.Random) -> bool:
        """Deliver the oldest frame of one pair; False if nothing is under way."""
        pairs = sorted(pair for pair, frames in self.under_way.items() if frames)
        if not pairs:
            return False
        pair = rng.choice(pairs)
        frame = self.under_way[pair].popleft()
        if (target := self.channels.get(pair[1])) is not None:
            target.arrived.append(frame)
        return True


class SimChannel:
    """A ControlChannel on a ControlNetwork."""

    def __init__(self, network: ControlNetwork, address: str) -> None:
        self._network = network
        self.address = address
        self.arrived: list[bytes] = []

    def send(self, address: str, frame: bytes) -> None:
        self._network.under_way.setdefault((self.address, address), deque()).append(frame)

    def receive(self) -> list[bytes]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def forget(self, address: str) -> None:
        return None


class SimDirectory:
    """Bootstrap servers that answer at once: address -> manager of the prefill behind it."""

    def __init__(self) -> None:
        self.managers: dict[BootstrapAddress, KVManager] = {}

    def request(self, address: BootstrapAddress, timeout: float) -> None:
        return None

    def result(self, address: BootstrapAddress) -> PrefillInfo | LookupFailure | None:
        manager = self.managers.get(address)
        return manager.prefill_info() if manager else LookupFailure(f"no prefill at {address}", is_definitive=True)


class DisaggregatedWorker(SimWorker):
    """A worker with a KV manager, over the fake transport."""

    def __init__(
        self,
        mode: DisaggregationMode,
        clock: ManualClock,
        transport: FakeTransport,
        channel: SimChannel,
        directory: Directory | None,
        config: DisaggregationConfig,
        num_slots: int,
        **settings: Any,
    ) -> None:
        metadata, slots = MetadataBuffers(num_slots), ReqToMetadataIdxAllocator(num_slots)

        def make_role(worker: SimWorker, running: RunningSet, outbox: Outbox) -> Role:
            transport.register([*worker.engine.regions(), metadata.region()])
            args = KVArgs(
                backend="fake",
                model="fake",
                layout=worker.engine.layout,
                metadata_row_bytes=metadata.row_bytes,
                num_metadata_rows=num_slots,
            )
            self.manager = KVManager(
                mode,
                clock=clock,
                channel=channel,
                transport=transport,
                args=args,
                metadata=metadata,
                config=config,
                directory=directory,
            )
            role = PrefillRole if mode is DisaggregationMode.PREFILL else DecodeRole
            return role(running, worker.cache, outbox, clock, HandOverKit(self.manager, metadata, slots))

        is_prefill = mode is DisaggregationMode.PREFILL
        super().__init__(
            clock,
            make_role,
            lambda r: r.num_prompt_tokens if is_prefill else r.num_tokens_at_most,
            prefix=is_prefill,
            **settings,
        )


class PairWorld:
    """One prefill and one decode worker. `prefill_settings` and `decode_settings` go to the SimWorkers."""

    ADDRESS: BootstrapAddress = ("sim", 1)

    def __init__(
        self,
        seed: int,
        *,
        prefill_settings: dict[str, Any] | None = None,
        decode_settings: dict[str, Any] | None = None,
        config: DisaggregationConfig | None = None,
        num_slots: int = 8,
    ) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.control = ControlNetwork()
        self.data = FakeNetwork(step=True)
        config = config or DisaggregationConfig()
        directory = SimDirectory()
        self.prefill = DisaggregatedWorker(
            DisaggregationMode.PREFILL,
            self.clock,
            FakeTransport(self.data),
            self.control.channel("prefill"),
            None,
            config,
            num_slots,
            **(prefill_settings or {}),
        )
        directory.managers[self.ADDRESS] = self.prefill.manager
        self.decode = DisaggregatedWorker(
            DisaggregationMode.DECODE,
            self.clock,
            FakeTransport(self.data),
            self.control.channel("decode"),
            directory,
            config,
            num_slots,
            **(decode_settings or {}),
        )

    def submit(self, rid: str, prompt: list[int], params: SamplingParams, *, room: int, **more: Any) -> None:
        """What the router does: the same request to both, at the same time."""
        bootstrap = BootstrapInfo(*self.ADDRESS, RoomKey(room))
        message = GenerateRequest(rid=rid, prompt_ids=prompt, params=params, bootstrap=bootstrap, **more)
        self.prefill.submit(message)
        self.decode.submit(message)

    def abort(self, rid: str, *workers: SimWorker) -> None:
        for worker in workers:
            worker.submit(AbortRequest(rid=rid))

    def happen(self) -> None:
        """Let one thing happen."""
        match self.rng.randrange(8):
            case 0:
                self.prefill.turn()
            case 1:
                self.decode.turn()
            case 2:
                self.prefill.manager.tick()
            case 3:
                self.decode.manager.tick()
            case 4 | 5:
                self.control.deliver(self.rng)
            case 6:
                if busy := self.data.busy_sessions():
                    self.data.run_one(self.rng.choice(sorted(busy)))
            case 7:
                self.clock.advance(self.rng.choice([0.0, 0.0, 0.001, 0.01]))

    def run_until_idle(self, max_events: int = 200_000) -> None:
        for _ in range(max_events):
            self.happen()
            if self.prefill.is_idle() and self.decode.is_idle():
                return
        raise AssertionError(
            f"still busy after {max_events} events: prefill {self.prefill.scheduler.state()}, "
            f"decode {self.decode.scheduler.state()}"
        )

    def check_nothing_is_held(self) -> None:
        self.prefill.check_nothing_is_held()
        self.decode.check_nothing_is_held()
        assert self.prefill.manager.num_rooms == self.decode.manager.num_rooms == 0
