"""Prefill and decode manager in one process: manual clock, in-memory channel, fake transport, real bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from splitserve.core.clock import ManualClock
from splitserve.core.config import DisaggregationConfig
from splitserve.core.layout import KVComponent, KVLayout, Region
from splitserve.core.request import BootstrapInfo, DisaggregationMode, RoomKey
from splitserve.transfer.convert import StagingArea
from splitserve.transfer.decode_manager import DecodeManager
from splitserve.transfer.group_wire import RankLink
from splitserve.transfer.mail import Mailbox
from splitserve.transfer.metadata import MetadataBuffers, MetadataRow
from splitserve.transfer.peers import BootstrapAddress
from splitserve.transfer.pool_bytes import Arrivals, Checksums
from splitserve.transfer.prefill_manager import PrefillManager
from splitserve.transfer.receiver import KVReceiver
from splitserve.transfer.room import Context, RankGroup, RoomLimits
from splitserve.transfer.sender import KVSender
from splitserve.transfer.state import KVPoll
from splitserve.transfer.synthetic import SyntheticKV
from splitserve.transfer.transports.base import Transport
from splitserve.transfer.wire import KVArgs
from support.control import Channel, FakeDirectory, Wires
from support.fake_transport import FakeNetwork, FakeTransport

PAGE_SIZE = 4
NUM_PAGES = 64
NUM_ROWS = 32
BOOTSTRAP = BootstrapAddress("prefill.test", 8998)
CONFIG = DisaggregationConfig(bootstrap_timeout=60.0, transfer_timeout=60.0, heartbeat_interval=5.0, heartbeat_misses=2)


def layout(
    num_pages: int = NUM_PAGES, *, page_size: int = PAGE_SIZE, layers: int = 2, dtype: str = "float32", heads: int = 1
) -> KVLayout:
    """Return the layout of a small pool."""
    components = tuple(KVComponent(n, layer, dtype, heads, 0, heads, 2) for layer in range(layers) for n in "kv")
    return KVLayout(page_size, num_pages, components)


class KVWorldLinks(Protocol):
    """Clock, networks and directory between the workers of a world."""

    clock: ManualClock
    network: FakeNetwork
    wires: Wires
    book: FakeDirectory


class KVWorker:
    """Worker process with memory, transport and manager."""

    def __init__(
        self,
        world: KVWorldLinks,
        role: DisaggregationMode,
        address: str,
        *,
        epoch: int,
        pool: KVLayout | None = None,
        limits: RoomLimits | None = None,
        staging_slot_bytes: int | None = None,
        group_args: Sequence[KVArgs] = (),
        directory: FakeDirectory | None = None,
        links: Sequence[RankLink] = (),
        **args: Any,
    ) -> None:
        """`args`: those of KVArgs, and a `transport`, or a `sink`, the transport of a worker without peers."""
        sink: Transport | None = args.pop("sink", None)
        self.layout = pool or layout()
        self.pages = [
            np.zeros((self.layout.num_pages, c.page_bytes(self.layout.page_size)), np.uint8)
            for c in self.layout.components
        ]
        self.metadata = MetadataBuffers(NUM_ROWS)
        self.transport: Any = sink or args.pop("transport", None) or FakeTransport(world.network)
        pool_regions = [Region(p.ctypes.data, p.nbytes) for p in self.pages]
        self.staging = _staging(pool_regions, staging_slot_bytes)
        extra = [self.staging.region()] if self.staging else []
        self.transport.register([*pool_regions, self.metadata.region(), *extra])
        self.channel = Channel(world.wires, address)
        kv_args = KVArgs(
            **{
                "backend": "fake",
                "can_checksum": True,
                "model": "tiny",
                "layout": self.layout,
                "metadata_row_bytes": self.metadata.row_bytes,
                "num_metadata_rows": NUM_ROWS,
                "can_convert": self.staging is not None,
                **args,
            }
        )
        narrow = kv_args.transfer_dtype
        arrivals = Arrivals(self.layout, pool_regions, narrow) if narrow else None
        context = Context(
            clock=world.clock,
            mailbox=Mailbox(self.channel, epoch),
            transport=self.transport,
            args=kv_args,
            config=msgspec.structs.replace(CONFIG, transfer_backend="fake") if sink else CONFIG,
            metadata=self.metadata,
            synthetic=SyntheticKV(self.layout, pool_regions) if role is DisaggregationMode.DECODE else None,
            staging=self.staging,
            arrivals=arrivals,
            checksums=Checksums(self.layout, pool_regions),
            group_args=group_args,
            limits=limits or RoomLimits(),
            group=RankGroup(kv_args.rank, links) if links else RankGroup(),
        )
        is_prefill = role is DisaggregationMode.PREFILL
        self.manager: Any = PrefillManager(context) if is_prefill else DecodeManager(context, directory or world.book)

    def fill(self, pages: Sequence[int], seed: int) -> None:
        """Write random bytes into whole pages."""
        rng = np.random.default_rng(seed)
        for component in self.pages:
            component[list(pages)] = rng.integers(0, 256, (len(pages), component.shape[1]), dtype=np.uint8)

    def holds(self, pages: Sequence[int], seed: int) -> bool:
        """Return whether the pages, in this order, hold what `fill` wrote into as many pages elsewhere."""
        rng = np.random.default_rng(seed)
        return all(
            (c[list(pages)] == rng.integers(0, 256, (len(pages), c.shape[1]), dtype=np.uint8)).all() for c in self.pages
        )

    def read(self, page: int) -> bytes:
        """Return all bytes of a page."""
        return b"".join(component[page].tobytes() for component in self.pages)


def _staging(pool: Sequence[Region], slot_bytes: int | None) -> StagingArea | None:
    if slot_bytes is None:
        return None
    return StagingArea(pool, len(pool) + 1, num_slots=8, slot_bytes=slot_bytes)


class SteppedNetwork:
    """Clock, network, messages and directory that the managers of two workers share. `tick` runs the managers."""

    def __init__(self, *, step: bool, late_fences: bool) -> None:
        self.clock = ManualClock(100.0)
        self.network = FakeNetwork(step=step, late_fences=late_fences)
        self.wires = Wires(step=step)
        self.book = FakeDirectory()

    def tick(self, times: int = 1) -> None:
        raise NotImplementedError

    def land(self) -> None:
        """Complete all writes in flight."""
        while busy := self.network.busy_sessions():
            self.network.run_one(busy[0])

    def pass_time(self, seconds: float, step: float = 1.0) -> None:
        """Advance the clock and tick both workers."""
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.clock.advance(step)
            self.tick(2)


class KVWorld(SteppedNetwork):
    def __init__(
        self,
        *,
        step: bool = False,
        late_fences: bool = False,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(step=step, late_fences=late_fences)
        self._graveyard: list[KVWorker] = []
        self.prefill = KVWorker(self, DisaggregationMode.PREFILL, "prefill", epoch=11, **(prefill or {}))
        self.decode = KVWorker(self, DisaggregationMode.DECODE, "decode", epoch=22, **(decode or {}))
        self.book.entries[BOOTSTRAP] = [self.prefill.manager.prefill_info()]

    def replace_prefill(self, *, epoch: int, address: str = "prefill", **args: Any) -> KVWorker:
        """Start a new prefill worker, at the old address by default. Return the old one, which is no longer ticked."""
        old = self.prefill
        self.prefill = KVWorker(self, DisaggregationMode.PREFILL, address, epoch=epoch, **args)
        self.book.entries[BOOTSTRAP] = [self.prefill.manager.prefill_info()]
        return old

    def replace_decode(self, *, epoch: int) -> None:
        """Replace the decode worker, as if its process was killed and restarted at the same address."""
        self.decode.transport.close()
        # Keep the old memory: late bytes may still be written to it.
        self._graveyard.append(self.decode)
        self.decode = KVWorker(self, DisaggregationMode.DECODE, "decode", epoch=epoch)

    def sender(self, room: int = 1, sample: int = 0) -> KVSender:
        sender: KVSender = self.prefill.manager.sender(f"p{room}", BootstrapInfo(*BOOTSTRAP[:2], RoomKey(room, sample)))
        return sender

    def receiver(self, room: int = 1, sample: int = 0) -> KVReceiver:
        receiver: KVReceiver = self.decode.manager.receiver(
            f"d{room}", BootstrapInfo(*BOOTSTRAP[:2], RoomKey(room, sample))
        )
        return receiver

    def tick(self, times: int = 4) -> None:
        """Run everything that is due."""
        for _ in range(times):
            self.decode.manager.tick()
            self.prefill.manager.tick()
            while self.wires.busy():
                self.wires.deliver(self.wires.busy()[0])

    def turns(self) -> list[Callable[[], object]]:
        """Return the functions that must be called repeatedly for progress."""
        return [self.prefill.manager.tick, self.decode.manager.tick]

    def num_rooms(self) -> int:
        """Return the number of room ends that the managers still track."""
        return sum(worker.manager.num_rooms for worker in (self.prefill, self.decode))

    def paired(
        self,
        room: int = 1,
        target: Sequence[int] = (5, 6, 7),
        num_tokens: int | None = None,
        num_held_tokens: int = 0,
    ) -> tuple[KVSender, KVReceiver]:
        """Return both ends of a room after its handshake. `num_tokens` None: as many as the target pages hold."""
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
        """Fill prefill's metadata row of a room."""
        self.prefill.metadata.set_buf(index, MetadataRow(RoomKey(room), token))
