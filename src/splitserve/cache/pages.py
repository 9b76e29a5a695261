"""The free list of KV pages, and the page table: row r lists the pages of one admitted request, in token order.

The slot of token t of row r is table[r, t // page_size] x page_size + t % page_size. The scheduler writes the table;
the engine reads it while it prepares a step. A page is either free here or held by exactly one holder outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt


def kv_to_page_num(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


class PageAllocator:
    """Allocator of page numbers: [0, num_pages), or those `owned` of a larger pool that is shared with other workers.

    A held page may be exchanged for another worker's, which is then freed in its place. Neighbours are allocated
    together if it costs nothing.
    """

    def __init__(self, num_pages: int, owned: Sequence[int] | None = None) -> None:
        pages = range(num_pages) if owned is None else owned
        if not pages:
            raise ValueError(f"a pool needs at least one page, got {len(pages)}")
        self.num_pages = len(pages)
        # A stack: the end is taken first, so a fresh pool allocates 0, 1, 2, ... and transfers find long runs.
        self._free = list(reversed(pages))
        self._is_free = bytearray(num_pages)
        for page in pages:
            self._is_free[page] = 1

    def available(self) -> int:
        return len(self._free)

    def alloc(self, count: int) -> list[int]:
        """Take `count` pages. Raises MemoryError, taking none, if fewer are free: callers check first."""
        if count > len(self._free):
            raise MemoryError(f"{count} pages asked for, {len(self._free)} of {self.num_pages} are free")
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        for page in taken:
            self._is_free[page] = 0
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """Free pages. Raises ValueError on a page that is already free: a double free is a bug."""
        returned = list(pages)
        for page in returned:
            if self._is_free[page]:
                raise ValueError(f"page {page} is freed twice")
            self._is_free[page] = 1
        returned.reverse()
        self._free.extend(returned)


class ReqToTokenPool:
    """A fixed number of rows, each wide enough for `max_context_len` tokens."""

    def __init__(self, size: int, max_context_len: int, page_size: int) -> None:
        # int32 [rows, pages per row]
        self.table: npt.NDArray[np.int32] = np.zeros((size, kv_to_page_num(max_context_len, page_size)), dtype=np.int32)
        self._free = list(range(size - 1, -1, -1))

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
