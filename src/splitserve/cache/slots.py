"""Rows of the request-to-token table: row r lists the pages of one admitted request, in token order.

The table is a page table: the slot of token t is table[r, t // page_size] x page_size + t % page_size. The scheduler
writes it; the engine reads it while it runs a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from splitserve.cache.blocks import kv_to_page_num


class ReqToTokenPool:
    """A fixed number of rows, each wide enough for `max_context_len` tokens."""

    def __init__(self, size: int, max_context_len: int, page_size: int) -> None:
        self.size = size
        # int32 [rows, pages per row]
        self.table: npt.NDArray[np.int32] = np.zeros((size, kv_to_page_num(max_context_len, page_size)), dtype=np.int32)
        self._free: list[int] = []
        self.clear()

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self) -> int:
        """Take a row. Raises MemoryError if none is free: callers check `available_size` first."""
        if not self._free:
            raise MemoryError(f"all {len(self.table)} rows are taken")
        return self._free.pop()

    def free(self, row: int) -> None:
        if row in self._free:
            raise ValueError(f"row {row} is freed twice")
        self._free.append(row)

    def write(self, row: int, first: int, pages: Sequence[int]) -> None:
        """Set the row's pages [first, first + len(pages))."""
        self.table[row, first : first + len(pages)] = pages

    def clear(self) -> None:
        """Make every row free."""
        self._free = list(range(len(self.table) - 1, -1, -1))


class DecodeReqToTokenPool(ReqToTokenPool):
    """A table with `pre_alloc_size` more rows than may run: transfers continue while the running batch is full."""

    def __init__(self, size: int, max_context_len: int, page_size: int, pre_alloc_size: int) -> None:
        super().__init__(size + pre_alloc_size, max_context_len, page_size)
        self.pre_alloc_size = pre_alloc_size
