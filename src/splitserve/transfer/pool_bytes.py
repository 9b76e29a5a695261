"""Work of the CPU on a room's bytes in our own pool: checksums, and widening of KV that travelled in a narrower dtype.

The checksum compares, end to end, the part of a room that one rank writes: KV as prefill reads it against KV in
decode's pages. It does not depend on order, chunks or coalescing. It adds one hash per piece of the room, seeded with
the piece's position. Pieces end at page boundaries of both workers, so both compute the same pieces. Inside a piece,
bytes are ordered by token, then head, for every axis order of the pool. Only for bytes sent without conversion.

Widening happens inside the pages that the KV arrived in. It runs only after the final status from prefill, because
nothing else may access the pages meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from splitserve.core.layout import DTYPE_BYTES, KVComponent, KVLayout, Region, first_token_read
from splitserve.transfer.convert import memory_of, unpack
from splitserve.transfer.pairing import HeadPair
from splitserve.transfer.reshard import RoomPages, plan_unpack

_MASK64 = (1 << 64) - 1


class Slice(NamedTuple):
    """Heads [first_head, first_head + num_heads) of one component, and the component's number common to both ends."""

    component: int
    number: int
    first_head: int
    num_heads: int


def source_slices(pairs: Sequence[HeadPair]) -> list[Slice]:
    """Return the slices of the source's pool that its checksum covers."""
    return [Slice(pair.src, pair.dst, pair.first_head, pair.num_heads) for pair in pairs]


def target_slices(pairs: Sequence[HeadPair]) -> list[Slice]:
    """Return the slices of the target's pool that cover the same heads as the source's checksum."""
    return [Slice(pair.dst, pair.dst, pair.first_head, pair.num_heads) for pair in pairs]


class Checksums:
    """Checksums of rooms in one pool. Region i is component i of the layout."""

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
        """Return the checksum of `tokens` over `slices` (None: all), in a room of `num_tokens` tokens.

        `pages` start at token 0. Checksums of consecutive parts add up modulo 2^64 if each part ends at one of our page
        boundaries or at the end of the room.
        """
        total, page_size = 0, self._layout.page_size
        for piece in self._whole if slices is None else slices:
            component = self._layout.components[piece.component]
            numbers = pages.of(component.window, self._layout)
            # For a sliding-window layer, only tokens that decode will read were sent.
            first = first_token_read(component.window, num_tokens)
            seed = piece.first_head << 52 | piece.number << 40
            for start, stop in _pieces(range(max(tokens.start, first), tokens.stop), page_size, other_page_size):
                page, slot = numbers[start // page_size], start % page_size
                rows = self._rows(component, piece, page, range(slot, slot + stop - start))
                total += xxhash.xxh3_64_intdigest(rows, seed=seed | start)
        return total & _MASK64

    def _rows(self, component: KVComponent, piece: Slice, page: int, slots: range) -> memoryview | bytes:
        """Return the bytes of some slots of a page, token by token, head by head."""
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


class Arrivals:
    def __init__(self, layout: KVLayout, pool: Sequence[Region], wire_dtype: str) -> None:
        self._layout = layout
        self._pool = [memory_of(region) for region in pool]
        self._wire_dtype = wire_dtype

    def widen(self, pages: RoomPages, tokens: range, num_tokens: int) -> None:
        """Widen `tokens` of a room of `num_tokens` tokens."""
        for cast in plan_unpack(self._layout, pages, tokens, num_tokens, self._wire_dtype):
            unpack(cast, self._pool)
