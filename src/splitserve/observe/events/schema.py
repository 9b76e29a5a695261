"""Format of KV events, the msgpack batches that vLLM, SGLang, Dynamo and llm-d read; and the index built from them.

A batch is `[ts, [events], dp_rank]`. An event is a map with its name in `type`, or, in the older form, an array that
begins with that name and has the same fields in the same order. Both are read; the publisher has an option. A block is
a whole page of tokens; its hash, a signed 64-bit number, covers all tokens up to its end.

In the `BlockIndex`, blocks are found by their tokens and the previous block, so the publisher's hash function need not
be known. A block may be in several media; it is removed when it is in none.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from splitserve.core.errors import SplitserveError

# Media of blocks, in the terms of the format: the engine's device, and host memory.
GPU, CPU_PINNED = "GPU", "CPU_PINNED"


class EventFormatError(SplitserveError):
    """Message that is no batch of KV events."""

    reason = "event_format"


class BlockStored(msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored"):
    """Consecutive blocks. The first follows `parent_block_hash`. None: it begins the prompt."""

    block_hashes: list[int]
    parent_block_hash: int | None
    # Tokens of all these blocks: len(block_hashes) * block_size.
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = GPU
    # Always null, but always sent: vLLM's readers reject an event without it.
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = GPU


class AllBlocksCleared(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    pass


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared

_FIELDS = {kind.__name__: ("type", *kind.__struct_fields__) for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}


class EventBatch(msgspec.Struct, frozen=True):
    # Seconds since the epoch.
    ts: float
    events: list[KVEvent]
    # Data parallel rank of the scheduler with the cache.
    dp_rank: int | None = None

    @classmethod
    def now(cls, events: Sequence[KVEvent], dp_rank: int) -> EventBatch:
        return cls(time.time(), list(events), dp_rank)


class IndexSnapshot(msgspec.Struct, frozen=True):
    """All blocks that a worker held before batch `next_sequence`; applied to an empty index, they recreate its own."""

    next_sequence: int
    # Time of the snapshot, by the clock of the batches.
    ts: float
    events: list[KVEvent]


def joined(events: Iterable[KVEvent]) -> list[KVEvent]:
    """Return the same change in fewer events: consecutive blocks are merged, and so are adjacent removals."""
    result: list[KVEvent] = []
    for event in events:
        last = result[-1] if result else None
        match last, event:
            case BlockStored(), BlockStored() if _continues(last, event):
                last.block_hashes.extend(event.block_hashes)
                last.token_ids.extend(event.token_ids)
            case BlockRemoved(), BlockRemoved() if last.medium == event.medium:
                last.block_hashes.extend(event.block_hashes)
            case _:
                result.append(_copy(event))
    return result


def _continues(last: BlockStored, event: BlockStored) -> bool:
    return last.block_hashes[-1:] == [event.parent_block_hash] and (last.block_size, last.lora_id, last.medium) == (
        event.block_size,
        event.lora_id,
        event.medium,
    )


def _copy(event: KVEvent) -> KVEvent:
    """Return a copy with its own lists, which may grow."""
    match event:
        case BlockStored():
            return msgspec.structs.replace(
                event, block_hashes=list(event.block_hashes), token_ids=list(event.token_ids)
            )
        case BlockRemoved():
            return msgspec.structs.replace(event, block_hashes=list(event.block_hashes))
        case _:
            return event


def encode(batch: EventBatch, *, as_arrays: bool = False) -> bytes:
    """Encode a batch. `as_arrays`: the older form, for readers from before 2026."""
    events: list[Any] = [_as_array(event) for event in batch.events] if as_arrays else list(batch.events)
    return msgspec.msgpack.encode([batch.ts, events, batch.dp_rank])


def decode(data: bytes) -> EventBatch:
    """Decode a batch of either form. Raises EventFormatError for anything else."""
    try:
        ts, events, *rest = msgspec.msgpack.decode(data, type=list[Any])
        return EventBatch(float(ts), [_event(e) for e in events], rest[0] if rest else None)
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError) as error:
        raise EventFormatError(f"not a batch of KV events: {error}") from error


def _as_array(event: KVEvent) -> list[Any]:
    return [type(event).__name__, *msgspec.structs.astuple(event)]


def _event(told: Any) -> KVEvent:
    if isinstance(told, list):
        # Fields that were added later may be missing at the end, or be unknown to this version.
        told = dict(zip(_FIELDS[told[0]], told, strict=False))
    event: KVEvent = msgspec.convert(told, KVEvent)
    return event


# Key of a block: hash of the previous block, and its tokens as 64-bit integers. A router has millions of blocks.
_Place = tuple[int | None, bytes]


@dataclass(slots=True)
class _Block:
    place: _Place
    media: frozenset[str]


class BlockIndex:
    def __init__(self) -> None:
        # The sets of media that occur, each once.
        self._media: dict[frozenset[str], frozenset[str]] = {}
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
            name = self._by_place.get((parent, _packed(tokens[end : end + block_size])))
            if name is None:
                break
            parent, end = name, end + block_size
        return end

    def blocks(self) -> dict[int, frozenset[str]]:
        """Return the media of each block, by hash."""
        return {name: block.media for name, block in self._blocks.items()}

    def as_events(self) -> Iterator[BlockStored]:
        """Yield the events that recreate this index from an empty one."""
        for name, block in self._blocks.items():
            parent, packed = block.place
            tokens = array("q", packed).tolist()
            for medium in sorted(block.media):
                yield BlockStored([name], parent, tokens, len(tokens), medium=medium)

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        for i, name in enumerate(event.block_hashes):
            block = self._blocks.get(name)
            if block is None:
                place = (parent, _packed(event.token_ids[i * size : (i + 1) * size]))
                block = self._blocks[name] = _Block(place, frozenset())
                self._by_place[place] = name
            media = block.media | {event.medium or GPU}
            block.media = self._media.setdefault(media, media)
            parent = name

    def _remove(self, name: int, medium: str) -> None:
        block = self._blocks.get(name)
        if block is None:
            return
        media = block.media - {medium}
        block.media = self._media.setdefault(media, media)
        if not media:
            del self._blocks[name]
            if self._by_place.get(block.place) == name:
                del self._by_place[block.place]


def _packed(tokens: Sequence[int]) -> bytes:
    try:
        return array("q", tokens).tobytes()
    except OverflowError:
        raise EventFormatError(f"a token id has more than 64 bits: {max(map(abs, tokens))}") from None
