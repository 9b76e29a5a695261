"""KVSender: the prefill end of one room.

1. Bootstrapping until decode's TransferInfo pairs it; that may have come before the request did.
2. `send` queues chunks of pages; the manager's thread plans their copies and hands them to the transport in order.
3. The last chunk is followed by the metadata row. When every ticket is DONE: Success, and decode is told at once.
4. A failure stops new writes. The room is settled, which proves quiescence to decode, when its last ticket is final.

Knows the transport and its room. Who the peers are, and what is said to them, is `PrefillSide`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from splitserve.core.layout import KVLayout
from splitserve.core.request import RoomKey
from splitserve.disaggregation.copies import Copies, copy_table, num_bytes
from splitserve.disaggregation.reshard import plan_copies
from splitserve.disaggregation.room import Context, Room, abort_error
from splitserve.disaggregation.state import KVEvent, KVPoll
from splitserve.disaggregation.transports.base import PeerAddress, Ticket, WriteState
from splitserve.disaggregation.wire import KVArgs, TransferInfo
from splitserve.errors import CapacityError, KVTransferError, SplitserveError
from splitserve.messages import TransferStats


@dataclass(slots=True, eq=False)
class DecodePeer:
    """A decode rank that registered: one session it opened for us."""

    session: PeerAddress
    control_address: str
    epoch: int
    args: KVArgs
    # Clock time of its last message.
    last_heard: float


class SenderHost(Protocol):
    """What a sender asks of its side."""

    def fail(self, sender: KVSender, error: SplitserveError) -> None: ...

    def remove(self, sender: KVSender) -> None: ...


@dataclass(slots=True)
class _Chunk:
    pages: list[int]
    # Position of the first of them among all pages of the room.
    start: int
    # Our metadata row, after the pages; None unless it is the last chunk.
    metadata_index: int | None


class KVSender(Room):
    def __init__(self, host: SenderHost, context: Context, key: RoomKey, rid: str) -> None:
        super().__init__(context, key, rid)
        self._host = host
        self.peer: DecodePeer | None = None
        self.info: TransferInfo | None = None
        # Decode's number of this use of the room; None until it spoke of the room.
        self.attempt: int | None = None
        self.paired_at = 0.0
        # The last word on this room has been said to decode, or there is nobody to say it to.
        self.told = False
        self._num_pages_sent = 0
        self._last_sent = False
        self._chunks: deque[_Chunk] = deque()
        self._writes: deque[Copies] = deque()
        self._tickets: list[Ticket] = []
        self._num_bytes = 0
        self._first_send_at = self._last_send_at = 0.0
        self._stats: TransferStats | None = None

    # -- SenderPort, for the scheduler's thread -------------------------------------------------------------------

    def send(self, pages: Sequence[int], *, is_last: bool, metadata_index: int | None = None) -> None:
        with self.context.lock:
            if self.poll() is KVPoll.FAILED:
                return
            if self.info is None or self._last_sent or is_last != (metadata_index is not None):
                raise ValueError(f"room {self.key}: send(is_last={is_last}) out of order or without its metadata row")
            if error := self._length_error(len(pages), is_last):
                self._host.fail(self, KVTransferError(self.key.room, error))
                return
            now = self.context.clock.now()
            if self.poll() is KVPoll.WAITING_FOR_INPUT:
                self.advance(KVEvent.STARTED)
                self._first_send_at = now
            self._chunks.append(_Chunk(list(pages), self._num_pages_sent, metadata_index))
            self._num_pages_sent += len(pages)
            self._last_sent, self._last_send_at = is_last, now
        self.context.wake()

    def abort(self, reason: str, *, status_code: int = 499) -> None:
        with self.context.lock:
            self._host.fail(self, abort_error(self.rid, self.key, reason, status_code))
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
    def settled(self) -> bool:
        """No write of this room is under way or waits to be."""
        return not (self._chunks or self._writes or self._tickets)

    def pair(self, peer: DecodePeer, info: TransferInfo) -> None:
        self.peer, self.info, self.attempt = peer, info, info.attempt
        self.paired_at = self.context.clock.now()
        self.advance(KVEvent.PAIRED)

    def drop_unsent(self) -> None:
        self._chunks.clear()
        self._writes.clear()

    def submit(self) -> None:
        """Plan the queued chunks and give their writes to the transport, as far as it takes them. Raises ValueError."""
        assert self.peer is not None
        while self._chunks:
            self._writes += self._plan(self._chunks[0], self.peer.args.layout)
            self._chunks.popleft()
        while self._writes:
            try:
                ticket = self.context.transport.write(self.peer.session, self._writes[0])
            except CapacityError:
                # The transport's queue is full; the next ticket that becomes final wakes us.
                return
            self._tickets.append(ticket)
            self._num_bytes += num_bytes(self._writes.popleft())

    def poll_tickets(self) -> tuple[WriteState, str] | None:
        """Forget final tickets. The worst of what went wrong, and why; None where nothing did."""
        worst: tuple[WriteState, str] | None = None
        pending = []
        for ticket in self._tickets:
            status = self.context.transport.poll(ticket)
            if not status.is_final:
                pending.append(ticket)
            elif status.state is not WriteState.DONE and (worst is None or status.state > worst[0]):
                worst = (status.state, status.error or "no cause given")
        if len(pending) < len(self._tickets):
            self.context.changed = True
        self._tickets = pending
        return worst

    def complete_if_done(self) -> bool:
        if self.poll() is not KVPoll.TRANSFERRING or not self._last_sent or not self.settled:
            return False
        now = self.context.clock.now()
        self._stats = TransferStats(
            num_bytes=self._num_bytes, seconds=now - self._first_send_at, exposed_seconds=now - self._last_send_at
        )
        self.advance(KVEvent.COMPLETED)
        return True

    def _length_error(self, num_more: int, is_last: bool) -> str | None:
        assert self.info is not None
        sent, announced = self._num_pages_sent + num_more, len(self.info.pages)
        if sent > announced or (is_last and sent != announced):
            return f"prefill has {sent} pages for room {self.key}, decode announced {announced}: the prompts differ"
        return None

    def _plan(self, chunk: _Chunk, target: KVLayout) -> list[Copies]:
        """The writes of a chunk: its pages, then the metadata row."""
        assert self.info is not None
        assert self.peer is not None
        source = self.context.args
        target_pages = self.info.pages[chunk.start : chunk.start + len(chunk.pages)]
        writes = [plan_copies(source.layout, target, chunk.pages, target_pages)]
        if chunk.metadata_index is not None:
            if not 0 <= self.info.metadata_index < self.peer.args.num_metadata_rows:
                raise ValueError(f"decode announced metadata row {self.info.metadata_index}, which it does not have")
            region, size = len(source.layout.components), source.metadata_row_bytes
            row = (region, chunk.metadata_index * size, region, self.info.metadata_index * size, size)
            writes.append(copy_table([row]))
        return [write for write in writes if len(write)]
