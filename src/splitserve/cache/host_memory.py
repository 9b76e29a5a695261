"""Copies of KV pages in host memory, within a bound.

Requests that gave way (`scheduler/retraction.py`) have one of these, evicted prefixes (`host_tier.py`) another. It
counts bytes; which copy must go when the bound is reached is its owner's business. Pages are numbers in here: who can
copy them is `HostCopies`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class HostCopies(Protocol):
    """Whoever owns the pool's memory. Copies lie in host memory and go when the last reference to them does."""

    @property
    def bytes_per_page(self) -> int: ...

    def bytes_of(self, pages: Sequence[int]) -> int:
        """What a copy of the pages takes: less than so many pages, where some have no window page."""
        ...

    def save(self, pages: Sequence[int]) -> Any:
        """A copy of the pages, in this order. Raises MemoryError where the host has none left."""
        ...

    def restore(self, copy: Any, first: int, pages: Sequence[int]) -> None:
        """Write the copy's pages [first, first + len(pages)) to `pages`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class HostCopy:
    # What `HostCopies.save` gave.
    data: Any
    num_bytes: int


class HostMemory:
    """`limit`: bytes that all copies may take together."""

    def __init__(self, copies: HostCopies, limit: int) -> None:
        self._copies = copies
        self.limit = limit
        self.num_bytes = 0

    @property
    def num_pages_at_most(self) -> int:
        """What fits where nothing else is kept."""
        return self.limit // self._copies.bytes_per_page

    def has_room(self, num_pages: int) -> bool:
        return self.num_bytes + num_pages * self._copies.bytes_per_page <= self.limit

    def save(self, pages: Sequence[int]) -> HostCopy | None:
        """A copy of the pages, counted until it is dropped; None without room for it."""
        if not pages:
            return None
        num_bytes = self._copies.bytes_of(pages)
        if self.num_bytes + num_bytes > self.limit:
            return None
        try:
            data = self._copies.save(pages)
        except MemoryError as error:
            logger.warning("the host has no memory for %d pages of KV: %s", len(pages), error)
            return None
        copy = HostCopy(data, num_bytes)
        self.num_bytes += copy.num_bytes
        return copy

    def restore(self, copy: HostCopy, first: int, pages: Sequence[int]) -> None:
        """Write the copy's pages [first, first + len(pages)) to `pages`. Also of one that was dropped meanwhile."""
        self._copies.restore(copy.data, first, pages)

    def drop(self, copy: HostCopy) -> None:
        """Count it no longer; once."""
        self.num_bytes -= copy.num_bytes
