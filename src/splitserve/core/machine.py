"""Resources of this machine: CPU cores, and memory in one piece.

Memory is private, or backed by a file that another process on this host can map as well. It has no name in the file
system, so nothing is left behind when a process is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

from splitserve.core.layout import Region

# Limit of CPU threads per rank: more cores than a host has.
MAX_THREADS = 1024
# Bytes of a huge page of Linux on x86-64 and, with base pages of 4 KB, on ARM64.
HUGE_PAGE_BYTES = 2 << 20
# Advice of Linux 5.14: provide the memory as if each page were written. Python's mmap does not name it.
_MADV_POPULATE_WRITE = 23


def parse_cpus(text: str) -> set[int]:
    """Return the core numbers in a list such as `0-3,8`, the format of taskset and Linux. Raises ValueError."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        named = range(int(first), int(last if dash else first) + 1)
        if not named:
            raise ValueError(f"{part!r} names no core")
        cpus |= set(named)
    return cpus


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_libc = ctypes.CDLL(None)


class Arena:
    """`num_bytes` bytes of zeroed memory. The system allocates it page by page, on first write.

    `shareable` memory (Linux) is in an anonymous file: its regions name it, and `shm` lets peers map it. The memory is
    freed with the last view of it. Raises OSError if the system refuses.

    `huge`: ask for huge pages (Linux: 2 MB). The first byte written to one costs all of it.
    """

    def __init__(self, num_bytes: int, *, shareable: bool = False, huge: bool = False) -> None:
        self._fd = -1
        size = max(num_bytes, 1)
        if shareable:
            self._fd = os.memfd_create("splitserve-arena", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, size)
        self._map(num_bytes, size)
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE)

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """Return the memory of another process's shareable arena, by its file, which the new arena closes."""
        arena = cls.__new__(cls)
        arena._fd = fd
        size = os.fstat(fd).st_size
        arena._map(size, size)
        return arena

    def _map(self, num_bytes: int, size: int) -> None:
        self.num_bytes = num_bytes
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if self._fd < 0 else mmap.MAP_SHARED
        self._memory = mmap.mmap(self._fd, size, flags=kind)
        self.buffer = memoryview(self._memory)[:num_bytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def region(self, offset: int = 0, length: int | None = None) -> Region:
        """Return a part of the memory, for transports."""
        length = self.num_bytes - offset if length is None else length
        return Region(self.address + offset, length, self._fd, offset)

    def provide(self, offset: int, length: int) -> bool:
        """Let the system allocate this part now, without a change of its content. Return False if it cannot.

        Other Python threads run meanwhile.
        """
        begin = (self.address + offset) // mmap.PAGESIZE * mmap.PAGESIZE
        end = self.address + offset + length
        # Unlike mmap.madvise, a call by ctypes releases the interpreter lock.
        advice = ctypes.c_int(_MADV_POPULATE_WRITE)
        return bool(_libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice) == 0)

    def discard(self) -> None:
        """Return all pages to the system; they read as zeros again, in every process that maps them. Raises OSError."""
        # Other processes may map the file of shareable memory, so the pages must leave the file.
        self._memory.madvise(mmap.MADV_DONTNEED if self._fd < 0 else mmap.MADV_REMOVE)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
