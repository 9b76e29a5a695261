"""The contract of a prefix cache, and a cache that stores nothing.

Pages passed to `insert` belong to the cache from then on; pages returned by `evict` belong to the caller. A locked path
is never evicted. One contract suite, `tests/contract/test_prefix_cache.py`, runs against every implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# The tokens of one page.
PageKey = tuple[int, ...]


class PrefixHandle(Protocol):
    """A place in the cache that can be locked. Opaque to callers."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix: pages of tokens [0, len(pages) x page_size)."""

    pages: list[int]
    handle: PrefixHandle | None


@dataclass(frozen=True, slots=True)
class Evicted:
    """Consecutive pages at the end of a path, which the cache evicted; they belong to the caller."""

    # Keys of every page of the path, from the first token on. The last len(pages) of them are those of `pages`.
    keys: list[PageKey]
    pages: list[int]


def split_pages(tokens: Sequence[int], page_size: int) -> list[PageKey]:
    """Return the tokens of each whole page."""
    return [tuple(tokens[i : i + page_size]) for i in range(0, len(tokens) - page_size + 1, page_size)]


class PrefixCache(Protocol):
    @property
    def remembers(self) -> bool:
        """Whether inserted pages may be found again."""
        ...

    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        """Return the longest cached prefix of `tokens`, in whole pages, and mark it as used; it is not locked."""
        ...

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> tuple[PrefixMatch, list[int]]:
        """Store the KV of `tokens`, page by page; len(tokens) == len(pages) x page_size.

        Returns the cache's own pages for all of `tokens`, and the given pages that it did not take because it held that
        part already (or keeps nothing). The caller keeps these, and frees the ones it owned.
        """
        ...

    def lock(self, handle: PrefixHandle | None) -> None:
        """Keep the path from the root to `handle` from eviction until it is unlocked as often as locked."""
        ...

    def unlock(self, handle: PrefixHandle | None) -> None: ...

    def evict(self, num_pages: int) -> list[Evicted]:
        """Evict least recently used, unlocked pages until `num_pages` are found or none is left. May return more."""
        ...

    @property
    def num_pages(self) -> int:
        """Pages the cache owns."""
        ...

    @property
    def num_evictable_pages(self) -> int:
        """Pages of the cache that are not locked."""
        ...

    def check(self) -> None:
        """Raise AssertionError if counters and structure disagree."""
        ...


class NoPrefixCache:
    """A cache that stores nothing: every prompt is computed anew."""

    remembers = False
    num_pages = 0
    num_evictable_pages = 0

    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        return PrefixMatch([], None)

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> tuple[PrefixMatch, list[int]]:
        return PrefixMatch([], None), list(pages)

    def lock(self, handle: PrefixHandle | None) -> None:
        assert handle is None

    def unlock(self, handle: PrefixHandle | None) -> None:
        assert handle is None

    def evict(self, num_pages: int) -> list[Evicted]:
        return []

    def check(self) -> None:
        return None
