"""Index of one worker's cached blocks, built from its events.

Blocks are found by their tokens and the previous block, so the publisher's hash function need not be known. A block
may be in several media; it is removed when it is in none. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from splitserve.observe.events.schema import GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

_Place = tuple[int | None, tuple[int, ...]]


@dataclass(slots=True)
class _Block:
    # Key of the block: hash of the previous block, and its tokens.
    place: _Place
    media: set[str]


class BlockIndex:
    def __init__(self) -> None:
        # Blocks in order of arrival, so that each follows the block before it in the prompt.
        self._blocks: dict[int, _Block] = {}
        self._by_place: dict[_Place, int] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._blocks

    def apply(self, event: KVEvent) -> None:
        match event:
            case BlockStored():
                self._store(event)
            case BlockRemoved():
                for name in event.block_hashes:
                    self._remove(name, event.medium or GPU)
            case AllBlocksCleared():
                self._blocks.clear()
                self._by_place.clear()

    def replace(self, events: Iterable[KVEvent]) -> None:
        """Replace all blocks by those of these events."""
        self.apply(AllBlocksCleared())
        for event in events:
            self.apply(event)

    def match(self, tokens: Sequence[int], block_size: int) -> int:
        """Return how many of the first `tokens` are cached, in whole blocks."""
        parent: int | None = None
        end = 0
        while end + block_size <= len(tokens):
            name = self._by_place.get((parent, tuple(tokens[end : end + block_size])))
            if name is None:
                break
            parent, end = name, end + block_size
        return end

    def blocks(self) -> dict[int, frozenset[str]]:
        """Return the media of each block, by hash."""
        return {name: frozenset(block.media) for name, block in self._blocks.items()}

    def as_events(self) -> Iterator[BlockStored]:
        """Yield the events that recreate this index from an empty one."""
        for name, block in self._blocks.items():
            parent, tokens = block.place
            for medium in sorted(block.media):
                yield BlockStored([name], parent, list(tokens), len(tokens), medium=medium)

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        for i, name in enumerate(event.block_hashes):
            block = self._blocks.get(name)
            if block is None:
                place = (parent, tuple(event.token_ids[i * size : (i + 1) * size]))
                block = self._blocks[name] = _Block(place, set())
                self._by_place[place] = name
            block.media.add(event.medium or GPU)
            parent = name

    def _remove(self, name: int, medium: str) -> None:
        block = self._blocks.get(name)
        if block is None:
            return
        block.media.discard(medium)
        if not block.media:
            del self._blocks[name]
            if self._by_place.get(block.place) == name:
                del self._by_place[block.place]
