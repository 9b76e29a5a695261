"""KVReceiver: the decode end of one room.

1. Bootstrapping until its prefill is resolved and the handshake is done; WaitingForInput from then on.
2. `init` announces the target pages to every source. From then on each source may write to them: they are on loan.
3. The loan to a source ends with its TransferStatus, success or failure. If the source is lost, it ends with the fence
   (a drained session). The pages are free when all loans have ended. The room succeeds when all sources report success.

Depends on its room only. `DecodeSide` finds the prefill, checks its heartbeat and exchanges messages with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from splitserve.core.errors import KVTransferError, SplitserveError
from splitserve.core.request import BootstrapInfo
from splitserve.transfer.checksum import target_slices
from splitserve.transfer.peers import PrefillPeer, Source
from splitserve.transfer.reshard import RoomPages
from splitserve.transfer.room import Context, Room, abort_error
from splitserve.transfer.state import KVEvent, KVPoll
from splitserve.transfer.wire import TransferInfo


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of a room's KV in our pool."""

    # Target pages in token order, including those that already hold the first tokens' KV.
    pages: list[int]
    metadata_index: int
    num_tokens: int
    num_held_tokens: int
    prompt_ids: list[int]
    window_pages: list[int]

    @property
    def room_pages(self) -> RoomPages:
        return RoomPages(self.pages, self.window_pages)

    @property
    def arriving(self) -> range:
        """Tokens that prefill writes."""
        return range(self.num_held_tokens, self.num_tokens)


class ReceiverHost(Protocol):
    """Methods of `DecodeSide` that a receiver calls."""

    def announce(self, receiver: KVReceiver, target: Target) -> None: ...

    def fail(self, receiver: KVReceiver, error: SplitserveError) -> None: ...

    def remove(self, receiver: KVReceiver) -> None: ...


class KVReceiver(Room):
    def __init__(
        self, host: ReceiverHost, context: Context, bootstrap: BootstrapInfo, rid: str, attempt: int, peer: PrefillPeer
    ) -> None:
        super().__init__(context, bootstrap.key, rid)
        self._host = host
        self.bootstrap = bootstrap
        self.attempt = attempt
        self.peer = peer
        self.announced_at: float | None = None
        # Clock time to repeat the abort, because a source has not answered it. None: nothing to repeat.
        self.abort_again_at: float | None = None
        # Sessions of sources that have neither sent the final status of this room nor been fenced.
        self.unsettled: set[str] = set()
        # Sessions of sources that have sent the final status -> checksum of the source's part.
        self.said: dict[str, int | None] = {}
        # The announced target.
        self._target: Target | None = None

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
        with self.context.lock:
            if self.poll() is KVPoll.FAILED:
                return
            # Raises if the room is not WaitingForInput, before anything is announced.
            self.advance(KVEvent.STARTED)
            self.announced_at = self.context.clock.now()
            self.unsettled = {source.session_id for source in self.peer.sources}
            self._target = Target(
                list(pages), metadata_index, num_tokens, num_held_tokens, list(prompt_ids), list(window_pages)
            )
            self._host.announce(self, self._target)
        self.context.wake()

    def announcement_to(self, source: Source, target: Target) -> TransferInfo:
        is_between_drivers = self.context.args.rank.is_driver and source.info.args.rank.is_driver
        return TransferInfo(
            session_id=source.session_id,
            key=self.key,
            attempt=self.attempt,
            rid=self.rid,
            pages=target.pages,
            metadata_index=target.metadata_index,
            num_tokens=target.num_tokens,
            num_held_tokens=target.num_held_tokens,
            prompt_ids=target.prompt_ids if is_between_drivers else [],
            window_pages=target.window_pages,
        )

    def complete(self) -> None:
        """Finish a room after all bytes are in place and all writers are done. For DecodeSide, under the lock."""
        target = self._target
        assert target is not None
        for source in self.peer.sources:
            if error := self._checksum_error(source, target):
                self.fail(error)
                return
        if self.context.arrivals is not None:
            self.context.arrivals.widen(target.room_pages, target.arriving, target.num_tokens)
        self.advance(KVEvent.COMPLETED)

    def _checksum_error(self, source: Source, target: Target) -> KVTransferError | None:
        checksums, expected = self.context.checksums, self.said[source.session_id]
        if checksums is None or expected is None:
            return None
        other_page_size = source.info.args.layout.page_size
        slices = target_slices(source.pairs)
        found = checksums.of(target.room_pages, target.arriving, target.num_tokens, other_page_size, slices)
        if found == expected:
            return None
        return KVTransferError(
            self.key.room,
            f"the KV cache of room {self.key} of request {self.rid} arrived damaged: checksum {found:016x} against "
            f"{expected:016x}: send the request again, and look at the network and the memory of both hosts",
        )

    def abort(self, reason: str, *, status_code: int = 499) -> None:
        self.give_up(abort_error(self.rid, self.key, reason, status_code))

    def give_up(self, error: SplitserveError) -> None:
        with self.context.lock:
            self._host.fail(self, error)
        self.context.wake()

    def quiescent(self) -> bool:
        return not self.unsettled

    def clear(self) -> None:
        with self.context.lock:
            if not (self.is_final and self.quiescent()):
                raise RuntimeError(f"room {self.key} is {self.poll().name}, not quiescent: it cannot be cleared yet")
            self._host.remove(self)
