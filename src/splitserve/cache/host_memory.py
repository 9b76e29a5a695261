"""Copies of KV pages in host memory, within a bound: of retracted requests, and of evicted prefixes.

`HostMemory` counts bytes; its owner decides which copy to drop when the bound is reached. Pages are numbers here;
`HostCopies` copies them. Retracted requests (`scheduler/retraction.py`) have one `HostMemory`, the `HostTier` another.

The tier is below the prefix cache (hierarchical caching). The life of a page in it:
1. The prefix cache evicts it with its neighbours. `keep` copies them together, as one run, before the pages are reused.
   The least recently used runs make room. Pages that are here already are not copied twice.
2. `find` continues the match of a later prompt behind the prefix cache's pages. `restore` copies the pages back; the
   run stays, so that the next eviction of those pages costs nothing.
3. It is dropped when its run is the least recently used, or with `clear`.

A page is identified by its name (`kv_events.py`), because its KV depends on all tokens up to its end.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from splitserve.cache.kv_events import BlockRecord, PageName, page_names
from splitserve.cache.prefix import Evicted, split_pages
from splitserve.observe.events.schema import CPU_PINNED

logger = logging.getLogger(__name__)


class HostCopies(Protocol):
    """The owner of the pool's memory, which makes the copies. If a model is sharded over ranks, that is all ranks."""

    @property
    def bytes_per_page(self) -> int: ...

    def bytes_of(self, pages: Sequence[int]) -> int:
        """Return the bytes of a copy of the pages: fewer if some of them have no window page."""
        ...

    def save(self, pages: Sequence[int]) -> Any:
        """Return a copy of the pages, in this order. Raises MemoryError if a host of its ranks has no memory left."""
        ...

    def restore(self, copy: Any, first: int, pages: Sequence[int]) -> None:
        """Write the copy's pages [first, first + len(pages)) to `pages`."""
        ...

    def drop(self, copy: Any) -> None:
        """Free the copy. On one rank it is freed with the last reference to it, and may be restored until then."""
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
        self.bytes_per_page = copies.bytes_per_page
        self.limit = limit
        self.num_bytes = 0

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
        """Write the copy's pages [first, first + len(pages)) to `pages`.

        A dropped copy can be restored, too, if the model is on one rank.
        """
        self._copies.restore(copy.data, first, pages)

    def drop(self, copy: HostCopy) -> None:
        """Free the copy and stop counting it against the limit. Call once."""
        self.num_bytes -= copy.num_bytes
        self._copies.drop(copy.data)


@dataclass(frozen=True, slots=True, eq=False)
class CopiedRun:
    """Pages that were copied together. Page i of the copy has the name names[i]."""

    names: list[PageName]
    copy: HostCopy


# Page i of a run.
CopiedPage = tuple[CopiedRun, int]


class HostTier:
    """Evicted pages in host memory. `record`: notes pages stored and removed; None: no events are published."""

    def __init__(self, memory: HostMemory, page_size: int, record: BlockRecord | None = None) -> None:
        self._memory = memory
        self._page_size = page_size
        self._record = record
        # Least recently used first.
        self._runs: OrderedDict[CopiedRun, None] = OrderedDict()
        self._copied: dict[PageName, CopiedPage] = {}

    @property
    def num_pages(self) -> int:
        return len(self._copied)

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes

    def keep(self, evicted: Evicted) -> None:
        """Copy pages that the tier lacks. If not all fit, copy the first ones, because the others depend on them."""
        names = list(page_names(evicted.keys))
        first = len(names) - len(evicted.pages)
        self._touch([self._copied[name] for name in names[first:] if name in self._copied])
        # Positions in the path of the pages to copy.
        size, limit = self._memory.bytes_per_page, self._memory.limit
        new = [i for i in range(first, len(names)) if names[i] not in self._copied][: limit // size]
        while self._memory.num_bytes + len(new) * size > limit:
            self._drop(next(iter(self._runs)))
        copy = self._memory.save([evicted.pages[i - first] for i in new])
        if copy is None:
            return
        run = CopiedRun([names[i] for i in new], copy)
        self._runs[run] = None
        self._copied |= {name: (run, i) for i, name in enumerate(run.names)}
        if self._record is not None:
            for i in new:
                behind = names[i - 1] if i else b""
                self._record.stored(names[i : i + 1], behind, evicted.keys[i : i + 1], CPU_PINNED)

    def find(self, tokens: Sequence[int], first: int) -> list[CopiedPage]:
        """Return the prompt's whole pages from number `first` up to the first one that the tier lacks."""
        found: list[CopiedPage] = []
        if not self._copied:
            return found
        for name in islice(page_names(split_pages(tokens, self._page_size)), first, None):
            if (copied := self._copied.get(name)) is None:
                break
            found.append(copied)
        self._touch(found)
        return found

    def restore(self, found: Sequence[CopiedPage], pages: Sequence[int]) -> None:
        """Copy found pages into as many `pages`; consecutive ones in one call."""
        begin = 0
        for end in range(1, len(found) + 1):
            run, i = found[begin]
            if end == len(found) or found[end] != (run, i + end - begin):
                self._memory.restore(run.copy, i, pages[begin:end])
                begin = end

    def clear(self) -> None:
        for run in list(self._runs):
            self._drop(run)

    def check(self) -> None:
        """Raise AssertionError if names, runs and bytes disagree."""
        for run in self._runs:
            assert all(self._copied[name] == (run, i) for i, name in enumerate(run.names)), "a page has two copies"
        assert len(self._copied) == sum(len(run.names) for run in self._runs), "a page is found and its run is gone"
        assert self.num_bytes == sum(run.copy.num_bytes for run in self._runs) <= self._memory.limit

    def _touch(self, pages: Sequence[CopiedPage]) -> None:
        """Mark them as used. The beginning of a prefix is dropped last, because later pages are useless without it."""
        for run, _ in reversed(pages):
            self._runs.move_to_end(run)

    def _drop(self, run: CopiedRun) -> None:
        del self._runs[run]
        for name in run.names:
            del self._copied[name]
        if self._record is not None:
            self._record.removed(run.names, CPU_PINNED)
        self._memory.drop(run.copy)
