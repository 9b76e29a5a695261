"""KVSender: the prefill end of one room.

1. Bootstrapping until decode's TransferInfo pairs it; that may have come before the request did.
2. `send` queues chunks of pages; the manager's thread turns them into ranges of tokens, plans what carries those into
   decode's pages, and hands it to the transport in order.
3. The last chunk is followed by the metadata row. When every ticket is DONE: Success, and decode is told at once.
4. A failure stops new writes. The room is settled, which proves quiescence to decode, when its last ticket is final.

Knows the transport and its room. Who the peers are, and what is said to them, is `PrefillSide`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from splitserve.core.request import RoomKey
from splitserve.disaggregation.copies import copy_table
from splitserve.disaggregation.outgoing import Outgoing
from splitserve.disaggregation.reshard import Plan, plan
from splitserve.disaggregation.room import Context, Room, abort_error
from splitserve.disaggregation.state import KVEvent, KVPoll
from splitserve.disaggregation.transports.base import PeerAddress, WriteState
from splitserve.disaggregation.wire import KVArgs, TransferInfo
from splitserve.errors import KVTransferError, SplitserveError
from splitserve.messages import TransferStats

# Writes smaller than this on average, bytes, are packed where that makes them few.
PACK_BELOW = 4096


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
    # Pages [first, stop) of the room.
    first: int
    stop: int
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
        # All pages sent so far: those of the room from token 0 on.
        self._pages: list[int] = []
        self._last_sent = False
        self._chunks: deque[_Chunk] = deque()
        self._outgoing = Outgoing(context.transport, context.staging)
        # Of what was sent so far; None where it is not asked for.
        self.checksum: int | None = None
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
            first = len(self._pages)
            self._pages += pages
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
    def settled(self) -> bool:
        """No write of this room is under way or waits to be."""
        return not (self._chunks or self._outgoing)

    def pair(self, peer: DecodePeer, info: TransferInfo) -> None:
        self.peer, self.info, self.attempt = peer, info, info.attempt
        self.paired_at = self.context.clock.now()
        self.advance(KVEvent.PAIRED)

    def drop_unsent(self) -> None:
        self._chunks.clear()
        self._outgoing.drop_unsent()

    def submit(self) -> None:
        """Plan the queued chunks and give their writes to the transport, as far as it takes them. Raises ValueError."""
        assert self.peer is not None
        while self._chunks:
            if self._exchanges:
                self._plan_exchange(self._chunks[0], self.peer)
            else:
                self._plan_copies(self._chunks[0], self.peer)
            self._chunks.popleft()
        self._outgoing.submit(self.peer.session)

    def poll_tickets(self) -> tuple[WriteState, str] | None:
        """Forget final tickets. The worst of what went wrong, and why; None where nothing did."""
        num_final, worst = self._outgoing.poll()
        if num_final:
            self.context.changed = True
            if self.context.staging is not None:
                # Rooms that wait for its memory may have been looked at before this one.
                self.context.wake()
        return worst

    def complete_if_done(self) -> bool:
        if self.poll() is not KVPoll.TRANSFERRING or not self._last_sent or not self.settled:
            return False
        now = self.context.clock.now()
        self._stats = TransferStats(
            num_bytes=self._outgoing.num_bytes,
            num_writes=self._outgoing.num_writes,
            num_pages_exchanged=len(self._pages) if self._exchanges else 0,
            seconds=now - self._first_send_at,
            exposed_seconds=now - self._last_send_at,
        )
        self.advance(KVEvent.COMPLETED)
        return True

    def _length_error(self, num_more: int, is_last: bool) -> str | None:
        assert self.info is not None
        page_size, num_tokens = self.context.args.layout.page_size, self.info.num_tokens
        sent, expected = len(self._pages) + num_more, -(-num_tokens // page_size)
        if not 0 <= self.info.num_held_tokens <= num_tokens:
            return f"decode says that it holds {self.info.num_held_tokens} of {num_tokens} tokens of room {self.key}"
        if sent > expected or (is_last and sent != expected):
            ours, theirs = f"{sent} pages of {page_size} tokens", f"{num_tokens} tokens"
            return f"prefill has {ours} for room {self.key}, decode announced {theirs}: the prompts differ"
        return None

    @property
    def _exchanges(self) -> bool:
        """Both sides compute in one pool: pages change owner."""
        pool = self.context.args.shared_pool
        return pool != "" and self.peer is not None and self.peer.args.shared_pool == pool

    def _plan_exchange(self, chunk: _Chunk, peer: DecodePeer) -> None:
        """Nothing until the last chunk: then all pages at once, and the metadata row."""
        assert self.info is not None
        if chunk.metadata_index is None:
            return
        ours, theirs, shared = self._pages[: chunk.stop], self.info.pages, self.context.shared
        assert shared is not None

        def exchange() -> None:
            if not shared.exchange(ours, theirs, tag=self.key.tag, generation=peer.args.generation):
                raise ValueError("decode has left the shared pool")

        self._outgoing.add_action(exchange)
        self._outgoing.add(self._metadata_row(chunk.metadata_index, peer))

    def _plan_copies(self, chunk: _Chunk, peer: DecodePeer) -> None:
        """The writes of a chunk: its tokens, then the metadata row."""
        assert self.info is not None
        info, ours, theirs = self.info, self.context.args, peer.args
        page_size = ours.layout.page_size
        # Every chunk ends with a whole page of ours, but the last with the prompt.
        start, stop = (min(n * page_size, info.num_tokens) for n in (chunk.first, chunk.stop))
        # Decode holds the beginning already.
        start = min(stop, max(start, info.num_held_tokens))
        tokens = plan(
            ours.layout,
            theirs.layout,
            self._pages[: chunk.stop],
            info.pages,
            range(start, stop),
            info.num_tokens,
            wire_dtype=theirs.transfer_dtype,
            pack_below=PACK_BELOW if self.context.staging else 0,
        )
        self._outgoing.add(tokens)
        self._add_to_checksum(range(start, stop), peer)
        if chunk.metadata_index is not None:
            self._outgoing.add(self._metadata_row(chunk.metadata_index, peer))

    def _add_to_checksum(self, tokens: range, peer: DecodePeer) -> None:
        assert self.info is not None
        checksums = self.context.checksums
        if not tokens or checksums is None or not self.context.args.checksums(peer.args):
            return
        part = checksums.of(self._pages, tokens, self.info.num_tokens, peer.args.layout.page_size)
        self.checksum = ((self.checksum or 0) + part) % (1 << 64)

    def _metadata_row(self, index: int, peer: DecodePeer) -> Plan:
        assert self.info is not None
        ours, theirs, target = self.context.args, peer.args, self.info.metadata_index
        if not 0 <= target < theirs.num_metadata_rows:
            raise ValueError(f"decode announced metadata row {target}, which it does not have")
        size = ours.metadata_row_bytes
        source = (len(ours.layout.components), index * size)
        return Plan(copy_table([(*source, len(theirs.layout.components), target * size, size)]), [])
