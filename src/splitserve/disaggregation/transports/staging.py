"""A buffer in which scattered pieces of memory become one piece for the journey: gathered here, scattered there.

The buffer lies in an anonymous file, so one system call moves up to 1,024 pieces: pwritev(2) gathers, preadv(2)
scatters, at the speed of memcpy from 4 KiB pieces up, and without Python's lock. Linux only.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np
from numpy.typing import NDArray

from splitserve.core.arena import Arena
from splitserve.disaggregation.transports.iovec import IOVEC, MAX_PIECES_PER_CALL, iovec_table

_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.preadv, _libc.pwritev):
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    _call.restype = ctypes.c_ssize_t


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


class Staging:
    """`num_slots` slots of `slot_bytes` each. Who uses it decides which slot is whose and when."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._arena = Arena(num_slots * slot_bytes, shareable=True)
        self.address = self._arena.address
        self.num_bytes = self._arena.num_bytes

    def slot_address(self, slot: int) -> int:
        return self.address + slot * self.slot_bytes

    def gather(self, slot: int, table: NDArray[np.void]) -> None:
        """Fill a slot, from its beginning, with the pieces. Raises OSError."""
        self._move(_libc.pwritev, slot, table)

    def scatter(self, slot: int, table: NDArray[np.void]) -> None:
        """Fill the pieces from a slot's beginning. Raises OSError."""
        self._move(_libc.preadv, slot, table)

    def discard(self) -> None:
        """Give the memory back to the system, but keep the addresses: who still writes to them reaches nobody."""
        self._arena.discard()

    def _move(self, call: ctypes._NamedFuncPointer, slot: int, table: NDArray[np.void]) -> None:
        offset = slot * self.slot_bytes
        for i in range(0, len(table), MAX_PIECES_PER_CALL):
            part = table[i : i + MAX_PIECES_PER_CALL]
            expected = int(part["length"].sum())
            moved = call(self._arena.fd, table.ctypes.data + i * IOVEC.itemsize, len(part), offset)
            if moved != expected:
                code = ctypes.get_errno() if moved < 0 else 0
                raise OSError(code, f"moved {moved} of {expected} bytes through the staging buffer: {os.strerror(code)}")
            offset += expected
