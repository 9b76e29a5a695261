"""KVSender: the prefill end of one room.

1. Bootstrapping until every decode rank that we write to has sent its TransferInfo; that may be before the request.
2. `send` queues chunks of pages; the manager's thread turns them into ranges of tokens, plans for each part what
   carries them into that decode rank's pages, and hands it to the transport in order.
3. The last chunk is followed by the metadata row, from driver to driver. When every ticket is DONE: Success, and
   decode is told at once.
4. A failure stops new writes. The room is settled, which proves quiescence to decode, when its last ticket is final.

Knows the transport and its room. Who the peers are, and what is said to them, is `PrefillSide`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from splitserve.core.request import RoomKey
from splitserve.disaggregation.checksum import source_slices
from splitserve.disaggregation.copies import copy_table
from splitserve.disaggregation.outgoing import Outgoing
from splitserve.disaggregation.pairing import Pair
from splitserve.disaggregation.reshard import Plan, RoomPages, plan
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
    # Our part of its pages.
    pairs: tuple[Pair, ...]
    # Ranks of its worker that announce each room to us, itself among them.
    num_targets: int
    # Clock time of its last message.
    last_heard: float


class SenderHost(Protocol):
    """What a sender asks of its side."""

    def fail(self, sender: KVSender, error: SplitserveError) -> None: ...

    def remove(self, sender: KVSender) -> None: ...


@dataclass(slots=True, eq=False)
class Part:
    """What one decode rank gets of a room."""

    peer: DecodePeer
    info: TransferInfo
    outgoing: Outgoing
    # Of what was sent so far; None where it is not asked for.
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
        # Decode's number of this use of the room; None until it spoke of the room.
        self.attempt: int | None = None
        self.paired_at = 0.0
        # To each of these decode ranks the last word on this room is still to be said.
        self.untold: list[Part] = []
        # Instances of decode ranks whose session ended before it could be said, and these sessions.
        self.lost: dict[int, str] = {}
        # One for each decode rank that has announced the room.
        self._parts: list[Part] = []
        # All pages sent so far: those of the room from token 0 on. And their window pages, where our pool has such.
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
        """By one rank of decode at least."""
        return bool(self._parts)

    @property
    def is_paired(self) -> bool:
        """Announced by all that we write to."""
        return bool(self._parts) and len(self._parts) >= self._parts[0].peer.num_targets

    @property
    def settled(self) -> bool:
        """No write of this room is under way or waits to be."""
        return not self._chunks and not any(part.outgoing for part in self._parts)

    def is_announced_by(self, peer: DecodePeer) -> bool:
        return any(part.peer is peer for part in self._parts)

    def pair(self, peer: DecodePeer, info: TransferInfo) -> SplitserveError | None:
        """Take a decode rank's announcement in. Why the room cannot go on; None where it can."""
        part = Part(peer, info, Outgoing(self.context.transport, self.context.staging))
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
        """The session has ended: there is nobody there any more to tell, and nothing that could be vouched for."""
        self.untold = [part for part in self.untold if part.peer is not peer]
        self.lost[peer.epoch] = peer.session.session_id

    def drop_unsent(self) -> None:
        self._chunks.clear()
        for part in self._parts:
            part.outgoing.drop_unsent()
        self.note_change()

    def submit(self) -> None:
        """Plan the queued chunks and give their writes to the transport, as far as it takes them. Raises ValueError."""
        while self._chunks:
            for part in self._parts:
                if self._exchanges(part):
                    self._plan_exchange(self._chunks[0], part)
                else:
                    self._plan_copies(self._chunks[0], part)
            self._chunks.popleft()
        for part in self._parts:
            part.outgoing.submit(part.peer.session)

    def poll_tickets(self) -> list[tuple[Part, WriteState, str]]:
        """Forget final tickets. For each part in which something went wrong, the worst of it and why."""
        troubles = []
        for part in self._parts:
            num_final, worst = part.outgoing.poll()
            if worst is not None:
                troubles.append((part, *worst))
            if num_final:
                self.note_change()
                if self.context.staging is not None:
                    # Rooms that wait for its memory may have been looked at before this one.
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

    def _exchanges(self, part: Part) -> bool:
        """Both sides compute in one pool: pages change owner."""
        pool = self.context.args.shared_pool
        return pool != "" and part.peer.args.shared_pool == pool

    def _plan_exchange(self, chunk: _Chunk, part: Part) -> None:
        """Nothing until the last chunk: then all pages at once, and the metadata row."""
        if chunk.metadata_index is None:
            return
        ours, theirs, shared = self._pages[: chunk.stop], part.info.pages, self.context.shared
        assert shared is not None

        def exchange() -> None:
            if not shared.exchange(ours, theirs, tag=self.key.tag, generation=part.peer.args.generation):
                raise ValueError("decode has left the shared pool")

        part.outgoing.add_action(exchange)
        part.outgoing.add(self._metadata_row(chunk.metadata_index, part))

    def _plan_copies(self, chunk: _Chunk, part: Part) -> None:
        """The writes of a chunk: its tokens, then, from driver to driver, the metadata row."""
        info, ours, theirs = part.info, self.context.args, part.peer.args
        page_size = ours.layout.page_size
        # Every chunk ends with a whole page of ours, but the last with the prompt.
        start, stop = (min(n * page_size, info.num_tokens) for n in (chunk.first, chunk.stop))
        # Decode holds the beginning already.
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

    def _add_to_checksum(self, tokens: range, part: Part) -> None:
        theirs, checksums = part.peer.args, self.context.checksums
        if not tokens or checksums is None or not self.context.args.checksums(theirs):
            return
        slices = source_slices(part.peer.pairs)
        pages = RoomPages(self._pages, self._window_pages)
        more = checksums.of(pages, tokens, part.info.num_tokens, theirs.layout.page_size, slices)
        part.checksum = ((part.checksum or 0) + more) % (1 << 64)

    def _metadata_row(self, index: int, part: Part) -> Plan:
        ours, theirs, target = self.context.args, part.peer.args, part.info.metadata_index
        if not 0 <= target < theirs.num_metadata_rows:
            raise ValueError(f"decode announced metadata row {target}, which it does not have")
        size = ours.metadata_row_bytes
        source = (len(ours.layout.components), index * size)
        return Plan(copy_table([(*source, len(theirs.layout.components), target * size, size)]), [])
