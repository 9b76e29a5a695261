"""Evicted prefixes in host memory: the tier below the prefix cache (hierarchical caching).

The life of a page in here:
1. The prefix cache evicts it with its neighbours; `keep` copies them together, as one run, before the pages are reused.
   Runs used least recently make room. What is here already is not copied twice.
2. A later prompt matches on where the prefix cache knows no more: `find`. `restore` copies it back into other pages;
   the run stays, so that the next eviction of those pages costs nothing.
3. It goes when its run is the least recently used, or with `clear`.

A page goes by its name (`page_names.py`), since its KV depends on all tokens up to its end. The tier knows nothing of
requests, nor which pages the prefix cache holds.
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
from splitserve.events.schema import CPU_PINNED


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Pages that were copied together. Page i of the copy is the one of this name."""

    names: list[PageName]
    copy: HostCopy


# Page i of a run.
Place = tuple[Run, int]


class HostTier:
    """`record`: where pages that come and go are noted; None: nobody wants to know."""

    def __init__(self, memory: HostMemory, page_size: int, record: BlockRecord | None = None) -> None:
        self._memory = memory
        self._page_size = page_size
        self._record = record
        # Least recently used first.
        self._runs: OrderedDict[Run, None] = OrderedDict()
        self._places: dict[PageName, Place] = {}

    @property
    def num_pages(self) -> int:
        return len(self._places)

    @property
    def num_bytes(self) -> int:
        return self._memory.num_bytes

    def keep(self, evicted: Evicted) -> None:
        """Copy what is not here yet; where the bound holds no more, its first pages, for those behind need them."""
        names = list(page_names(evicted.keys))
        first = len(names) - len(evicted.pages)
        self._touch([self._places[name] for name in names[first:] if name in self._places])
        # Where they stand in the path.
        new = [i for i in range(first, len(names)) if names[i] not in self._places][: self._memory.num_pages_at_most]
        while not self._memory.has_room(len(new)):
            self._drop(next(iter(self._runs)))
        copy = self._memory.save([evicted.pages[i - first] for i in new])
        if copy is None:
            return
        run = Run([names[i] for i in new], copy)
        self._runs[run] = None
        self._places |= {name: (run, i) for i, name in enumerate(run.names)}
        if self._record is not None:
            for i in new:
                behind = names[i - 1] if i else b""
                self._record.stored(names[i : i + 1], behind, evicted.keys[i : i + 1], CPU_PINNED)

    def find(self, tokens: Sequence[int], first: int) -> list[Place]:
        """Of the prompt's whole pages those from number `first` on, as far as they are here without a gap."""
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
        """Write what was found to as many pages, those that neighbour each other in one go."""
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
        """Raise AssertionError where names, runs and bytes disagree."""
        for run in self._runs:
            assert all(self._places[name] == (run, i) for i, name in enumerate(run.names)), "a page has two copies"
        assert len(self._places) == sum(len(run.names) for run in self._runs), "a page is found and its run is gone"
        assert self.num_bytes == sum(run.copy.num_bytes for run in self._runs) <= self._memory.limit

    def _touch(self, places: Sequence[Place]) -> None:
        """They are used now. What begins a prefix goes last, for what follows is of no use without it."""
        for run, _ in reversed(places):
            self._runs.move_to_end(run)

    def _drop(self, run: Run) -> None:
        del self._runs[run]
        for name in run.names:
            del self._places[name]
        if self._record is not None:
            self._record.removed(run.names, CPU_PINNED)
        self._memory.drop(run.copy)
