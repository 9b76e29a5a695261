"""A wrapper of a prefix cache that records its blocks for KV events. Used only if events are published."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.cache.block_record import BlockRecord
from splitserve.cache.page_names import PageName, page_names
from splitserve.cache.prefix import Evicted, PrefixCache, PrefixHandle, PrefixMatch, split_pages
from splitserve.observe.events.schema import GPU


class ToldPrefixCache:
    """PrefixCache with a record. Events give the engine's device as GPU, even if it is none."""

    def __init__(self, cache: PrefixCache, record: BlockRecord) -> None:
        self._cache = cache
        self._record = record
        # Name of each page that the cache owns.
        self._names: dict[int, PageName] = {}

    @property
    def remembers(self) -> bool:
        return self._cache.remembers

    @property
    def num_pages(self) -> int:
        return self._cache.num_pages

    @property
    def num_evictable_pages(self) -> int:
        return self._cache.num_evictable_pages

    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        return self._cache.match(tokens)

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> tuple[PrefixMatch, list[int]]:
        match, given_back = self._cache.insert(tokens, pages)
        # New pages are at the end: pages [first, end) of the path.
        end = first = len(match.pages)
        while first > 0 and match.pages[first - 1] not in self._names:
            first -= 1
        if first < end:
            size = self._record.block_size
            keys = split_pages(tokens[first * size : end * size], size)
            behind = self._names[match.pages[first - 1]] if first else b""
            names = list(page_names(keys, behind))
            self._names.update(zip(match.pages[first:], names, strict=True))
            self._record.stored(names, behind, keys, GPU)
        return match, given_back

    def lock(self, handle: PrefixHandle | None) -> None:
        self._cache.lock(handle)

    def unlock(self, handle: PrefixHandle | None) -> None:
        self._cache.unlock(handle)

    def evict(self, num_pages: int) -> list[Evicted]:
        evicted = self._cache.evict(num_pages)
        for one in evicted:
            self._record.removed([self._names.pop(page) for page in one.pages], GPU)
        return evicted

    def check(self) -> None:
        self._cache.check()
        assert len(self._names) == self._cache.num_pages, "a page is cached and not told, or told and not cached"
