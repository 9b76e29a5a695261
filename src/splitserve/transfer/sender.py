"""KVSender: the prefill end of one room.

1. Bootstrapping until every decode rank to write to has sent its TransferInfo; that may precede the request.
2. `send` queues chunks of pages. The manager's thread turns them into token ranges, plans for each part the copies into
   that decode rank's pages, and submits them to the transport in order.
3. The last chunk is followed by the metadata row, from driver to driver. When every ticket is DONE, the room is in
   Success and decode is notified at once.
4. A failure stops new writes. The room is settled when its last ticket is final. That proves quiescence to decode.

Depends on the transport and its room only. `PrefillSide` manages peers and messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from splitserve.core.errors import KVTransferError, SplitserveError
from splitserve.core.messages import TransferStats
from splitserve.core.request import RoomKey
from splitserve.transfer.checksum import source_slices
from splitserve.transfer.copies import copy_table
from splitserve.transfer.outgoing import Outgoing
from splitserve.transfer.pairing import HeadPair
from splitserve.transfer.reshard import LayoutPlan, RoomPages, plan
from splitserve.transfer.room import Context, Room, abort_error
from splitserve.transfer.state import KVEvent, KVPoll
from splitserve.transfer.transports.base import PeerAddress, WriteState
from splitserve.transfer.wire import KVArgs, TransferInfo

# Writes smaller than this on average, in bytes, are packed if that makes them few.
PACK_BELOW = 4096


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
    last_heard: float


class SenderHost(Protocol):
    """Methods of `PrefillSide` that a sender calls."""

    def fail(self, sender: KVSender, error: SplitserveError) -> None: ...

    def remove(self, sender: KVSender) -> None: ...


@dataclass(slots=True, eq=False)
class RoomPart:
    """One decode rank's share of a room."""

    peer: DecodePeer
    info: TransferInfo
    outgoing: Outgoing
    # Checksum of what was sent so far. None: not requested.
    checksum: int | None = None


@dataclass(slots=True)
class _Chunk:
    # Pages [first, stop) of the room.
    first: int
    stop: int
    # Our metadata row, after the pages; None unless it is the last chunk.
    metadata_index: int | None


class KVSender(Room):
    def __init__(self, host: SenderHost, context: Context, key: RoomKey, rid: str) -> None:
        super().__init__(context, key, rid)
        self._host = host
        # Decode's number of this use of the room. None: no message from decode yet.
        self.attempt: int | None = None
        self.paired_at = 0.0
        # Decode ranks that still need the final status of this room.
        self.untold: list[RoomPart] = []
        # Decode instances that lost their session before the final status was sent -> session id.
        self.lost: dict[int, str] = {}
        # One part per decode rank that has announced the room.
        self._parts: list[RoomPart] = []
        # All pages sent so far, from token 0 on, and their window pages if our pool has window pages.
        self._pages: list[int] = []
        self._window_pages: list[int] = []
        self._last_sent = False
        self._chunks: deque[_Chunk] = deque()
        self._first_send_at = self._last_send_at = 0.0
        self._stats: TransferStats | None = None

    # -- SenderPort, for the scheduler's thread -------------------------------------------------------------------

    def send(
        self,
        pages: Sequence[int],
        *,
        is_last: bool,
        metadata_index: int | None = None,
        window_pages: Sequence[int] = (),
    ) -> None:
        with self.context.lock:
            if self.poll() is KVPoll.FAILED:
                return
            if not self.is_paired or self._last_sent or is_last != (metadata_index is not None):
                raise ValueError(f"room {self.key}: send(is_last={is_last}) out of order or without its metadata row")
            if error := self._length_error(len(pages), is_last):
                self._host.fail(self, KVTransferError(self.key.room, error))
                return
            now = self.context.clock.now()
            if self.poll() is KVPoll.WAITING_FOR_INPUT:
                self.advance(KVEvent.STARTED)
                self._first_send_at = now
            first = len(self._pages)
            self._pages += pages
            self._window_pages += window_pages
            self._chunks.append(_Chunk(first, len(self._pages), metadata_index))
            self._last_sent, self._last_send_at = is_last, now
        self.context.wake()

    def abort(self, reason: str, *, status_code: int = 499) -> None:
        self.give_up(abort_error(self.rid, self.key, reason, status_code))

    def give_up(self, error: SplitserveError) -> None:
        with self.context.lock:
            self._host.fail(self, error)
        self.context.wake()

    def quiescent(self) -> bool:
        return self.is_final and self.settled

    def stats(self) -> TransferStats | None:
        return self._stats

    def clear(self) -> None:
        with self.context.lock:
            if not self.quiescent():
                raise RuntimeError(f"room {self.key} is {self.poll().name}, not quiescent: it cannot be cleared yet")
            self._host.remove(self)

    # -- for PrefillSide, under the lock --------------------------------------------------------------------------

    @property
    def is_announced(self) -> bool:
        """True if at least one decode rank announced the room."""
        return bool(self._parts)

    @property
    def is_paired(self) -> bool:
        """True if all decode ranks to write to announced the room."""
        return bool(self._parts) and len(self._parts) >= self._parts[0].peer.num_targets

    @property
    def settled(self) -> bool:
        """True if no write of this room is in flight or queued."""
        return not self._chunks and not any(part.outgoing for part in self._parts)

    def is_announced_by(self, peer: DecodePeer) -> bool:
        return any(part.peer is peer for part in self._parts)

    def pair(self, peer: DecodePeer, info: TransferInfo) -> SplitserveError | None:
        """Add a decode rank's announcement. Return the error if the room cannot continue, else None."""
        part = RoomPart(peer, info, Outgoing(self.context.transport, self.context.staging))
        self._parts.append(part)
        self.untold.append(part)
        self.attempt = info.attempt
        first = self._parts[0]
        if (first.info.num_tokens, first.peer.num_targets) != (info.num_tokens, peer.num_targets):
            text = f"ranks of decode announce {first.info.num_tokens} and {info.num_tokens} tokens for room {self.key}"
            ranks = f"{first.peer.num_targets} and {peer.num_targets} ranks"
            return KVTransferError(self.key.room, f"{text}, of {ranks}: they are not of one worker, or not in step")
        if self.is_paired:
            self.paired_at = self.context.clock.now()
            self.advance(KVEvent.PAIRED)
        return None

    def lose(self, peer: DecodePeer) -> None:
        """Drop the target of an ended session: it cannot be notified, and its writes cannot be confirmed."""
        self.untold = [part for part in self.untold if part.peer is not peer]
        self.lost[peer.epoch] = peer.session.session_id

    def drop_unsent(self) -> None:
        self._chunks.clear()
        for part in self._parts:
            part.outgoing.drop_unsent()
        self.note_change()

    def submit(self) -> None:
        """Plan the queued chunks and submit as many writes as the transport accepts. Raises ValueError."""
        while self._chunks:
            for part in self._parts:
                if self._exchanges(part):
                    self._plan_exchange(self._chunks[0], part)
                else:
                    self._plan_copies(self._chunks[0], part)
            self._chunks.popleft()
        for part in self._parts:
            part.outgoing.submit(part.peer.session)

    def poll_tickets(self) -> list[tuple[RoomPart, WriteState, str]]:
        """Forget final tickets. Return the worst failure of each part that has one, with its cause."""
        troubles = []
        for part in self._parts:
            num_final, worst = part.outgoing.poll()
            if worst is not None:
                troubles.append((part, *worst))
            if num_final:
                self.note_change()
                if self.context.staging is not None:
                    # Tick again: rooms that wait for staging memory may have been polled before this one.
                    self.context.wake()
        return troubles

    def complete_if_done(self) -> bool:
        if self.poll() is not KVPoll.TRANSFERRING or not self._last_sent or not self.settled:
            return False
        now = self.context.clock.now()
        self._stats = TransferStats(
            num_bytes=sum(part.outgoing.num_bytes for part in self._parts),
            num_writes=sum(part.outgoing.num_writes for part in self._parts),
            num_pages_exchanged=len(self._pages) if self._exchanges(self._parts[0]) else 0,
            seconds=now - self._first_send_at,
            exposed_seconds=now - self._last_send_at,
        )
        self.advance(KVEvent.COMPLETED)
        return True

    def _length_error(self, num_more: int, is_last: bool) -> str | None:
        page_size, num_tokens = self.context.args.layout.page_size, self._parts[0].info.num_tokens
        sent, expected = len(self._pages) + num_more, -(-num_tokens // page_size)
        for part in self._parts:
            if not 0 <= part.info.num_held_tokens <= num_tokens:
                held = part.info.num_held_tokens
                return f"decode says that it holds {held} of {num_tokens} tokens of room {self.key}"
        if sent > expected or (is_last and sent != expected):
            ours, theirs = f"{sent} pages of {page_size} tokens", f"{num_tokens} tokens"
            return f"prefill has {ours} for room {self.key}, decode announced {theirs}: the prompts differ"
        return None

    def _exchanges(self, part: RoomPart) -> bool:
        """Return True if both workers compute in one pool, so that pages change owner instead of being copied."""
        pool = self.context.args.shared_pool
        return pool != "" and part.peer.args.shared_pool == pool

    def _plan_exchange(self, chunk: _Chunk, part: RoomPart) -> None:
        """Exchange all pages and write the metadata row with the last chunk. Earlier chunks do nothing."""
        if chunk.metadata_index is None:
            return
        ours, theirs, shared = self._pages[: chunk.stop], part.info.pages, self.context.shared
        assert shared is not None

        def exchange() -> None:
            if not shared.exchange(ours, theirs, tag=self.key.tag, generation=part.peer.args.generation):
                raise ValueError("decode has left the shared pool")

        part.outgoing.add_action(exchange)
        part.outgoing.add(self._metadata_row(chunk.metadata_index, part))

    def _plan_copies(self, chunk: _Chunk, part: RoomPart) -> None:
        """Plan the writes of a chunk: its tokens and, between drivers, the metadata row."""
        info, ours, theirs = part.info, self.context.args, part.peer.args
        page_size = ours.layout.page_size
        # Every chunk ends with a whole page of ours, except the last, which ends with the prompt.
        start, stop = (min(n * page_size, info.num_tokens) for n in (chunk.first, chunk.stop))
        # Decode already holds the first tokens.
        start = min(stop, max(start, info.num_held_tokens))
        tokens = plan(
            ours.layout,
            theirs.layout,
            RoomPages(self._pages[: chunk.stop], self._window_pages[: chunk.stop]),
            RoomPages(info.pages, info.window_pages),
            range(start, stop),
            info.num_tokens,
            part.peer.pairs,
            wire_dtype=theirs.transfer_dtype,
            pack_below=PACK_BELOW if self.context.staging else 0,
        )
        part.outgoing.add(tokens)
        self._add_to_checksum(range(start, stop), part)
        if chunk.metadata_index is not None and ours.rank.is_driver and theirs.rank.is_driver:
            part.outgoing.add(self._metadata_row(chunk.metadata_index, part))

    def _add_to_checksum(self, tokens: range, part: RoomPart) -> None:
        theirs, checksums = part.peer.args, self.context.checksums
        if not tokens or checksums is None or not self.context.args.checksums(theirs):
            return
        slices = source_slices(part.peer.pairs)
        pages = RoomPages(self._pages, self._window_pages)
        more = checksums.of(pages, tokens, part.info.num_tokens, theirs.layout.page_size, slices)
        part.checksum = ((part.checksum or 0) + more) % (1 << 64)

    def _metadata_row(self, index: int, part: RoomPart) -> LayoutPlan:
        ours, theirs, target = self.context.args, part.peer.args, part.info.metadata_index
        if not 0 <= target < theirs.num_metadata_rows:
            raise ValueError(f"decode announced metadata row {target}, which it does not have")
        size = ours.metadata_row_bytes
        source = (len(ours.layout.components), index * size)
        return LayoutPlan(copy_table([(*source, len(theirs.layout.components), target * size, size)]), [])
