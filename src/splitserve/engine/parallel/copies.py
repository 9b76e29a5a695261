"""Copies of pages in host memory on all ranks of a group: each rank copies its own part of each page.

The driver's scheduler decides which pages are copied and restored, and which copies are dropped. The orders use the
pipe of the steps, so each rank executes them between the same steps:

1. `CopyPages`: every rank copies its part, then all vote. The copy exists only if every rank has its part. If one has
   no memory for it, or fails, all drop their parts at once.
2. `RestorePages`: every rank writes its part back. A step that reads these pages follows in the same pipe, so no answer
   is needed. A rank that fails is out of step, and ends.
3. `DropCopy`: every rank frees its part.

The vote is a collective, so the driver waits until every rank has made its part. If a rank is lost, the
vote raises RanksLostError, as a step does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from splitserve.core.errors import EngineError, RanksLostError, clause
from splitserve.engine.parallel.ranks import Ranks
from splitserve.engine.pool import KVPool, PageBytes

logger = logging.getLogger(__name__)

Pages = npt.NDArray[np.int64]
# Exchanges this rank's vote for those of all ranks. Returns whether all agree. Raises RanksLostError.
Vote = Callable[[bool], bool]


class RankPool(Protocol):
    """One rank's part of all pages."""

    def window_pages(self, pages: Sequence[int]) -> Pages:
        """Return the window page of each page; -1 if it has none. On the driver alone."""
        ...

    def copy_out(self, pages: Pages, window_pages: Pages) -> Any:
        """Return a copy of this rank's part. Raises MemoryError."""
        ...

    def copy_in(self, copy: Any, first: int, pages: Pages, window_pages: Pages) -> None: ...


class CopyPages(msgspec.Struct, frozen=True, array_like=True, tag="copy", gc=False):
    """Copy these pages. Arrays are the bytes of int64 numbers. `window_pages`: -1 for a page without one."""

    # Number of the copy, counted from 0.
    number: int
    pages: bytes
    window_pages: bytes


class RestorePages(msgspec.Struct, frozen=True, array_like=True, tag="restore", gc=False):
    """Write the pages of a copy, from number `first` on, to these pages."""

    number: int
    first: int
    pages: bytes
    window_pages: bytes


class DropCopy(msgspec.Struct, frozen=True, array_like=True, tag="drop", gc=False):
    """Free the copy."""

    number: int


CopyOrder = CopyPages | RestorePages | DropCopy
_encoder = msgspec.msgpack.Encoder()


class RankCopies:
    """One rank's parts of the copies. The driver applies its orders here, too."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool
        # Number of a copy -> this rank's part.
        self._parts: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def copy(self, order: CopyPages) -> bool:
        """Copy this rank's part. Return False if that failed; then nothing is kept."""
        try:
            part = self._pool.copy_out(_array(order.pages), _array(order.window_pages))
        except MemoryError as error:
            logger.warning("no host memory on this rank for a copy of KV: %s", error)
            return False
        except Exception:
            logger.exception("this rank could not copy KV to host memory")
            return False
        self._parts[order.number] = part
        return True

    def restore(self, order: RestorePages) -> None:
        self._pool.copy_in(self._part(order.number), order.first, _array(order.pages), _array(order.window_pages))

    def drop(self, number: int) -> None:
        """Free this rank's part of the copy, if it has one."""
        self._parts.pop(number, None)

    def _part(self, number: int) -> Any:
        if (part := self._parts.get(number)) is None:
            raise EngineError(f"the driver ordered this rank to restore copy {number} of KV, which it does not have")
        return part


class FollowerCopies:
    """Copies of a follower, which executes the driver's orders."""

    def __init__(self, copies: RankCopies, vote: Vote) -> None:
        self._copies = copies
        self._vote = vote

    def run(self, order: CopyOrder) -> None:
        """Execute one order. After an error the ranks are out of step."""
        match order:
            case CopyPages(number=number):
                if not self._vote(self._copies.copy(order)):
                    self._copies.drop(number)
            case RestorePages():
                self._copies.restore(order)
            case DropCopy(number=number):
                self._copies.drop(number)


class GroupCopies:
    """HostCopies of a driver: the copies of all ranks. A copy is represented by its number.

    `send`: sends an order to every follower. `page_bytes`: sum over all ranks of the group.
    """

    def __init__(self, pool: RankPool, send: Callable[[bytes], None], vote: Vote, page_bytes: PageBytes) -> None:
        self._pool = pool
        self._own = RankCopies(pool)
        self._send = send
        self._vote = vote
        self._page_bytes = page_bytes
        self._num_copies = 0

    @property
    def bytes_per_page(self) -> int:
        return self._page_bytes.full + self._page_bytes.windowed

    def bytes_of(self, pages: Sequence[int]) -> int:
        """Return the bytes of a copy of the pages, on all ranks together."""
        return self._page_bytes.of(self._pool.window_pages(pages))

    def save(self, pages: Sequence[int]) -> int:
        """Copy the pages on all ranks. Raises MemoryError if any rank could not; then no rank keeps a part.

        Raises RanksLostError if the ranks are out of step.
        """
        number, self._num_copies = self._num_copies, self._num_copies + 1
        order = CopyPages(number, _bytes(pages), _bytes(self._pool.window_pages(pages)))
        self._send_order(order)
        if not self._vote(self._own.copy(order)):
            self._own.drop(number)
            raise MemoryError("a rank of this worker could not copy its part of the KV: its log has the reason")
        return number

    def restore(self, copy: int, first: int, pages: Sequence[int]) -> None:
        order = RestorePages(copy, first, _bytes(pages), _bytes(self._pool.window_pages(pages)))
        self._send_order(order)
        self._own.restore(order)

    def drop(self, copy: int) -> None:
        """Free the copy on all ranks."""
        self._send_order(DropCopy(copy))
        self._own.drop(copy)

    def _send_order(self, order: CopyOrder) -> None:
        try:
            self._send(_encoder.encode(order))
        except Exception as error:
            raise RanksLostError(
                f"An order about copies of KV could not be sent to the other ranks of this worker: "
                f"{type(error).__name__}: {clause(error)}. Restart the worker."
            ) from error


def page_bytes_of_ranks(pool: KVPool, ranks: Ranks) -> PageBytes:
    """Return the bytes of the copy of a page on all ranks together. Every rank calls it. Raises RanksLostError."""
    return PageBytes(ranks.total(pool.page_bytes.full), ranks.total(pool.page_bytes.windowed))


def _bytes(pages: Sequence[int] | Pages) -> bytes:
    return np.asarray(pages, dtype=np.int64).tobytes()


def _array(data: bytes) -> Pages:
    return np.frombuffer(data, dtype=np.int64).copy()
