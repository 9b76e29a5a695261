"""The free list of KV pages. A page is either free here or held by exactly one holder outside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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
