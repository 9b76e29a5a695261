"""Blocks in a worker's caches, as KV events report them, and the changes since the last report.

1. The prefix cache (`told_prefix.py`) and the host tier record each page stored and removed; a page is a block.
2. Once a turn the scheduler takes the changes, as events in their order, with neighbours joined.
3. `whole` returns the events that bring an empty index into the current state.

Publisher and subscribers are not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from splitserve.cache.page_names import PageName, block_hash
from splitserve.cache.prefix import PageKey
from splitserve.observe.events.index import BlockIndex
from splitserve.observe.events.schema import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, joined


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
