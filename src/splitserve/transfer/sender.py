"""KVSender: the prefill end of one room, and the actions of its transitions (table: `state.SENDER`).

1. Early until the request arrives, Bootstrapping until every decode rank to write to has sent its TransferInfo.
2. `send` queues chunks of pages. The manager's thread turns them into token ranges, plans for each target the copies
   into that decode rank's pages, and submits them to the transport in order.
3. The last chunk is followed by the metadata row, from driver to driver. When every ticket is DONE, the room is in
   Success and decode gets its final status at once.
4. A failure stops new writes. Decode gets an AbortRoom with the cause at once if writes are in flight (Stopping), and
   the final status when the last ticket is final (Failed). That status proves quiescence to decode.

`PrefillManager` manages peers and incoming messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from splitserve.core.errors import KVTransferError
from splitserve.core.messages import TransferPart, TransferStats
from splitserve.core.request import RoomKey
from splitserve.transfer.group_wire import SendPages
from splitserve.transfer.outgoing import DecodePeer, PageChunk, RoomTarget
from splitserve.transfer.reshard import RoomPages
from splitserve.transfer.room import Context, Room
from splitserve.transfer.state import SENDER, KVEvent, KVPoll, RoomState
from splitserve.transfer.transports.base import WriteState
from splitserve.transfer.wire import AbortRoom, RoomFailureCause, TransferInfo, TransferStatus


class KVSender(Room):
    table = SENDER
    free_states = frozenset({RoomState.SUCCESS, RoomState.FAILED, RoomState.CLOSED})

    def __init__(self, context: Context, key: RoomKey, on_clear: Callable[[Room], None]) -> None:
        super().__init__(context, key, "", on_clear)
        # Decode's number of this use of the room. None: no message from decode yet.
        self.attempt: int | None = None
        # Clock time at which a room that is early or closed is forgotten.
        self.expires_at = 0.0
        # Decode instances that lost their session -> session id. The room's result proves nothing to them.
        self.lost: dict[int, str] = {}
        # One target per decode rank that has announced the room.
        self.targets: list[RoomTarget] = []
        # Number of decode ranks to write to. None: unknown until the first has announced the room.
        self._num_targets: int | None = None
        self._paired_at = 0.0
        # All pages sent so far, from token 0 on, and their window pages if our pool has window pages.
        self._pages: list[int] = []
        self._window_pages: list[int] = []
        self._last_sent = False
        self._chunks: deque[PageChunk] = deque()
        self._first_send_at = self._last_send_at = 0.0
        # Set on success: statistics, and the path of this rank's bytes (`SendingEnd.path`), or "zero_copy".
        self._stats: TransferStats | None = None
        self.path = ""

    def send(
        self,
        pages: Sequence[int],
        *,
        is_last: bool,
        metadata_index: int | None = None,
        window_pages: Sequence[int] = (),
    ) -> None:
        """Queue our pages to be written after those of earlier calls. The i-th page sent goes to the i-th announced.

        `window_pages`: the window page of each page, if our pool has window pages. -1: decode will not read it.

        The last call also writes our metadata row `metadata_index` into the row decode announced. It may send no pages.
        """
        with self.context.lock:
            polled = self.poll()
            if polled is KVPoll.FAILED:
                return
            if polled is KVPoll.BOOTSTRAPPING:
                raise ValueError(f"room {self.key}: send out of order, before every rank knows decode's pages")
            if self._last_sent or is_last != (metadata_index is not None):
                raise ValueError(f"room {self.key}: send(is_last={is_last}) out of order or without its metadata row")
            if error := self._length_error(len(pages), is_last):
                self.fail(KVTransferError(self.key.room, error))
                return
            now = self.context.clock.now()
            if self.state is RoomState.WAITING_FOR_INPUT:
                self.advance(KVEvent.STARTED)
                self._first_send_at = now
            first = len(self._pages)
            self._pages += pages
            self._window_pages += window_pages
            self._chunks.append(PageChunk(first, len(self._pages), metadata_index))
            self._last_sent, self._last_send_at = is_last, now
            if self._reports:
                self.order(
                    SendPages(
                        number=self.number,
                        pages=list(pages),
                        is_last=is_last,
                        metadata_index=metadata_index,
                        window_pages=list(window_pages),
                    )
                )
            if not self.targets:
                self._submit()
                self._complete_if_done()
        self.context.wake()

    def stats(self) -> TransferStats | None:
        """Return the statistics of all ranks together, after Success. Ranks send in parallel: only bytes add up."""
        if not self._reports or self._stats is None:
            return self._stats
        each = [self._stats, *(report.stats for report in self._reports if report.stats)]
        if len(each) <= len(self._reports):
            return None
        return TransferStats(
            num_bytes=sum(s.num_bytes for s in each),
            num_writes=sum(s.num_writes for s in each),
            num_pages_exchanged=max(s.num_pages_exchanged for s in each),
            seconds=max(s.seconds for s in each),
            exposed_seconds=max(s.exposed_seconds for s in each),
            peer=self._stats.peer,
            parts=_with_bytes_of(self._stats.parts, [s.parts for s in each[1:]]),
        )

    def is_announced_by(self, peer: DecodePeer) -> bool:
        return any(target.peer is peer for target in self.targets)

    def open(self, rid: str, *, is_fake: bool = False) -> None:
        """Begin the room of a request. `is_fake`: there is no decode rank to write to."""
        self.rid, self.opened_at = rid, self.context.clock.now()
        if is_fake:
            self._num_targets = 0
        self.advance(KVEvent.OPENED)
        self._pair_if_announced()

    def add_target(self, peer: DecodePeer, info: TransferInfo) -> None:
        """Add a decode rank's announcement. Fail the room if it contradicts the announcement of another rank."""
        self.targets.append(RoomTarget(self.context, self.key, peer, info))
        self.attempt, self._num_targets = info.attempt, peer.num_targets
        first = self.targets[0]
        if (first.info.num_tokens, first.peer.num_targets) == (info.num_tokens, peer.num_targets):
            self._pair_if_announced()
            return
        text = f"ranks of decode announce {first.info.num_tokens} and {info.num_tokens} tokens for room {self.key}"
        ranks = f"{first.peer.num_targets} and {peer.num_targets} ranks"
        self.fail(KVTransferError(self.key.room, f"{text}, of {ranks}: they are not of one worker, or not in step"))

    def lose(self, peer: DecodePeer) -> None:
        """Exclude the target of an ended session: it cannot be notified, and its writes cannot be confirmed."""
        if self.state is RoomState.EARLY:
            self.targets = [target for target in self.targets if target.peer is not peer]
            return
        for target in self.targets:
            target.is_lost |= target.peer is peer
        self.lost[peer.epoch] = peer.session.session_id
        self._settle()

    def step(self, now: float) -> list[tuple[DecodePeer, str]]:
        """Submit new writes, collect finished ones, check the deadline. Return the peers that lost a write, and why."""
        if self.state in (RoomState.BOOTSTRAPPING, RoomState.WAITING_FOR_INPUT):
            self._check_deadline(now)
            return []
        if self.state not in (RoomState.TRANSFERRING, RoomState.STOPPING):
            return []
        try:
            self._submit()
        except ValueError as error:
            self.fail(KVTransferError(self.key.room, f"room {self.key}: {error}"))
        lost = []
        for target in self.targets:
            num_final, worst = target.outgoing.poll(now)
            if num_final and self.context.staging is not None:
                # Tick again: rooms that wait for staging memory may have been polled before this one.
                self.context.wake()
            if worst is None or target.is_lost:
                # Writes to a lost target are not confirmed anyway.
                continue
            state, cause = worst
            if state is WriteState.LOST:
                lost.append((target.peer, f"a write of room {self.key} was lost half-way: {cause}"))
            else:
                self.fail(KVTransferError(self.key.room, f"writing room {self.key} failed: {cause}"))
        if not lost:
            self._complete_if_done()
            self._settle()
        if self.state is RoomState.TRANSFERRING:
            self._check_deadline(now)
        return lost

    def status(self, attempt: int, checksum: int | None = None) -> TransferStatus:
        """Return the result of this rank's end."""
        failure = RoomFailureCause.of(self.failure()) if self._stats is None else None
        return TransferStatus(key=self.key, attempt=attempt, stats=self._stats, failure=failure, checksum=checksum)

    def forget_pages(self) -> None:
        """Free what a closed room does not need to answer late messages."""
        self.targets, self._pages, self._window_pages = [], [], []

    @property
    def _is_settled(self) -> bool:
        """True if no write of this room is in flight or queued."""
        return not self._chunks and not any(target.outgoing for target in self.targets)

    def _pair_if_announced(self) -> None:
        is_announced = self._num_targets is not None and len(self.targets) >= self._num_targets
        if is_announced and self.state is RoomState.BOOTSTRAPPING:
            self._paired_at = self.context.clock.now()
            self.advance(KVEvent.PAIRED)

    def _complete_if_done(self) -> None:
        if self.state is not RoomState.TRANSFERRING or not self._last_sent or not self._is_settled:
            return
        now = self.context.clock.now()
        self._stats = TransferStats(
            num_bytes=sum(target.outgoing.num_bytes for target in self.targets),
            num_writes=sum(target.outgoing.num_writes for target in self.targets),
            num_pages_exchanged=len(self._pages) if any(target.exchanges for target in self.targets) else 0,
            seconds=now - self._first_send_at,
            exposed_seconds=now - self._last_send_at,
            peer=self.targets[0].peer.control_address.removeprefix("tcp://") if self.targets else "",
            parts=_merged(target.outgoing.parts() for target in self.targets),
        )
        paths = {target.outgoing.path for target in self.targets} - {""}
        self.path = "zero_copy" if self._stats.num_pages_exchanged else ",".join(sorted(paths))
        self.advance(KVEvent.COMPLETED)
        self._post_status()

    def _stop(self, informed: object | None) -> None:
        self._chunks.clear()
        for target in self.targets:
            target.outgoing.drop_unsent()
        if self.state is not RoomState.STOPPING:
            self._post_status()
        elif not self._is_settled:
            cause = RoomFailureCause.of(self.failure())
            for target in self.targets:
                self._post(target, AbortRoom(key=self.key, attempt=target.info.attempt, cause=cause))
        self._settle()

    def _settle(self) -> None:
        if self.state is RoomState.STOPPING and self._is_settled:
            self.advance(KVEvent.SETTLED)
            self._post_status()

    def _post_status(self) -> None:
        """Send the final status to all targets. It proves that no write will follow."""
        for target in self.targets:
            self._post(target, self.status(target.info.attempt, target.checksum))
        if self.state is RoomState.REFUSED:
            # They need no further answer when the request arrives.
            self.targets = []

    def _post(self, target: RoomTarget, body: AbortRoom | TransferStatus) -> None:
        # A sink has no address.
        if not target.is_lost and target.peer.control_address:
            self.context.mailbox.post(target.peer.control_address, target.peer.epoch, body)

    def _check_deadline(self, now: float) -> None:
        config = self.context.config
        if self.state is RoomState.BOOTSTRAPPING:
            if now - self.opened_at > config.bootstrap_timeout:
                stage = "waiting for a decode worker to announce its pages"
                if self.targets:
                    stage = "waiting for all ranks of a decode worker to announce their pages"
                self.fail(self.deadline_error(stage, config.bootstrap_timeout, "bootstrap_timeout"))
        elif now - self._paired_at > config.transfer_timeout:
            stage = "computing and sending its KV cache"
            self.fail(self.deadline_error(stage, config.transfer_timeout, "transfer_timeout"))

    def _submit(self) -> None:
        """Plan the queued chunks and submit as many writes as the transport accepts. Raises ValueError."""
        while self._chunks:
            now = self.context.clock.now()
            for target in self.targets:
                target.outgoing.begin_part(now)
                target.plan(self._chunks[0], RoomPages(self._pages, self._window_pages))
            self._chunks.popleft()
        for target in self.targets:
            target.outgoing.submit(target.peer.session)

    def _length_error(self, num_more: int, is_last: bool) -> str | None:
        if not self.targets:
            return None
        page_size, num_tokens = self.context.args.layout.page_size, self.targets[0].info.num_tokens
        sent, expected = len(self._pages) + num_more, -(-num_tokens // page_size)
        for target in self.targets:
            if not 0 <= target.info.num_held_tokens <= num_tokens:
                held = target.info.num_held_tokens
                return f"decode reports that it holds {held} of {num_tokens} tokens of room {self.key}"
        if sent > expected or (is_last and sent != expected):
            ours, theirs = f"{sent} pages of {page_size} tokens", f"{num_tokens} tokens"
            return f"prefill has {ours} for room {self.key}, decode announced {theirs}: the prompts differ"
        return None


def _merged(targets: Iterable[list[TransferPart]]) -> tuple[TransferPart, ...]:
    """Return the parts, merged over all targets, which are written in parallel."""
    return tuple(
        TransferPart(
            start=min(part.start for part in same),
            end=max(part.end for part in same),
            num_bytes=sum(part.num_bytes for part in same),
            num_writes=sum(part.num_writes for part in same),
        )
        for same in zip(*targets, strict=False)
    )


def _with_bytes_of(parts: tuple[TransferPart, ...], others: list[tuple[TransferPart, ...]]) -> tuple[TransferPart, ...]:
    """Return the parts with the bytes of other ranks added. The ranks' clocks differ, so their times are not used."""
    merged = []
    for number, part in enumerate(parts):
        same = [part, *(other[number] for other in others if number < len(other))]
        num_bytes, num_writes = sum(p.num_bytes for p in same), sum(p.num_writes for p in same)
        merged.append(TransferPart(part.start, part.end, num_bytes, num_writes))
    return tuple(merged)
