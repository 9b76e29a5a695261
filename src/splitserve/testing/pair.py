"""A prefill and a decode worker in one thread: real schedulers, queues and managers; the network is a list.

`PairWorld.happen` lets one thing happen, chosen by the seed: a worker's turn, a manager's tick, one control message
delivered, one copy of one write landing, time passing. Whatever the order, the outcome must be the same.
"""

from __future__ import annotations

import random
from typing import Any

from splitserve.cache.shared_pages import SharedPages
from splitserve.clock import ManualClock
from splitserve.config import DisaggregationConfig
from splitserve.core.request import BootstrapInfo, DisaggregationMode, RoomKey
from splitserve.core.sampling import SamplingParams
from splitserve.disaggregation.kit import HandOverKit
from splitserve.disaggregation.manager import KVManager
from splitserve.disaggregation.metadata import MetadataBuffers, ReqToMetadataIdxAllocator
from splitserve.disaggregation.peers import BootstrapAddress, Directory
from splitserve.disaggregation.transports.fake import FakeNetwork, FakeTransport
from splitserve.disaggregation.wire import KVArgs
from splitserve.messages import AbortRequest, GenerateRequest
from splitserve.scheduler.outbox import Outbox
from splitserve.scheduler.roles.base import Role
from splitserve.scheduler.roles.decode import DecodeRole
from splitserve.scheduler.roles.prefill import PrefillRole
from splitserve.scheduler.running import RunningSet
from splitserve.testing.control import Book, Channel, Wires
from splitserve.testing.sim import SimWorker


class DisaggregatedWorker(SimWorker):
    """A worker with a KV manager, over the fake transport."""

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
                clock=clock,
                channel=channel,
                transport=transport,
                args=args,
                metadata=metadata,
                config=config,
                directory=directory,
                shared=shared,
            )
            role = PrefillRole if mode is DisaggregationMode.PREFILL else DecodeRole
            return role(running, worker.cache, outbox, clock, HandOverKit(self.manager, metadata, slots))

        is_prefill = mode is DisaggregationMode.PREFILL
        if not is_prefill:
            settings.setdefault("pre_alloc_size", 64)
        super().__init__(
            clock,
            make_role,
            lambda r: r.num_prefill_tokens if is_prefill else r.num_tokens_at_most,
            shared=shared,
            **({"prefix": shared is None} | settings),
        )


class Between:
    """What lies between the workers of a world: control messages, writes under way, and time."""

    rng: random.Random
    clock: ManualClock
    control: Wires
    data: FakeNetwork

    def happen_between(self, which: int) -> None:
        """Let one thing happen; `which`, from 4 to 7, says of what kind."""
        match which:
            case 4 | 5:
                if pairs := self.control.busy():
                    self.control.deliver(self.rng.choice(sorted(pairs)))
            case 6:
                if busy := self.data.busy_sessions():
                    self.data.run_one(self.rng.choice(sorted(busy)))
            case 7:
                self.clock.advance(self.rng.choice([0.0, 0.0, 0.001, 0.01]))


class PairWorld(Between):
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
        directory = Book()
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

    def submit(self, rid: str, prompt: list[int], params: SamplingParams, *, room: int, **more: Any) -> None:
        """What the router does: the same request to both, at the same time."""
        bootstrap = BootstrapInfo(*self.ADDRESS[:2], RoomKey(room))
        message = GenerateRequest(rid=rid, prompt_ids=prompt, params=params, bootstrap=bootstrap, **more)
        self.prefill.submit(message)
        self.decode.submit(message)

    def submit_local(self, rid: str, prompt: list[int], params: SamplingParams, **more: Any) -> None:
        """A request that decode is to serve alone."""
        self.decode.submit(GenerateRequest(rid=rid, prompt_ids=prompt, params=params, **more))

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
