"""Widening of a room's KV that travelled in a narrower dtype, inside the pages it arrived in.

It runs only after the final status from prefill, because nothing else may access the pages meanwhile. Only for pools
that the CPU can read.
"""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.core.layout import KVLayout, Region
from splitserve.transfer.convert import memory_of, unpack
from splitserve.transfer.reshard import RoomPages, plan_unpack


class Arrivals:
    def __init__(self, layout: KVLayout, pool: Sequence[Region], wire_dtype: str) -> None:
        self._layout = layout
        self._pool = [memory_of(region) for region in pool]
        self._wire_dtype = wire_dtype

    def widen(self, pages: RoomPages, tokens: range, num_tokens: int) -> None:
        """Widen `tokens` of a room of `num_tokens` tokens."""
        for cast in plan_unpack(self._layout, pages, tokens, num_tokens, self._wire_dtype):
            unpack(cast, self._pool)
