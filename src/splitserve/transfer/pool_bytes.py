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

import numpy as np
import xxhash
from numpy.typing import NDArray

from splitserve.core.layout import DTYPE_BYTES, KVLayout, Region, first_token_read
from splitserve.transfer.convert import memory_of, unpack
from splitserve.transfer.pairing import HeadPair
from splitserve.transfer.reshard import RoomPages, plan_unpack

_MASK64 = (1 << 64) - 1


class Checksums:
    """Checksums of rooms in one pool. Region i is component i of the layout."""

    def __init__(self, layout: KVLayout, pool: Sequence[Region]) -> None:
        self._layout = layout
        self._pool = [memory_of(region) for region in pool]
        self._whole = [HeadPair(i, i, c.first_head, c.num_heads) for i, c in enumerate(layout.components)]

    def of(
        self,
        pages: RoomPages,
        tokens: range,
        num_tokens: int,
        other_page_size: int,
        pairs: Sequence[HeadPair] | None = None,
        *,
        is_source: bool = False,
    ) -> int:
        """Return the checksum of `tokens` over the heads of `pairs`, in a room of `num_tokens` tokens.

        `pairs`: None: all heads of the pool. `is_source`: the pool is the source of the pairs, not their target.
        `pages` start at token 0. Checksums of consecutive parts add up modulo 2^64 if each part ends at one of our page
        boundaries or at the end of the room.
        """
        total, page_size = 0, self._layout.page_size
        for pair in self._whole if pairs is None else pairs:
            index = pair.src if is_source else pair.dst
            component = self._layout.components[index]
            numbers = pages.of(component.window, self._layout)
            # For a sliding-window layer, only tokens that decode will read were sent.
            first = first_token_read(component.window, num_tokens)
            # The number of the component in the target is common to both ends.
            seed = pair.first_head << 52 | pair.dst << 40
            for start, stop in _pieces(range(max(tokens.start, first), tokens.stop), page_size, other_page_size):
                page, slot = numbers[start // page_size], start % page_size
                rows = self._rows(index, pair, page, range(slot, slot + stop - start))
                total += xxhash.xxh3_64_intdigest(rows, seed=seed | start)
        return total & _MASK64

    def _rows(self, index: int, pair: HeadPair, page: int, slots: range) -> memoryview | bytes:
        """Return the bytes of some slots of a page, token by token, head by head."""
        component, memory, page_size = self._layout.components[index], self._pool[index], self._layout.page_size
        page_bytes = component.page_bytes(page_size)
        if component.axes == "NHD" and pair.num_heads == component.num_heads:
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
        first = pair.first_head - component.first_head
        return rows[slots.start : slots.stop, first : first + pair.num_heads].tobytes()


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
        for cast in plan_unpack(self._layout, pages, tokens, num_tokens, self._wire_dtype):
            unpack(cast, self._pool)
