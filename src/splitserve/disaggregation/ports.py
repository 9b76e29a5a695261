"""The two ends of a hand-over as the queues see them. `manager.py` implements them; tests may, too.

Sender (prefill side)                              Receiver (decode side)
  Bootstrapping    no word from decode yet           Bootstrapping    resolving the prefill, shaking hands
  WaitingForInput  decode's pages are known          WaitingForInput  handshake done: pages may be announced
  Transferring     a chunk has been sent             Transferring     pages announced, data on its way
  Success          all bytes proven in place         Success          all bytes and the metadata row are in place
  Failed           sticky, from anywhere             Failed           sticky, from anywhere

`group.py` implements them for a worker of several ranks, over one KVManager in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from splitserve.core.request import BootstrapInfo, RoomKey
from splitserve.disaggregation.state import KVPoll
from splitserve.errors import SplitserveError
from splitserve.messages import TransferStats


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """Tokens whose KV a decode worker asks for, in a room whose pages it has announced."""

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
        """Queue our pages to be written after those sent before: the i-th page sent goes to the i-th page announced.

        `window_pages`: theirs, where our pool has such; -1 for what decode will not read.

        The last call also writes our metadata row `metadata_index` into the row decode announced. It may send no pages.
        """
        ...

    def failure(self) -> SplitserveError:
        """Why it Failed. Only then."""
        ...

    def abort(self, reason: str, *, status_code: int = 499) -> None:
        """Fail this end and tell the other. Idempotent, no-op once final."""
        ...

    def quiescent(self) -> bool:
        """Nothing reads our pages for this room any more: they may be reused. After Success or settled failure."""
        ...

    def stats(self) -> TransferStats | None:
        """After Success."""
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
        """Announce the target pages, in token order, and the metadata row. Once, in WaitingForInput.

        `window_pages`: theirs, where our pool has such; -1 for what we will not read.

        `num_held_tokens`: the KV of the first so many is in these pages already; nobody writes to them.
        `prompt_ids`: ask prefill to compute these, for nobody else will.
        """
        ...

    def failure(self) -> SplitserveError: ...

    def abort(self, reason: str, *, status_code: int = 499) -> None: ...

    def quiescent(self) -> bool:
        """Nobody writes, or can still write, to the announced pages: Success, never announced, proven or fenced."""
        ...

    def clear(self) -> None: ...


class ManagerPort(Protocol):
    """KVManager as the queues see it."""

    def sender(self, rid: str, bootstrap: BootstrapInfo) -> SenderPort:
        """Open the sending end of a room. Raises DuplicateRoomError, CapacityError."""
        ...

    def receiver(self, rid: str, bootstrap: BootstrapInfo) -> ReceiverPort:
        """Open the receiving end of a room. Raises DuplicateRoomError, CapacityError."""
        ...

    def take_asked_prompts(self) -> list[AskedPrompt]:
        """Prefill: what decode workers have asked for since the last call. Open a sender for each."""
        ...


class RankSender(SenderPort, Protocol):
    """One rank's sending end of a room that all ranks of its worker have."""

    def watch(self, on_change: Callable[[], None]) -> None:
        """Have `on_change` called after each change of its state or quiescence from now on. It must not wait."""
        ...

    def give_up(self, error: SplitserveError) -> None:
        """Fail this end with that cause, and tell the other. Idempotent, no-op once final."""
        ...


class RankReceiver(ReceiverPort, Protocol):
    """One rank's receiving end of a room that all ranks of its worker have."""

    def watch(self, on_change: Callable[[], None]) -> None: ...

    @property
    def attempt(self) -> int:
        """The number of this use of the room."""
        ...

    def give_up(self, error: SplitserveError) -> None: ...


class RankManager(Protocol):
    """KVManager, and its thread, as the group manager and a follower see them."""

    def sender(self, rid: str, bootstrap: BootstrapInfo) -> RankSender: ...

    def receiver(self, rid: str, bootstrap: BootstrapInfo, attempt: int | None = None) -> RankReceiver:
        """`attempt`: the number that the driver's rank drew for this use of the room; None: draw one."""
        ...

    def take_asked_prompts(self) -> list[AskedPrompt]: ...
