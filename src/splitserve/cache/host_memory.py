"""Copies of KV pages in host memory, within a bound.

Retracted requests (`scheduler/retraction.py`) have one of these, evicted prefixes (`host_tier.py`) another. It counts
bytes; its owner decides which copy to drop when the bound is reached. Pages are numbers here; `HostCopies` copies them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class HostCopies(Protocol):
    """The owner of the pool's memory. Copies are in host memory and freed with the last reference to them."""

    @property
    def bytes_per_page(self) -> int: ...

    def bytes_of(self, pages: Sequence[int]) -> int:
        """Return the bytes of a copy of the pages: fewer if some of them have no window page."""
        ...

    def save(self, pages: Sequence[int]) -> Any:
        """Return a copy of the pages, in this order. Raises MemoryError if the host has no memory left."""
        ...

    def restore(self, copy: Any, first: int, pages: Sequence[int]) -> None:
        """Write the copy's pages [first, first + len(pages)) to `pages`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class HostCopy:
    # Result of `HostCopies.save`.
    data: Any
    num_bytes: int


class HostMemory:
    """Copies of pages within a bound. `limit`: bytes that all copies may take together."""

    def __init__(self, copies: HostCopies, limit: int) -> None:
        self._copies = copies
        self.limit = limit
        self.num_bytes = 0

    @property
    def num_pages_at_most(self) -> int:
        """Maximum number of pages that fit if nothing else is kept."""
        return self.limit // self._copies.bytes_per_page

    def has_room(self, num_pages: int) -> bool:
        return self.num_bytes + num_pages * self._copies.bytes_per_page <= self.limit

    def save(self, pages: Sequence[int]) -> HostCopy | None:
        """Return a copy of the pages. It counts against the limit until it is dropped. None: it does not fit."""
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
        """Write the copy's pages [first, first + len(pages)) to `pages`. A dropped copy can be restored, too."""
        self._copies.restore(copy.data, first, pages)

    def drop(self, copy: HostCopy) -> None:
        """Stop counting the copy against the limit. Call once."""
        self.num_bytes -= copy.num_bytes
