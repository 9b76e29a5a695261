"""A prefill and a decode manager in one process: manual clock, in-memory channel, fake transport, real bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from splitserve.clock import ManualClock
from splitserve.config import ClusterToken, DisaggregationConfig
from splitserve.core.layout import KVComponent, KVLayout, Region
from splitserve.core.request import BootstrapInfo, DisaggregationMode, RoomKey
from splitserve.disaggregation.arrival import Arrivals
from splitserve.disaggregation.checksum import Checksums
from splitserve.disaggregation.manager import KVManager
from splitserve.disaggregation.metadata import MetadataBuffers, MetadataRow
from splitserve.disaggregation.peers import BootstrapAddress
from splitserve.disaggregation.ports import ReceiverPort, SenderPort
from splitserve.disaggregation.room import Limits
from splitserve.disaggregation.staging import Staging
from splitserve.disaggregation.state import KVPoll
from splitserve.disaggregation.transports.fake import FakeNetwork, FakeTransport
from splitserve.disaggregation.wire import KVArgs
from splitserve.testing.control import Book, Channel, Wires

PAGE_SIZE = 4
NUM_PAGES = 64
NUM_ROWS = 32
BOOTSTRAP = BootstrapAddress("prefill.test", 8998)
CONFIG = DisaggregationConfig(bootstrap_timeout=60.0, transfer_timeout=60.0, heartbeat_interval=5.0, heartbeat_misses=2)


def layout(
    num_pages: int = NUM_PAGES, *, page_size: int = PAGE_SIZE, layers: int = 2, dtype: str = "float32", heads: int = 1
) -> KVLayout:
    """A small pool's layout."""
    components = tuple(KVComponent(n, layer, dtype, heads, 0, heads, 2) for layer in range(layers) for n in "kv")
    return KVLayout(page_size, num_pages, components)


class Between(Protocol):
    """What lies between the workers of a world."""

    clock: ManualClock
    network: FakeNetwork
    wires: Wires
    book: Book


class Worker:
    """One process: memory, transport and manager."""

    def __init__(
        self,
        world: Between,
        role: DisaggregationMode,
        address: str,
        *,
        epoch: int,
        pool: KVLayout | None = None,
        limits: Limits | None = None,
        staging_slot_bytes: int | None = None,
        transfer_dtype: str | None = None,
        token: bytes = b"",
        group_args: Sequence[KVArgs] = (),
        directory: Book | None = None,
        **args: Any,
    ) -> None:
        self.layout = pool or layout()
        self.pages = [
            np.zeros((self.layout.num_pages, c.page_bytes(self.layout.page_size)), np.uint8)
            for c in self.layout.components
        ]
        self.metadata = MetadataBuffers(NUM_ROWS)
        self.transport = FakeTransport(world.network)
        pool_regions = [Region(p.ctypes.data, p.nbytes) for p in self.pages]
        self.staging: Staging | None = None
        if staging_slot_bytes is not None:
            self.staging = Staging(pool_regions, len(pool_regions) + 1, num_slots=8, slot_bytes=staging_slot_bytes)
        extra = [self.staging.region()] if self.staging else []
        self.transport.register([*pool_regions, self.metadata.region(), *extra])
        self.channel = Channel(world.wires, address)
        self.manager = KVManager(
            role,
            clock=world.clock,
            channel=self.channel,
            transport=self.transport,
            args=KVArgs(
                **{
                    "backend": "fake",
                    "can_checksum": True,
                    "model": "tiny",
                    "layout": self.layout,
                    "metadata_row_bytes": self.metadata.row_bytes,
                    "num_metadata_rows": NUM_ROWS,
                    "can_convert": self.staging is not None,
                    "transfer_dtype": transfer_dtype,
                    **args,
                }
            ),
            metadata=self.metadata,
            config=msgspec.structs.replace(CONFIG, cluster_token=ClusterToken(token)),
            directory=(directory or world.book) if role is DisaggregationMode.DECODE else None,
            staging=self.staging,
            arrivals=Arrivals(self.layout, pool_regions, transfer_dtype) if transfer_dtype else None,
            checksums=Checksums(self.layout, pool_regions),
            group_args=group_args,
            limits=limits,
            epoch=epoch,
        )

    def fill(self, pages: Sequence[int], seed: int) -> None:
        """Put random bytes into whole pages."""
        rng = np.random.default_rng(seed)
        for component in self.pages:
            component[list(pages)] = rng.integers(0, 256, (len(pages), component.shape[1]), dtype=np.uint8)

    def holds(self, pages: Sequence[int], seed: int) -> bool:
        """Whether the pages, in this order, hold what `fill` put into as many pages elsewhere."""
        rng = np.random.default_rng(seed)
        return all(
            (c[list(pages)] == rng.integers(0, 256, (len(pages), c.shape[1]), dtype=np.uint8)).all() for c in self.pages
        )

    def read(self, page: int) -> bytes:
        """Everything in it."""
        return b"".join(component[page].tobytes() for component in self.pages)


class World:
    def __init__(
        self,
        *,
        step: bool = False,
        late_fences: bool = False,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
    ) -> None:
        self.clock = ManualClock(100.0)
        self.network = FakeNetwork(step=step, late_fences=late_fences)
        self.wires = Wires(step=step)
        self.book = Book()
        self._graveyard: list[Worker] = []
        self.prefill = Worker(self, DisaggregationMode.PREFILL, "prefill", epoch=11, **(prefill or {}))
        self.decode = Worker(self, DisaggregationMode.DECODE, "decode", epoch=22, **(decode or {}))
        self.book.entries[BOOTSTRAP] = [self.prefill.manager.prefill_info()]

    def replace_prefill(self, *, epoch: int, address: str = "prefill", **args: Any) -> Worker:
        """The old process stays as it is, but nobody ticks it any more; the new one may have its address."""
        old = self.prefill
        self.prefill = Worker(self, DisaggregationMode.PREFILL, address, epoch=epoch, **args)
        self.book.entries[BOOTSTRAP] = [self.prefill.manager.prefill_info()]
        return old

    def replace_decode(self, *, epoch: int) -> None:
        """As if the decode process was killed and started again at the same address."""
        self.decode.transport.close()
        # Late bytes may still land in its memory.
        self._graveyard.append(self.decode)
        self.decode = Worker(self, DisaggregationMode.DECODE, "decode", epoch=epoch)

    def sender(self, room: int = 1, sample: int = 0) -> SenderPort:
        return self.prefill.manager.sender(f"p{room}", BootstrapInfo(*BOOTSTRAP[:2], RoomKey(room, sample)))

    def receiver(self, room: int = 1, sample: int = 0) -> ReceiverPort:
        return self.decode.manager.receiver(f"d{room}", BootstrapInfo(*BOOTSTRAP[:2], RoomKey(room, sample)))

    def tick(self, times: int = 4) -> None:
        """Let everything that is due happen."""
        for _ in range(times):
            self.decode.manager.tick()
            self.prefill.manager.tick()
            while self.wires.busy():
                self.wires.deliver(self.wires.busy()[0])

    def turns(self) -> list[Callable[[], object]]:
        """All that somebody has to call again and again for anything to happen."""
        return [self.prefill.manager.tick, self.decode.manager.tick]

    def num_rooms(self) -> int:
        """Ends of rooms that somebody still knows of."""
        return self.prefill.manager.num_rooms + self.decode.manager.num_rooms

    def land(self) -> None:
        """Let all bytes under way arrive."""
        while busy := self.network.busy_sessions():
            self.network.run_one(busy[0])

    def pass_time(self, seconds: float, step: float = 1.0) -> None:
        """Turn the clock, both sides awake."""
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.clock.advance(step)
            self.tick(2)

    def paired(
        self,
        room: int = 1,
        target: Sequence[int] = (5, 6, 7),
        num_tokens: int | None = None,
        num_held_tokens: int = 0,
    ) -> tuple[SenderPort, ReceiverPort]:
        """Both ends of a room, announced; `num_tokens` None: as many as the target pages hold."""
        sender, receiver = self.sender(room), self.receiver(room)
        self.tick()
        held = self.decode.layout.page_size * len(target)
        receiver.init(
            list(target),
            room % NUM_ROWS,
            num_tokens=held if num_tokens is None else num_tokens,
            num_held_tokens=num_held_tokens,
        )
        self.tick()
        if sender.poll() is not KVPoll.WAITING_FOR_INPUT:
            raise AssertionError(f"room {room} is {sender.poll().name} on prefill")
        return sender, receiver

    def set_row(self, room: int, index: int = 0, token: int = 42) -> None:
        """Fill prefill's metadata row for a room."""
        self.prefill.metadata.set_buf(index, MetadataRow(RoomKey(room), token))
