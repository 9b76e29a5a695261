"""Prefill and decode worker in one thread with real schedulers, queues and managers. The network is a list.

`PairWorld.happen` runs one event chosen by the seed: a turn of a worker, a tick of a manager, the delivery of a control
message, one copy of a write, or an advance of the clock. The outcome must not depend on the order.
"""

from __future__ import annotations

import random
from typing import Any

from splitserve.cache.shared_pages import SharedPages
from splitserve.core.clock import ManualClock
from splitserve.core.config import DisaggregationConfig
from splitserve.core.messages import AbortRequest, GenerateRequest
from splitserve.core.request import BootstrapInfo, DisaggregationMode, RoomKey
from splitserve.core.sampling import ResolvedSampling
from splitserve.scheduler.ports import Outbox
from splitserve.scheduler.roles.colocated import Role
from splitserve.scheduler.roles.decode import DecodeRole
from splitserve.scheduler.roles.prefill import PrefillRole
from splitserve.scheduler.running import RunningSet
from splitserve.transfer.manager import KVManager, KVManagerIdentity, KVManagerPorts, TransferKit
from splitserve.transfer.metadata import MetadataBuffers, ReqToMetadataIdxAllocator
from splitserve.transfer.peers import BootstrapAddress, Directory
from splitserve.transfer.room import KVManagerMemory
from splitserve.transfer.transports.fake import FakeNetwork, FakeTransport
from splitserve.transfer.wire import KVArgs
from support.control import Channel, FakeDirectory, Wires
from support.sim import SimSettings, SimWorker


class DisaggregatedWorker(SimWorker):
    """Worker with a KV manager over the fake transport."""

    def __init__(
        self,
        mode: DisaggregationMode,
        clock: ManualClock,
        transport: FakeTransport,
        channel: Channel,
        directory: Directory | None,
        config: DisaggregationConfig,
        num_slots: int,
        shared: SharedPages | None = None,
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
                shared_pool=shared.identity if shared else "",
                generation=shared.generation if shared else 0,
            )
            self.manager = KVManager(
                mode,
                KVManagerPorts(clock, channel, transport, directory),
                KVManagerMemory(metadata, shared=shared),
                KVManagerIdentity(args),
                config,
            )
            role = PrefillRole if mode is DisaggregationMode.PREFILL else DecodeRole
            return role(running, worker.cache, outbox, clock, TransferKit(self.manager, metadata, slots))

        is_prefill = mode is DisaggregationMode.PREFILL
        if not is_prefill:
            settings.setdefault("pre_alloc_size", 64)
        super().__init__(
            clock,
            make_role,
            lambda r: r.num_prefill_tokens if is_prefill else r.num_tokens_at_most,
            SimSettings(**{"prefix": shared is None, "shared": shared} | settings),
        )


class PairLinks:
    """Shared environment of the workers of a world: control messages, writes in flight and the clock."""

    rng: random.Random
    clock: ManualClock
    control: Wires
    data: FakeNetwork

    def happen_between(self, which: int) -> None:
        """Run one event of kind `which`: 4 or 5 a control message, 6 a write, 7 an advance of the clock."""
        match which:
            case 4 | 5:
                if pairs := self.control.busy():
                    self.control.deliver(self.rng.choice(sorted(pairs)))
            case 6:
                if busy := self.data.busy_sessions():
                    self.data.run_one(self.rng.choice(sorted(busy)))
            case 7:
                self.clock.advance(self.rng.choice([0.0, 0.0, 0.001, 0.01]))


class PairWorld(PairLinks):
    """One prefill and one decode worker. `prefill_settings` and `decode_settings` go to the SimWorkers."""

    ADDRESS = BootstrapAddress("sim", 1)

    def __init__(
        self,
        seed: int,
        *,
        prefill_settings: dict[str, Any] | None = None,
        decode_settings: dict[str, Any] | None = None,
        config: DisaggregationConfig | None = None,
        num_slots: int = 8,
        late_fences: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.control = Wires(step=True)
        self.data = FakeNetwork(step=True, late_fences=late_fences)
        config = config or DisaggregationConfig()
        directory = FakeDirectory()
        self.prefill = DisaggregatedWorker(
            DisaggregationMode.PREFILL,
            self.clock,
            FakeTransport(self.data),
            Channel(self.control, "prefill"),
            None,
            config,
            num_slots,
            **(prefill_settings or {}),
        )
        directory.entries[self.ADDRESS] = [self.prefill.manager.prefill_info()]
        self.decode = DisaggregatedWorker(
            DisaggregationMode.DECODE,
            self.clock,
            FakeTransport(self.data),
            Channel(self.control, "decode"),
            directory,
            config,
            num_slots,
            **(decode_settings or {}),
        )

    def submit(self, rid: str, prompt: list[int], params: ResolvedSampling, *, room: int, **more: Any) -> None:
        """Send the same request to both workers at the same time, as a router does."""
        bootstrap = BootstrapInfo(*self.ADDRESS[:2], RoomKey(room))
        message = GenerateRequest(rid=rid, prompt_ids=prompt, params=params, bootstrap=bootstrap, **more)
        self.prefill.submit(message)
        self.decode.submit(message)

    def submit_local(self, rid: str, prompt: list[int], params: ResolvedSampling, **more: Any) -> None:
        """Submit a request that decode serves alone."""
        self.decode.submit(GenerateRequest(rid=rid, prompt_ids=prompt, params=params, **more))

    def abort(self, rid: str, *workers: SimWorker) -> None:
        for worker in workers:
            worker.submit(AbortRequest(rid=rid))

    def happen(self) -> None:
        """Run one random event."""
        match self.rng.randrange(8):
            case 0:
                self.prefill.turn()
            case 1:
                self.decode.turn()
            case 2:
                self.prefill.manager.tick()
            case 3:
                self.decode.manager.tick()
            case other:
                self.happen_between(other)

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
