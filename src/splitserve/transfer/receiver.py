"""KVReceiver: the decode end of one room, and the actions of its transitions (table: `state.RECEIVER`).

1. Bootstrapping until its prefill is resolved and the handshake is done; WaitingForInput from then on.
2. `init` announces the target pages to every source. From then on each source may write to them: they are on loan.
3. The loan to a source ends with its TransferStatus, success or failure. If the source is lost, it ends with the fence
   (a drained session). The room succeeds when all sources report success.
4. After a failure the sources get an AbortRoom, repeated while pages are on loan (Stopping). The pages are free when
   all loans have ended (Failed).

`DecodeManager` finds the prefill, checks its heartbeat and receives its messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from splitserve.core.batch import TokenLogprob
from splitserve.core.errors import KVTransferError
from splitserve.core.request import BootstrapInfo
from splitserve.transfer.copies import Copies
from splitserve.transfer.group_wire import AnnouncePages
from splitserve.transfer.metadata import MetadataRow
from splitserve.transfer.peers import PrefillPeer, Source
from splitserve.transfer.reshard import RoomPages
from splitserve.transfer.room import Context, Room
from splitserve.transfer.state import RECEIVER, IllegalTransition, KVEvent, KVPoll, RoomState
from splitserve.transfer.transports.base import PeerAddress, Ticket
from splitserve.transfer.wire import AbortRoom, RoomFailureCause, TransferInfo, TransferStatus


class KVReceiver(Room):
    table = RECEIVER
    free_states = frozenset(RoomState) - {RoomState.TRANSFERRING, RoomState.STOPPING}

    def __init__(
        self,
        context: Context,
        bootstrap: BootstrapInfo,
        rid: str,
        attempt: int,
        peer: PrefillPeer,
        on_clear: Callable[[Room], None],
        link: PeerAddress | None = None,
    ) -> None:
        """`link`: session over which a room without a peer arrives. None: it arrives at once."""
        super().__init__(context, bootstrap.key, rid, on_clear)
        self._link = link
        # Write of a room without a peer. None: there is none, or it has arrived.
        self._arrival: Ticket | None = None
        self.bootstrap = bootstrap
        # Number that distinguishes this use of the room from others.
        self.attempt = attempt
        self.peer = peer
        self.announced_at: float | None = None
        # Clock time to repeat the abort, because a source has not answered it. None: nothing to repeat.
        self.abort_again_at: float | None = None
        # Sessions of sources that may write: they have neither sent their final status nor been fenced.
        self.loans: set[str] = set()
        # Sessions of sources that have sent their final status -> checksum of the source's part.
        self._checksums: dict[str, int | None] = {}
        # The announced pages, and the tokens that prefill writes to them.
        self._pages = RoomPages(())
        self._arriving = range(0)

    def init(
        self,
        pages: Sequence[int],
        metadata_index: int,
        *,
        num_tokens: int,
        num_held_tokens: int = 0,
        prompt_ids: Sequence[int] = (),
        window_pages: Sequence[int] = (),
    ) -> None:
        """Announce the target pages, in token order, and the metadata row. Call once, in WaitingForInput.

        `num_held_tokens`: number of first tokens with their KV in these pages already. Prefill does not write there.
        `prompt_ids`: tokens that prefill must compute, because no router sends it the request. Without a peer, the last
        one becomes the first output token.
        `window_pages`: the window page of each page, if our pool has window pages. -1: we will not read it.
        """
        with self.context.lock:
            if self.poll() is KVPoll.FAILED:
                return
            if self.poll() is KVPoll.BOOTSTRAPPING:
                raise IllegalTransition(f"room {self.key} is BOOTSTRAPPING: some rank has not finished its handshake")
            # Raises if the room is not WaitingForInput, before anything is announced.
            self.advance(KVEvent.STARTED)
            self.announced_at = self.context.clock.now()
            self.loans = {source.session_id for source in self.peer.sources}
            self._pages = RoomPages(list(pages), list(window_pages))
            self._arriving = range(num_held_tokens, num_tokens)
            is_driver = self.context.args.rank.is_driver
            announcement: dict[str, Any] = {
                "pages": self._pages.pages,
                "window_pages": self._pages.window_pages,
                "metadata_index": metadata_index,
                "num_tokens": num_tokens,
                "num_held_tokens": num_held_tokens,
            }
            self.context.expect(max(pages, default=0))
            for source in self.peer.sources:
                info = TransferInfo(
                    session_id=source.session_id,
                    key=self.key,
                    attempt=self.attempt,
                    rid=self.rid,
                    prompt_ids=list(prompt_ids) if is_driver and source.info.args.rank.is_driver else [],
                    **announcement,
                )
                source.post(self.context.mailbox, info)
            if self._reports:
                self.order(AnnouncePages(number=self.number, **announcement))
            if not self.loans:
                self._receive_synthetic(metadata_index, prompt_ids[-1] if prompt_ids else 0)
        self.context.wake()

    def pair_if_ready(self) -> None:
        if self.peer.is_ready and self.state is RoomState.BOOTSTRAPPING:
            self.advance(KVEvent.PAIRED)

    def take_status(self, source: Source, status: TransferStatus) -> None:
        """Apply the final status of a source, which has stopped writing into our pages."""
        self._checksums[source.session_id] = status.checksum
        self.loans.discard(source.session_id)
        if status.failure is not None:
            self.fail(status.failure.to_error(self.key))
        elif not self.loans and self.state is RoomState.TRANSFERRING:
            self._complete()
        self._settle()

    def end_loan(self, session_id: str) -> None:
        """End the loan of a fenced session."""
        self.loans.discard(session_id)
        self._settle()

    def step(self, now: float) -> None:
        """Check the deadline, take synthetic KV that has arrived, and repeat the abort if it is due."""
        if self._arrival is not None and self.context.transport.poll(self._arrival).is_final:
            self._arrival = None
            if self.state is RoomState.TRANSFERRING:
                self._take_synthetic()
        if not self.is_final:
            self._check_deadline(now)
        if self.abort_again_at is not None and now >= self.abort_again_at:
            self.abort_again_at = now + self.context.config.heartbeat_interval
            self._post_abort()

    @property
    def is_over(self) -> bool:
        """Return whether a room without a peer can be forgotten."""
        return self.state is RoomState.CLOSED and self._arrival is None

    def _receive_synthetic(self, metadata_index: int, first_token: int) -> None:
        """Receive a room without a peer, over the link if there is one. Only the driver has a metadata row."""
        if self.context.args.rank.is_driver:
            logprob = TokenLogprob(first_token, 0.0, ())
            row = MetadataRow(key=self.key, output_id=first_token, logprob=logprob)
            self.context.metadata.set_buf(metadata_index, row)
        if self._link is None:
            self._take_synthetic()
        else:
            self._arrival = self.context.transport.write(self._link, self._synthetic_copies())

    def _take_synthetic(self) -> None:
        if self.context.synthetic is not None:
            self.context.synthetic.fill(self._synthetic_copies())
        self._complete()

    def _synthetic_copies(self) -> Copies:
        assert self.context.synthetic is not None
        return self.context.synthetic.copies(self._pages, self._arriving)

    def _complete(self) -> None:
        """Finish a room after all bytes are in place and all writers are done."""
        for source in self.peer.sources:
            if error := self._checksum_error(source):
                self.fail(error)
                return
        if self.context.arrivals is not None and self.peer.sources:
            self.context.arrivals.widen(self._pages, self._arriving, self._arriving.stop)
        self.advance(KVEvent.COMPLETED)

    def _stop(self, informed: object | None) -> None:
        """Send AbortRoom to all sources except `informed`. Repeat until all have sent their TransferStatus."""
        if self.loans:
            self.abort_again_at = self.context.clock.now() + self.context.config.heartbeat_interval
        self._post_abort(informed)
        self._settle()

    def _settle(self) -> None:
        if self.loans:
            return
        self.abort_again_at = None
        if self.state is RoomState.STOPPING:
            self.advance(KVEvent.SETTLED)

    def _post_abort(self, informed: object | None = None) -> None:
        abort = AbortRoom(key=self.key, attempt=self.attempt, cause=RoomFailureCause.of(self.failure()))
        if not self.peer.sources:
            self.peer.unsent_aborts.append((self.bootstrap, abort))
        for source in self.peer.sources:
            if source is not informed and (source.session is None or source.session_id not in self._checksums):
                source.post(self.context.mailbox, abort)

    def _check_deadline(self, now: float) -> None:
        config = self.context.config
        if self.announced_at is not None:
            if now - self.announced_at > config.transfer_timeout:
                stage = "waiting for its KV cache"
                self.fail(self.deadline_error(stage, config.transfer_timeout, "transfer_timeout"))
        elif now - self.opened_at > config.bootstrap_timeout:
            is_paired = self.state is RoomState.WAITING_FOR_INPUT
            stage = "waiting for free pages" if is_paired else f"reaching the {self.peer}"
            self.fail(self.deadline_error(stage, config.bootstrap_timeout, "bootstrap_timeout"))

    def _checksum_error(self, source: Source) -> KVTransferError | None:
        checksums, expected = self.context.checksums, self._checksums[source.session_id]
        if checksums is None or expected is None:
            return None
        other_page_size = source.info.args.layout.page_size
        pages, tokens = self._pages, self._arriving
        found = checksums.of(pages, tokens, tokens.stop, other_page_size, source.pairs)
        if found == expected:
            return None
        return KVTransferError(
            self.key.room,
            f"the KV cache of room {self.key} of request {self.rid} arrived damaged: checksum {found:016x} against "
            f"{expected:016x}: send the request again, and look at the network and the memory of both hosts",
        )
