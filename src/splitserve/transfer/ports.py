"""Interfaces of both ends of a KV transfer, as the queues use them. `manager.py` implements them; tests may, too.

Sender (prefill side)                              Receiver (decode side)
  Bootstrapping    no announcement from decode yet   Bootstrapping    resolving the prefill, handshake
  WaitingForInput  decode's pages are known          WaitingForInput  handshake done: pages may be announced
  Transferring     a chunk has been sent             Transferring     pages announced, data in flight
  Success          all bytes proven in place         Success          all bytes and the metadata row are in place
  Failed           sticky, from any state            Failed           sticky, from any state

`ranks/kv_group.py` implements them for a worker of several ranks, over one KVManager in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from splitserve.core.errors import SplitserveError
from splitserve.core.messages import TransferStats
from splitserve.core.request import BootstrapInfo, RoomKey
from splitserve.transfer.state import KVPoll


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """Tokens for which a decode worker requests the KV, in a room with pages that it has announced."""

    rid: str
    key: RoomKey
    token_ids: list[int]


class SenderPort(Protocol):
    def poll(self) -> KVPoll: ...

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
        ...

    def failure(self) -> SplitserveError:
        """Return the cause. Call only in state Failed."""
        ...

    def abort(self, reason: str, *, status_code: int = 499) -> None:
        """Fail this end and notify the other. Idempotent, no-op once final."""
        ...

    def quiescent(self) -> bool:
        """Return whether this room no longer reads our pages: after Success or a settled failure. Reuse them then."""
        ...

    def stats(self) -> TransferStats | None:
        """Return the statistics. Call only after Success."""
        ...

    def clear(self) -> None:
        """Forget the room. Call once, when final and quiescent."""
        ...


class ReceiverPort(Protocol):
    def poll(self) -> KVPoll: ...

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
        `prompt_ids`: tokens that prefill must compute, because no router sends it the request.
        `window_pages`: the window page of each page, if our pool has window pages. -1: we will not read it.
        """
        ...

    def failure(self) -> SplitserveError: ...

    def abort(self, reason: str, *, status_code: int = 499) -> None: ...

    def quiescent(self) -> bool:
        """Return whether no peer can write to the announced pages: Success, never announced, proven or fenced."""
        ...

    def clear(self) -> None: ...


class ManagerPort(Protocol):
    """KVManager as seen by the queues."""

    def sender(self, rid: str, bootstrap: BootstrapInfo) -> SenderPort:
        """Open the sending end of a room. Raises DuplicateRoomError, CapacityError."""
        ...

    def receiver(self, rid: str, bootstrap: BootstrapInfo) -> ReceiverPort:
        """Open the receiving end of a room. Raises DuplicateRoomError, CapacityError."""
        ...

    def take_asked_prompts(self) -> list[AskedPrompt]:
        """Return prompts that decode workers requested since the last call. Prefill only. Open a sender for each."""
        ...


class RankSender(SenderPort, Protocol):
    """One rank's sending end of a room. Each rank of the worker has its own."""

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` after each later change of state or quiescence. It must not block."""
        ...

    def give_up(self, error: SplitserveError) -> None:
        """Fail this end with that cause and notify the other. Idempotent, no-op once final."""
        ...


class RankReceiver(ReceiverPort, Protocol):
    """One rank's receiving end of a room. Each rank of the worker has its own."""

    def watch(self, on_change: Callable[[], None]) -> None: ...

    @property
    def attempt(self) -> int:
        """Number that distinguishes this use of the room from others."""
        ...

    def give_up(self, error: SplitserveError) -> None: ...


class RankManager(Protocol):
    """KVManager with its thread, as seen by the group manager and by a follower."""

    def sender(self, rid: str, bootstrap: BootstrapInfo) -> RankSender: ...

    def receiver(self, rid: str, bootstrap: BootstrapInfo, attempt: int | None = None) -> RankReceiver:
        """Open the receiving end. `attempt`: the driver's number of this use of the room. None: choose one."""
        ...

    def take_asked_prompts(self) -> list[AskedPrompt]: ...
