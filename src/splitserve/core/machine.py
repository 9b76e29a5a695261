"""Resources of this machine: CPU cores, and memory in one piece.

Memory is private, or backed by a file that another process on this host can map as well. It has no name in the file
system, so nothing is left behind when a process is killed.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import mmap
import os

from splitserve.core.layout import Region

# Limit of CPU threads per rank: more cores than a host has.
MAX_THREADS = 1024
# Bytes of a huge page of Linux on x86-64 and, with base pages of 4 KB, on ARM64.
HUGE_PAGE_BYTES = 2 << 20
# Advice of Linux 5.14: provide the memory as if each page were written. Python's mmap does not name it.
_MADV_POPULATE_WRITE = 23
# Advice of Linux 6.1: put memory into huge pages now, also if `shmem_enabled` is `never`. Part of it must exist.
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10


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


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, *(ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64))
_libc.mmap.restype = ctypes.c_void_p
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value


def map_file(fd: int, num_bytes: int, at: int | None = None) -> int:
    """Map a file for reads and writes, shared with other processes, and return the address. Raises OSError.

    `at`: the address, in place of what is mapped there. Unlike Python's mmap, this keeps no second descriptor.
    """
    flags = mmap.MAP_SHARED if at is None else mmap.MAP_SHARED | _MAP_FIXED
    address: int | None = _libc.mmap(at, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address is None or address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"cannot map a file of {num_bytes} bytes")
    return address


def advise(address: int, num_bytes: int, advice: int) -> None:
    """Give the system advice on memory. Unlike Python's madvise, it releases the interpreter lock. Raises OSError."""
    if _libc.madvise(address, num_bytes, advice):
        raise OSError(ctypes.get_errno(), f"the system refuses advice {advice} for {num_bytes} bytes")


def _is_taken(address: int, num_bytes: int, advice: int) -> bool:
    """Do `advise`, and return whether the system takes the advice."""
    try:
        advise(address, num_bytes, advice)
    except OSError:
        return False
    return True


def _reserve(size: int) -> mmap.mmap:
    """Return addresses for `size` bytes from a multiple of HUGE_PAGE_BYTES on. Raises OSError.

    They are those of an empty file, because the system counts private memory as if all of it were used.
    """
    fd = os.memfd_create("splitserve-reserved", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size + HUGE_PAGE_BYTES)
        return mmap.mmap(fd, size + HUGE_PAGE_BYTES, flags=mmap.MAP_SHARED)
    finally:
        os.close(fd)


class Arena:
    """`num_bytes` bytes of zeroed memory. The system allocates it page by page, on first write.

    `shareable` memory (Linux) is in an anonymous file: its regions name it, and peers can map it
    (`shm`, `tcp`). The memory is freed with the last view of it. Raises OSError if the system refuses.

    `huge`: ask for huge pages (Linux: 2 MB). The first byte written to one costs all of it. Most systems grant them to
    private memory only. Shareable memory gets them by `provide`.
    """

    def __init__(self, num_bytes: int, *, shareable: bool = False, huge: bool = False) -> None:
        self._fd = -1
        size = max(num_bytes, 1)
        # Whether `provide` requests huge pages, which the system does not give by itself.
        self._collapses = shareable and huge
        if shareable:
            self._fd = os.memfd_create("splitserve-arena", os.MFD_CLOEXEC)
            if huge:
                size = -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            os.ftruncate(self._fd, size)
        self._map(num_bytes, size)
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):
            _is_taken(self.address, size, mmap.MADV_HUGEPAGE)

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """Return the memory of another process's shareable arena, by its file, which the new arena closes."""
        arena = cls.__new__(cls)
        arena._fd, arena._collapses = fd, False
        size = os.fstat(fd).st_size
        arena._map(size, size)
        return arena

    def _map(self, num_bytes: int, size: int) -> None:
        self.num_bytes, self._size = num_bytes, size
        shared = self._fd >= 0
        self._memory = _reserve(size) if shared else mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        # Map the file where its huge pages are huge pages of the process, too.
        skipped = -start % HUGE_PAGE_BYTES if shared else 0
        self.address = start + skipped
        self.buffer = memoryview(self._memory)[skipped : skipped + num_bytes]
        if shared:
            map_file(self._fd, size, self.address)

    def region(self, offset: int = 0, length: int | None = None) -> Region:
        """Return a part of the memory, for transports."""
        length = self.num_bytes - offset if length is None else length
        return Region(self.address + offset, length, self._fd, offset)

    def provide(self, offset: int, length: int) -> bool:
        """Let the system allocate this part now, without a change of its content. Return False if it cannot.

        Other Python threads run meanwhile.
        """
        step = HUGE_PAGE_BYTES if self._collapses else mmap.PAGESIZE
        begin, end = (self.address + offset) // step * step, self.address + offset + length
        while self._collapses and begin < end and self._provide_huge(begin):
            begin += HUGE_PAGE_BYTES
        return begin >= end or _is_taken(begin, end - begin, _MADV_POPULATE_WRITE)

    def _provide_huge(self, address: int) -> bool:
        """Provide one huge page of the file. Return False if the system has none."""
        return _is_taken(address, mmap.PAGESIZE, _MADV_POPULATE_WRITE) and _is_taken(
            address, HUGE_PAGE_BYTES, _MADV_COLLAPSE
        )

    def discard(self) -> None:
        """Return all pages to the system; they read as zeros again, in every process that maps them. Raises OSError."""
        # Other processes may map the file of shareable memory, so the pages must leave the file.
        advise(self.address, self._size, mmap.MADV_DONTNEED if self._fd < 0 else mmap.MADV_REMOVE)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)


class Sharing(enum.Enum):
    """Whether memory of a worker should be shareable."""

    NONE = enum.auto()
    # Yes, but not a KV pool that would lose its huge pages by that.
    WITH_HUGE_PAGES = enum.auto()
    ALWAYS = enum.auto()


@functools.cache
def shares_huge_pages() -> bool:
    """Return whether shareable memory can have huge pages on this system (Linux 6.1)."""
    if not hasattr(os, "memfd_create"):
        return False
    try:
        arena = Arena(1, shareable=True, huge=True)
    except OSError:
        return False
    return arena._provide_huge(arena.address)
