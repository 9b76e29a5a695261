"""An end-to-end checksum over what one rank writes of a room: what prefill read, against what lies in decode's pages.

The sum does not depend on order, chunks or coalescing: it adds up one hash for each piece of the room, seeded with the
piece's place. Pieces end where a page of either side ends, so both sides cut alike; inside a piece, tokens come before
heads, whatever the pool's axes. Only for pools that the CPU can read, where the bytes travel as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from splitserve.core.layout import DTYPE_BYTES, KVComponent, KVLayout, Region, first_token_read
from splitserve.disaggregation.convert import memory_of
from splitserve.disaggregation.pairing import Pair
from splitserve.disaggregation.reshard import RoomPages

_MASK64 = (1 << 64) - 1


class Slice(NamedTuple):
    """Heads [first_head, first_head + num_heads) of one of our components, and the number both sides know it by."""

    component: int
    number: int
    first_head: int
    num_heads: int


def source_slices(pairs: Sequence[Pair]) -> list[Slice]:
    """What a source sums up, of its own pool."""
    return [Slice(pair.src, pair.dst, pair.first_head, pair.num_heads) for pair in pairs]


def target_slices(pairs: Sequence[Pair]) -> list[Slice]:
    """What a target sums up, of its own pool, to compare with that source."""
    return [Slice(pair.dst, pair.dst, pair.first_head, pair.num_heads) for pair in pairs]


class Checksums:
    """Of rooms in one pool: region i is component i of the layout."""

    def __init__(self, layout: KVLayout, pool: Sequence[Region]) -> None:
        self._layout = layout
        self._pool = [memory_of(region) for region in pool]
        self._whole = [Slice(i, i, c.first_head, c.num_heads) for i, c in enumerate(layout.components)]

    def of(
        self,
        pages: RoomPages,
        tokens: range,
        num_tokens: int,
        other_page_size: int,
        slices: Sequence[Slice] | None = None,
    ) -> int:
        """The part of `tokens` in the sum over `slices` (None: all) of a room of `num_tokens` tokens.

        `pages` start at token 0. Parts add up modulo 2^64, as long as each ends with a page of ours or with the room.
        """
        total, page_size = 0, self._layout.page_size
        for piece in self._whole if slices is None else slices:
            component = self._layout.components[piece.component]
            numbers = pages.of(component.window, self._layout)
            # Of a sliding-window layer only what decode will read has travelled.
            first = first_token_read(component.window, num_tokens)
            seed = piece.first_head << 52 | piece.number << 40
            for start, stop in _pieces(range(max(tokens.start, first), tokens.stop), page_size, other_page_size):
                page, slot = numbers[start // page_size], start % page_size
                rows = self._rows(component, piece, page, range(slot, slot + stop - start))
                total += xxhash.xxh3_64_intdigest(rows, seed=seed | start)
        return total & _MASK64

    def _rows(self, component: KVComponent, piece: Slice, page: int, slots: range) -> memoryview | bytes:
        """The bytes of some slots of a page, token by token, head by head."""
        page_size, memory = self._layout.page_size, self._pool[piece.component]
        page_bytes = component.page_bytes(page_size)
        if component.axes == "NHD" and piece.num_heads == component.num_heads:
            token_bytes = page_bytes // page_size
            offset = page * page_bytes + slots.start * token_bytes
            return memory.data[offset : offset + len(slots) * token_bytes]
        row_bytes = component.head_dim * DTYPE_BYTES[component.dtype]
        shape = (page_size, component.num_heads, row_bytes)
        rows: NDArray[np.uint8] = memory[page * page_bytes : (page + 1) * page_bytes]
        if component.axes == "NHD":
            rows = rows.reshape(shape)
        else:
            rows = rows.reshape(shape[1], shape[0], shape[2]).transpose(1, 0, 2)
        first = piece.first_head - component.first_head
        return rows[slots.start : slots.stop, first : first + piece.num_heads].tobytes()


def _pieces(tokens: range, *page_sizes: int) -> Iterator[tuple[int, int]]:
    start = tokens.start
    while start < tokens.stop:
        stop = min(tokens.stop, *(start - start % size + size for size in page_sizes))
        yield start, stop
        start = stop
