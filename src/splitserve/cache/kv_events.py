"""Blocks in a worker's caches, as KV events report them, and the changes since the last report.

1. A page is a block. Its name is a chain of digests: it depends on all tokens up to the page's end, as its KV does.
2. The prefix cache and the host tier record each page stored and removed.
3. Once a turn the scheduler takes the changes, as events in their order, with neighbours joined.
4. `whole` returns the events that bring an empty index into the current state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from struct import pack

from splitserve.observe.events.schema import (
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    KVEvent,
    joined,
)

# The tokens of one page.
PageKey = tuple[int, ...]
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
    """Record of cached blocks. `block_size`: tokens per page. The engine's device is called GPU, even if it is none."""

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
