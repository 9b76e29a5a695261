"""Staging buffer that turns scattered pieces of memory into one piece to send: gathered here, scattered there.

`StagingBuffer` is the common interface. `ProcessStaging` is for memory that the CPU reads and writes,
`device_staging.py` for memory of GPUs. `staging_choice.py` selects one. The buffer is an anonymous file: its memory can
be released while its addresses stay reserved. Linux only.
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
from splitserve.transfer.transports.iovec import iovec_table

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
        """Return an iovec table of the bytes [first, end) of the stream, which is not empty."""
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
    """`num_slots` slots of `slot_bytes` each. The user of the buffer assigns the slots."""

    num_slots: int
    slot_bytes: int
    num_bytes: int
    # Address of the first slot. The others follow.
    address: int
    # The GPU that has the slots in its memory. -1: memory of this process.
    gpu_id: int

    def slot_address(self, slot: int) -> int: ...

    def gather(self, slot: int, table: NDArray[np.void]) -> None:
        """Fill a slot, from its beginning, with the pieces of an iovec table. The slot may be read on return.

        Raises OSError, and errors of the GPU.
        """
        ...

    def scatter(self, slot: int, table: NDArray[np.void]) -> None:
        """Fill the pieces from a slot's beginning. They are in place on return. Raises the errors of `gather`."""
        ...

    def discard(self) -> None:
        """Free the memory that peers can no longer write to. The addresses stay reserved while this object exists.

        Call once, after the buffer was deregistered from all engines.
        """
        ...


class ProcessStaging:
    """Staging buffer in this process's memory, for pieces there."""

    gpu_id = -1

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.num_bytes = num_slots * slot_bytes
        fd = os.memfd_create("splitserve-staging", os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, self.num_bytes)
        # Call mmap(2), because Python's mmap keeps a second file descriptor, which `discard` could not close.
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, self.num_bytes, access, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), f"cannot map a staging buffer of {self.num_bytes} bytes")
        self.address: int = address
        unmap = weakref.finalize(self, _libc.munmap, address, self.num_bytes)
        # Do not unmap when the process exits: a library may still access the memory then.
        unmap.atexit = self._close.atexit = False

    def slot_address(self, slot: int) -> int:
        return self.address + slot * self.slot_bytes

    def gather(self, slot: int, table: NDArray[np.void]) -> None:
        gather_pieces(table, self.slot_address(slot))

    def scatter(self, slot: int, table: NDArray[np.void]) -> None:
        scatter_pieces(self.slot_address(slot), table)

    def discard(self) -> None:
        """Release memory and file to the system, so that a late write changes no data in use."""
        if _libc.madvise(self.address, self.num_bytes, mmap.MADV_REMOVE):
            raise OSError(ctypes.get_errno(), f"cannot discard a staging buffer of {self.num_bytes} bytes")
        self._close()
