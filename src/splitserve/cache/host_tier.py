"""Evicted prefixes in host memory: the tier below the prefix cache (hierarchical caching).

The life of a page here:
1. The prefix cache evicts it with its neighbours. `keep` copies them together, as one run, before the pages are reused.
   The least recently used runs make room. Pages that are here already are not copied twice.
2. `find` continues the match of a later prompt behind the prefix cache's pages. `restore` copies the pages back; the
   run stays, so that the next eviction of those pages costs nothing.
3. It is dropped when its run is the least recently used, or with `clear`.

A page is identified by its name (`page_names.py`), because its KV depends on all tokens up to its end. Requests and the
content of the prefix cache are not known here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from splitserve.cache.block_record import BlockRecord
from splitserve.cache.host_memory import HostCopy, HostMemory
from splitserve.cache.page_names import PageName, page_names
from splitserve.cache.prefix import Evicted, split_pages
from splitserve.observe.events.schema import CPU_PINNED


@dataclass(frozen=True, slots=True, eq=False)
class CopiedPages:
    """Pages that were copied together. Page i of the copy has the name names[i]."""

    names: list[PageName]
    copy: HostCopy


# Page i of a run.
Place = tuple[CopiedPages, int]


class HostTier:
    """Evicted pages in host memory. `record`: notes pages stored and removed; None: no events are published."""

    def __init__(self, memory: HostMemory, page_size: int, record: BlockRecord | None = None) -> None:
        self._memory = memory
        self._page_size = page_size
        self._record = record
        # Least recently used first.
        self._runs: OrderedDict[CopiedPages, None] = OrderedDict()
        self._places: dict[PageName, Place] = {}

    @property
    def num_pages(self) -> int:
        return len(self._places)

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes

    def keep(self, evicted: Evicted) -> None:
        """Copy pages that the tier lacks. If not all fit, copy the first ones, because the others depend on them."""
        names = list(page_names(evicted.keys))
        first = len(names) - len(evicted.pages)
        self._touch([self._places[name] for name in names[first:] if name in self._places])
        # Positions in the path of the pages to copy.
        new = [i for i in range(first, len(names)) if names[i] not in self._places][: self._memory.num_pages_at_most]
        while not self._memory.has_room(len(new)):
            self._drop(next(iter(self._runs)))
        copy = self._memory.save([evicted.pages[i - first] for i in new])
        if copy is None:
            return
        run = CopiedPages([names[i] for i in new], copy)
        self._runs[run] = None
        self._places |= {name: (run, i) for i, name in enumerate(run.names)}
        if self._record is not None:
            for i in new:
                behind = names[i - 1] if i else b""
                self._record.stored(names[i : i + 1], behind, evicted.keys[i : i + 1], CPU_PINNED)

    def find(self, tokens: Sequence[int], first: int) -> list[Place]:
        """Return the prompt's whole pages from number `first` up to the first one that the tier lacks."""
        found: list[Place] = []
        if not self._places:
            return found
        for name in islice(page_names(split_pages(tokens, self._page_size)), first, None):
            if (place := self._places.get(name)) is None:
                break
            found.append(place)
        self._touch(found)
        return found

    def restore(self, found: Sequence[Place], pages: Sequence[int]) -> None:
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
            assert all(self._places[name] == (run, i) for i, name in enumerate(run.names)), "a page has two copies"
        assert len(self._places) == sum(len(run.names) for run in self._runs), "a page is found and its run is gone"
        assert self.num_bytes == sum(run.copy.num_bytes for run in self._runs) <= self._memory.limit

    def _touch(self, places: Sequence[Place]) -> None:
        """Mark them as used. The beginning of a prefix is dropped last, because later pages are useless without it."""
        for run, _ in reversed(places):
            self._runs.move_to_end(run)

    def _drop(self, run: CopiedPages) -> None:
        del self._runs[run]
        for name in run.names:
            del self._places[name]
        if self._record is not None:
            self._record.removed(run.names, CPU_PINNED)
        self._memory.drop(run.copy)
