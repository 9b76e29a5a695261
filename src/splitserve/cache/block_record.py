"""What a worker's caches hold, as KV events tell it, and what of it has changed since that was last told.

1. The prefix cache (`told_prefix.py`) and the host tier note each page that comes and goes; a page is a block.
2. Once a turn the scheduler takes the news, as events in their order, neighbours joined.
3. Asked for everything, it says what makes an empty index equal to this one.

It does not know who is told, nor how.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from splitserve.cache.page_names import PageName, block_hash
from splitserve.cache.prefix import PageKey
from splitserve.events.index import BlockIndex
from splitserve.events.schema import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, joined


class BlockRecord:
    """`block_size`: tokens of a page."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._index = BlockIndex()
        self._news: list[KVEvent] = []

    def stored(self, names: Iterable[PageName], behind: PageName, keys: Sequence[PageKey], medium: str) -> None:
        """Neighbouring pages and their tokens lie in `medium` now; the first follows the page `behind`, if any."""
        parent = block_hash(behind) if behind else None
        tokens = [token for key in keys for token in key]
        self._note(BlockStored([block_hash(n) for n in names], parent, tokens, self.block_size, medium=medium))

    def removed(self, names: Iterable[PageName], medium: str) -> None:
        self._note(BlockRemoved([block_hash(n) for n in names], medium=medium))

    def take_news(self) -> list[KVEvent]:
        """What has changed since the last call. Where nothing is held any more, that alone is told."""
        news, self._news = self._news, []
        if news and not len(self._index):
            return [AllBlocksCleared()]
        return joined(news)

    def whole(self) -> list[KVEvent]:
        """All that is held, news included."""
        return joined(self._index.as_events())

    def blocks(self) -> dict[int, frozenset[str]]:
        """Hashes, and where each block lies."""
        return self._index.blocks()

    def _note(self, event: KVEvent) -> None:
        self._index.apply(event)
        self._news.append(event)
