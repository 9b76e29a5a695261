"""A buffer in which scattered pieces of memory become one piece for the journey: gathered here, scattered there.

`StagingBuffer` is what every kind of it can do; `Staging` is that of memory which the CPU reads and writes (for memory
of GPUs: `device_staging.py`; which one is taken: `staging_choice.py`). It lies in an anonymous file, whose memory can
be given back while its addresses stay. Linux only.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from splitserve._native.moves import gather_pieces, scatter_pieces
from splitserve.disaggregation.transports.iovec import iovec_table

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, *(ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64))
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value


class Pieces:
    """Scattered memory as one stream of bytes, in the order of the pieces."""

    def __init__(self, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> None:
        self._table = iovec_table(addresses, lengths)
        self._ends = np.cumsum(self._table["length"])

    def between(self, first: int, end: int) -> NDArray[np.void]:
        """An iovec table of the bytes [first, end) of the stream, which is not empty."""
        i = int(np.searchsorted(self._ends, first, side="right"))
        j = int(np.searchsorted(self._ends, end, side="left")) + 1
        table: NDArray[np.void] = self._table[i:j].copy()
        ends = self._ends[i:j]
        # Cut the last piece before the first: they may be the same.
        table["length"][-1] -= np.uint64(int(ends[-1]) - end)
        skipped = np.uint64(first - (int(ends[0]) - int(self._table["length"][i])))
        table["base"][0] += skipped
        table["length"][0] -= skipped
        return table


class StagingBuffer(Protocol):
    """`num_slots` slots of `slot_bytes` each. Who uses it decides which slot is whose and when."""

    num_slots: int
    slot_bytes: int
    num_bytes: int
    # Of the first slot; the others follow.
    address: int
    # The GPU in whose memory the slots lie; -1: this process's own.
    gpu_id: int

    def slot_address(self, slot: int) -> int: ...

    def gather(self, slot: int, table: NDArray[np.void]) -> None:
        """Fill a slot, from its beginning, with the pieces of an iovec table. When this returns it may be read.

        Raises OSError, and what the GPU says.
        """
        ...

    def scatter(self, slot: int, table: NDArray[np.void]) -> None:
        """Fill the pieces from a slot's beginning. When this returns they are in place. Raises as `gather`."""
        ...

    def discard(self) -> None:
        """Give back what nobody can still write to. The addresses stay valid, and nobody else's, as long as this
        object lives. Once, when no engine knows the buffer any more."""
        ...


class Staging:
    """In this process's memory, for pieces there."""

    gpu_id = -1

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.num_bytes = num_slots * slot_bytes
        fd = os.memfd_create("splitserve-staging", os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, self.num_bytes)
        # Not by Python's mmap: that keeps a second file descriptor, which `discard` could not close.
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, self.num_bytes, access, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), f"cannot map a staging buffer of {self.num_bytes} bytes")
        self.address: int = address
        unmap = weakref.finalize(self, _libc.munmap, address, self.num_bytes)
        # Not at the process's end: a library that lives as long may still look at it.
        unmap.atexit = self._close.atexit = False

    def slot_address(self, slot: int) -> int:
        return self.address + slot * self.slot_bytes

    def gather(self, slot: int, table: NDArray[np.void]) -> None:
        gather_pieces(table, self.slot_address(slot))

    def scatter(self, slot: int, table: NDArray[np.void]) -> None:
        scatter_pieces(self.slot_address(slot), table)

    def discard(self) -> None:
        """Memory and file go back to the system: a late write hits nobody."""
        if _libc.madvise(self.address, self.num_bytes, mmap.MADV_REMOVE):
            raise OSError(ctypes.get_errno(), f"cannot discard a staging buffer of {self.num_bytes} bytes")
        self._close()
