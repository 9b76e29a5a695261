"""Prefill and decode worker in one thread with real schedulers, queues and managers. The network is a list.

`PairWorld.happen` runs one event chosen by the seed: a turn of a worker, a tick of a manager, the delivery of a control
message, one copy of a write, or an advance of the clock. The outcome must not depend on the order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from splitserve.cache.shared_pages import SharedPages
from splitserve.core.clock import ManualClock
from splitserve.core.config import DisaggregationConfig
from splitserve.core.messages import AbortRequest, GenerateRequest
from splitserve.core.request import BootstrapInfo, DisaggregationMode, RoomKey
from splitserve.core.sampling import ResolvedSampling
from splitserve.transfer.decode_manager import DecodeManager
from splitserve.transfer.mail import Mailbox
from splitserve.transfer.manager import TransferKit
from splitserve.transfer.metadata import MetadataBuffers, ReqToMetadataIdxAllocator, RowWidths
from splitserve.transfer.peers import BootstrapAddress
from splitserve.transfer.prefill_manager import PrefillManager
from splitserve.transfer.room import Context
from splitserve.transfer.wire import KVArgs
from support.control import Channel, FakeDirectory, Wires
from support.fake_transport import FakeNetwork, FakeTransport
from support.sim import SimSettings, SimWorker


@dataclass(frozen=True)
class SimPorts:
    """Connections of a simulated manager."""

    clock: ManualClock
    channel: Channel
    transport: FakeTransport
    directory: FakeDirectory


def simulated_manager(
    worker: SimWorker,
    mode: DisaggregationMode,
    ports: SimPorts,
    config: DisaggregationConfig,
    metadata: MetadataBuffers,
) -> PrefillManager | DecodeManager:
    """Return a KV manager over the fake transport of `ports`."""
    shared = worker.settings.shared
    ports.transport.register([*worker.engine.regions(), metadata.region()])
    args = KVArgs(
        backend="fake",
        model=worker.memory.fingerprint if worker.memory else "fake",
        layout=worker.engine.layout,
        metadata_row_bytes=metadata.row_bytes,
        metadata_widths=metadata.widths,
        num_metadata_rows=metadata.size,
        shared_pool=shared.identity if shared else "",
        generation=shared.generation if shared else 0,
    )
    context = Context(
        clock=ports.clock,
        mailbox=Mailbox(ports.channel),
        transport=ports.transport,
        args=args,
        config=config,
        metadata=metadata,
        shared=shared,
    )
    if mode is DisaggregationMode.PREFILL:
        return PrefillManager(context)
    return DecodeManager(context, ports.directory)


class DisaggregatedWorker(SimWorker):
    """Worker with a KV manager over the fake transport."""

    def __init__(
        self,
        mode: DisaggregationMode,
        ports: SimPorts,
        config: DisaggregationConfig,
        num_slots: int,
        shared: SharedPages | None = None,
        **settings: Any,
    ) -> None:
        self._ports, self._config, self._num_slots = ports, config, num_slots
        if mode is DisaggregationMode.DECODE:
            settings.setdefault("pre_alloc_size", 64)
        assert isinstance(ports.clock, ManualClock)
        super().__init__(ports.clock, mode, SimSettings(**{"prefix": shared is None, "shared": shared} | settings))

    def open_transfer(
        self, mode: DisaggregationMode, bootstrap_url: str | None, closing: ExitStack
    ) -> TransferKit[Any]:
        settings = self.settings
        widths = RowWidths(hidden_state=settings.hidden_size, draft_state=settings.draft_state_size)
        metadata = MetadataBuffers(self._num_slots, widths)
        slots = ReqToMetadataIdxAllocator(self._num_slots)
        self.manager = simulated_manager(self, mode, self._ports, self._config, metadata)
        return TransferKit(self.manager, metadata, slots)


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
        directory = FakeDirectory()

        def worker(mode: DisaggregationMode, settings: dict[str, Any] | None) -> DisaggregatedWorker:
            ports = SimPorts(self.clock, Channel(self.control, str(mode)), FakeTransport(self.data), directory)
            return DisaggregatedWorker(mode, ports, config or DisaggregationConfig(), num_slots, **(settings or {}))

        self.prefill = worker(DisaggregationMode.PREFILL, prefill_settings)
        directory.entries[self.ADDRESS] = [self.prefill.manager.prefill_info()]
        self.decode = worker(DisaggregationMode.DECODE, decode_settings)

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

    def run_until_idle(self, max_events: int = 200_000, after_event: Callable[[], object] = lambda: None) -> None:
        for _ in range(max_events):
            self.happen()
            after_event()
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
