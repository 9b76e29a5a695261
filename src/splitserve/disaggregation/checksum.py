"""An end-to-end checksum over the KV of a room: what prefill read, against what lies in decode's pages.

The sum does not depend on order, chunks or coalescing: it adds up one hash for each piece of the room, seeded with the
piece's place. Pieces end where a page of either side ends, so both sides cut alike. Only for pools that the CPU can
read, with the same components, where the bytes travel as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

from splitserve.core.layout import KVLayout, Region, first_token_read
from splitserve.disaggregation.convert import memory_of

_MASK64 = (1 << 64) - 1


class Checksums:
    """Of rooms in one pool: region i is component i of the layout."""

    def __init__(self, layout: KVLayout, pool: Sequence[Region]) -> None:
        self._layout = layout
        self._pool = [memory_of(region).data for region in pool]

    def of(self, pages: Sequence[int], tokens: range, num_tokens: int, other_page_size: int) -> int:
        """The part of `tokens` in the sum over a room of `num_tokens` tokens. `pages` start at token 0.

        Parts add up modulo 2^64, as long as each ends with a page of ours or with the room.
        """
        total, page_size = 0, self._layout.page_size
        for i, component in enumerate(self._layout.components):
            memory, page_bytes = self._pool[i], component.page_bytes(page_size)
            token_bytes = page_bytes // page_size
            # Of a sliding-window layer only what decode will read has travelled.
            first = first_token_read(component.window, num_tokens)
            for start, stop in _pieces(range(max(tokens.start, first), tokens.stop), page_size, other_page_size):
                offset = pages[start // page_size] * page_bytes + start % page_size * token_bytes
                piece = memory[offset : offset + (stop - start) * token_bytes]
                total += xxhash.xxh3_64_intdigest(piece, seed=i << 40 | start)
        return total & _MASK64


def can_compare(src: KVLayout, dst: KVLayout) -> bool:
    """Whether a token's bytes are the same, in one piece, in both pools."""
    return src.components == dst.components and all(c.axes == "NHD" for c in src.components)


def _pieces(tokens: range, *page_sizes: int) -> Iterator[tuple[int, int]]:
    start = tokens.start
    while start < tokens.stop:
        stop = min(tokens.stop, *(start - start % size + size for size in page_sizes))
        yield start, stop
        start = stop
