"""What one decode rank gets of a room: its plans, and the queue of its writes in the order in which they must land.

`RoomTarget` turns each chunk of pages into copies to that rank's pages, and the last one also into the metadata row.
`Outgoing` executes them, independent of rooms and their states:
1. `add` queues copies, and CastPlans in parts that fit the staging memory.
2. `submit` packs and submits them as far as staging memory and transport allow. The rest waits for the next call.
3. `poll` forgets final tickets and frees their staging memory.
The sender decides what a failure means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

from splitserve.core.errors import CapacityError
from splitserve.core.messages import TransferPart
from splitserve.core.request import RoomKey
from splitserve.transfer.convert import CastPlan, StagingArea
from splitserve.transfer.copies import Copies, copy_table, num_bytes, parts_of
from splitserve.transfer.pairing import HeadPair
from splitserve.transfer.reshard import LayoutPlan, RoomPages, plan
from splitserve.transfer.room import Context
from splitserve.transfer.transports.base import LocalTransport, PeerAddress, Ticket, Transport, WriteState
from splitserve.transfer.wire import KVArgs, TransferInfo

# Writes smaller than this on average, in bytes, are packed if that makes them few.
PACK_BELOW = 4096
# Approximate maximum bytes of one write. A transport has a deadline for each (`write_timeout`), which a slow network
# must meet. `transfer_timeout` limits all of them together.
MAX_WRITE_BYTES = 256 << 20
# Maximum number of parts of a transfer. The last part includes all later writes.
MAX_PARTS = 32


@dataclass(slots=True, eq=False)
class DecodePeer:
    """A registered decode rank, which opened one session for this prefill rank."""

    session: PeerAddress
    control_address: str
    epoch: int
    args: KVArgs
    # The heads of its pages that we write.
    pairs: tuple[HeadPair, ...]
    # Number of ranks of its worker that announce each room to us, including itself.
    num_targets: int
    # Clock time of its last message.
    last_message_at: float


@dataclass(slots=True)
class PageChunk:
    """Pages that the scheduler sends with one call."""

    # Pages [first, stop) of the room.
    first: int
    stop: int
    # Our metadata row, after the pages; None unless it is the last chunk.
    metadata_index: int | None


class RoomTarget:
    """One decode rank's share of a room: plans its writes and queues them."""

    def __init__(self, context: Context, key: RoomKey, peer: DecodePeer, info: TransferInfo) -> None:
        self._context = context
        self._key = key
        self.peer = peer
        self.info = info
        self.outgoing = Outgoing(context.transport, context.staging)
        # Whether its session has ended. Its writes cannot be confirmed any more.
        self.is_lost = False
        # Checksum of what was sent so far. None: not requested.
        self.checksum: int | None = None

    @property
    def exchanges(self) -> bool:
        """Return True if both workers compute in one pool, so that pages change owner instead of being copied."""
        pool = self._context.args.shared_pool
        return pool != "" and self.peer.args.shared_pool == pool

    def plan(self, chunk: PageChunk, pages: RoomPages) -> None:
        """Queue the writes of a chunk. `pages`: the room's, from token 0 on. Raises ValueError."""
        if not self.exchanges:
            self._plan_copies(chunk, pages)
        elif chunk.metadata_index is not None:
            self._plan_exchange(chunk, chunk.metadata_index, pages)

    def _plan_exchange(self, chunk: PageChunk, metadata_index: int, pages: RoomPages) -> None:
        """Exchange all pages and write the metadata row. `chunk`: the last one."""
        ours, theirs, shared = pages.pages[: chunk.stop], self.info.pages, self._context.shared
        assert shared is not None

        def exchange() -> None:
            if not shared.exchange(ours, theirs, tag=self._key.tag, generation=self.peer.args.generation):
                raise ValueError("decode has left the shared pool")

        self.outgoing.add_action(exchange)
        self.outgoing.add(self._metadata_row(metadata_index))

    def _plan_copies(self, chunk: PageChunk, pages: RoomPages) -> None:
        """Plan the writes of a chunk: its tokens and, between drivers, the metadata row."""
        info, ours, theirs = self.info, self._context.args, self.peer.args
        page_size = ours.layout.page_size
        # Every chunk ends with a whole page of ours, except the last, which ends with the prompt.
        start, stop = (min(n * page_size, info.num_tokens) for n in (chunk.first, chunk.stop))
        # Decode already holds the first tokens.
        start = min(stop, max(start, info.num_held_tokens))
        tokens = plan(
            ours.layout,
            theirs.layout,
            RoomPages(pages.pages[: chunk.stop], pages.window_pages[: chunk.stop]),
            RoomPages(info.pages, info.window_pages),
            range(start, stop),
            info.num_tokens,
            self.peer.pairs,
            wire_dtype=theirs.transfer_dtype,
            pack_below=PACK_BELOW if self._context.staging else 0,
        )
        self.outgoing.add(tokens)
        checksums = self._context.checksums
        if start < stop and checksums is not None and ours.checksums(theirs):
            size = theirs.layout.page_size
            more = checksums.of(pages, range(start, stop), info.num_tokens, size, self.peer.pairs, is_source=True)
            self.checksum = ((self.checksum or 0) + more) % (1 << 64)
        if chunk.metadata_index is not None and ours.rank.is_driver and theirs.rank.is_driver:
            self.outgoing.add(self._metadata_row(chunk.metadata_index))

    def _metadata_row(self, index: int) -> LayoutPlan:
        ours, theirs, row = self._context.args, self.peer.args, self.info.metadata_index
        if not 0 <= row < theirs.num_metadata_rows:
            raise ValueError(f"decode announced metadata row {row}, which it does not have")
        size = ours.metadata_row_bytes
        source = (len(ours.layout.components), index * size)
        return LayoutPlan(copy_table([(*source, len(theirs.layout.components), row * size, size)]), [])


@dataclass(slots=True)
class _Part:
    """Writes of one chunk."""

    # Clock times at which the chunk was queued, and at which its last write was confirmed.
    start: float
    end: float
    num_bytes: int = 0
    num_writes: int = 0


class _Write(NamedTuple):
    copies: Copies
    # Staging slot that the copies read. None: they read the pool itself.
    slot: int | None = None


Action = Callable[[], None]


class Outgoing:
    def __init__(self, transport: Transport, staging: StagingArea | None) -> None:
        self._transport = transport
        self._staging = staging
        self._queue: deque[tuple[_Write | CastPlan | Action, _Part]] = deque()
        self._tickets: list[tuple[Ticket, int | None, _Part]] = []
        self._parts: list[_Part] = []
        # Bytes and pieces submitted to the transport so far.
        self.num_bytes = self.num_writes = 0
        # Path of the last write that was done (`SendingEnd.path`).
        self.path = ""

    def __len__(self) -> int:
        """Return the number of writes that are queued or in flight."""
        return len(self._queue) + len(self._tickets)

    def begin_part(self, now: float) -> None:
        """Begin the next part of the transfer. It includes the writes that are queued after this call."""
        if len(self._parts) < MAX_PARTS:
            self._parts.append(_Part(now, now))

    def parts(self) -> list[TransferPart]:
        """Return the parts so far. A part without writes has no length."""
        return [TransferPart(part.start, part.end, part.num_bytes, part.num_writes) for part in self._parts]

    def add(self, plan: LayoutPlan) -> None:
        """Queue a plan. Raises ValueError if it needs staging memory and there is none."""
        for copies in parts_of(plan.copies, MAX_WRITE_BYTES, max(1, len(plan.copies))):
            self._append(_Write(copies))
        for conversion in plan.casts:
            if self._staging is None:
                raise ValueError(f"no staging memory to convert {conversion.src_dtype} to {conversion.dst_dtype} in")
            for piece in self._staging.parts(conversion):
                self._append(piece)

    def add_action(self, action: Action) -> None:
        """Queue a call to run in order, while the peer cannot fence us. The transport must be a LocalTransport."""
        self._append(action)

    def submit(self, peer: PeerAddress) -> None:
        """Submit as many writes as the transport accepts. Call again when a ticket becomes final."""
        while self._queue:
            first, part = self._queue[0]
            try:
                if isinstance(first, CastPlan):
                    assert self._staging is not None
                    packed = self._staging.pack(first, peer.session_id)
                    if packed is None:
                        # The staging memory is full.
                        return
                    first = _Write(packed[1], packed[0])
                    self._queue[0] = (first, part)
                if isinstance(first, _Write):
                    ticket, slot = self._transport.write(peer, first.copies), first.slot
                    size = num_bytes(first.copies)
                    self.num_bytes += size
                    self.num_writes += len(first.copies)
                    part.num_bytes += size
                    part.num_writes += len(first.copies)
                else:
                    ticket, slot = cast(LocalTransport, self._transport).call(peer, first), None
            except CapacityError:
                return
            self._queue.popleft()
            self._tickets.append((ticket, slot, part))

    def poll(self, now: float) -> tuple[int, tuple[WriteState, str] | None]:
        """Forget final tickets. Return their number, and the worst failure with its cause (None: no failure)."""
        worst: tuple[WriteState, str] | None = None
        pending = []
        for ticket, slot, part in self._tickets:
            status = self._transport.poll(ticket)
            if not status.is_final:
                pending.append((ticket, slot, part))
                continue
            self._release(slot)
            part.end = now
            self.path = status.path or self.path
            if status.state is not WriteState.DONE and (worst is None or status.state > worst[0]):
                worst = (status.state, status.error or "no cause given")
        num_final = len(self._tickets) - len(pending)
        self._tickets = pending
        return num_final, worst

    def _append(self, write: _Write | CastPlan | Action) -> None:
        self._queue.append((write, self._parts[-1]))

    def drop_unsent(self) -> None:
        for write, _ in self._queue:
            if isinstance(write, _Write):
                self._release(write.slot)
        self._queue.clear()

    def _release(self, slot: int | None) -> None:
        if slot is not None and self._staging is not None:
            self._staging.release(slot)
