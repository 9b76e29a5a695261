"""Blocks in a worker's caches, as KV events report them, and the changes since the last report.

1. A page is a block. Its name is a chain of digests: it depends on all tokens up to the page's end, as its KV does.
2. The prefix cache (`RecordedRadixCache`) and the host tier record each page stored and removed.
3. Once a turn the scheduler takes the changes, as events in their order, with neighbours joined.
4. `whole` returns the events that bring an empty index into the current state.

Publisher and subscribers are not known here. Without a publisher nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from struct import pack

from splitserve.cache.prefix import Evicted, PageKey, PrefixMatch, RadixCache, split_pages
from splitserve.observe.events.schema import (
    GPU,
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    KVEvent,
    joined,
)

PageName = bytes


def page_names(keys: Iterable[PageKey], behind: PageName = b"") -> Iterator[PageName]:
    """Return the name of each page. The first page follows the page named `behind`; empty: it begins the prompt.

    Names are 128 bits of a cryptographic hash, so two different prompts do not get the same name. No secret is part of
    it: a page has the same name on every worker and after every start.
    """
    name = behind
    for key in keys:
        name = blake2b(name + pack(f"{len(key)}q", *key), digest_size=16).digest()
        yield name


def block_hash(name: PageName) -> int:
    """Return the page's hash in KV events: a signed 64-bit number."""
    return int.from_bytes(name[:8], "little", signed=True)


class BlockRecord:
    """Record of cached blocks. `block_size`: tokens per page."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._index = BlockIndex()
        self._news: list[KVEvent] = []

    def stored(self, names: Iterable[PageName], behind: PageName, keys: Sequence[PageKey], medium: str) -> None:
        """Record consecutive pages stored in `medium`, with their tokens.

        The first one follows the page `behind`; empty: it begins the prompt.
        """
        parent = block_hash(behind) if behind else None
        tokens = [token for key in keys for token in key]
        self._note(BlockStored([block_hash(n) for n in names], parent, tokens, self.block_size, medium=medium))

    def removed(self, names: Iterable[PageName], medium: str) -> None:
        self._note(BlockRemoved([block_hash(n) for n in names], medium=medium))

    def take_news(self) -> list[KVEvent]:
        """Return the changes since the last call. If no block is left: a single event that clears all."""
        news, self._news = self._news, []
        if news and not len(self._index):
            return [AllBlocksCleared()]
        return joined(news)

    def whole(self) -> list[KVEvent]:
        """Return events for all blocks, recent changes included."""
        return joined(self._index.as_events())

    def blocks(self) -> dict[int, frozenset[str]]:
        """Return the hash of each block and the media that hold it."""
        return self._index.blocks()

    def _note(self, event: KVEvent) -> None:
        self._index.apply(event)
        self._news.append(event)


class RecordedRadixCache(RadixCache):
    """RadixCache with a record. Events give the engine's device as GPU, even if it is none."""

    def __init__(self, record: BlockRecord) -> None:
        super().__init__(record.block_size)
        self._record = record
        # Name of each page that the cache owns.
        self._names: dict[int, PageName] = {}

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> tuple[PrefixMatch, list[int]]:
        match, given_back = super().insert(tokens, pages)
        # New pages are at the end: pages [first, end) of the path.
        end = first = len(match.pages)
        while first > 0 and match.pages[first - 1] not in self._names:
            first -= 1
        if first < end:
            size = self.page_size
            keys = split_pages(tokens[first * size : end * size], size)
            behind = self._names[match.pages[first - 1]] if first else b""
            names = list(page_names(keys, behind))
            self._names.update(zip(match.pages[first:], names, strict=True))
            self._record.stored(names, behind, keys, GPU)
        return match, given_back

    def evict(self, num_pages: int) -> list[Evicted]:
        evicted = super().evict(num_pages)
        for one in evicted:
            self._record.removed([self._names.pop(page) for page in one.pages], GPU)
        return evicted

    def check(self) -> None:
        super().check()
        assert len(self._names) == self.num_pages, "a page is cached and not recorded, or recorded and not cached"
