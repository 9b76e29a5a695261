"""The few loops that Python is too slow for, in C. Each has a slower twin here for machines where it was not built.

The library is built at installation where there is a C compiler. It is no Python module: plain functions for ctypes.
"""

from __future__ import annotations

import ctypes
import importlib.util

import numpy as np
from numpy.typing import NDArray

# Bytes in one transfer from which on copying past the cache is faster than through it.
STREAMING_BYTES = 16 << 20
# From here on the page tables of both sides do not stay in the cache either: neighbours should be read together.
ORDERED_BYTES = 128 << 20


class _Position(ctypes.Structure):
    """struct position of scatter.c."""

    _fields_ = (("piece", ctypes.c_uint64), ("offset", ctypes.c_uint64))


def _load() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("splitserve._native.scatter")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    library.scatter_copy.argtypes = (
        *[ctypes.c_void_p] * 3,
        ctypes.c_uint64,
        ctypes.POINTER(_Position),
        ctypes.c_uint64,
        ctypes.c_int,
    )
    library.scatter_copy.restype = None
    return library


_library = _load()
# Whether the C functions are used.
is_built = _library is not None


class ScatterCopy:
    """Copies lengths[i] bytes from address sources[i] to targets[i] for each i, part by part.

    From ORDERED_BYTES on in the order of their sources, since a read waits for the translation of its address and a
    write does not. Nothing is checked: a wrong address ends the process.
    """

    def __init__(self, targets: NDArray[np.uint64], sources: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> None:
        self._table = np.empty((3, len(lengths)), dtype=np.uint64)
        self._num_pieces = len(lengths)
        num_bytes = int(lengths.sum())
        self._streaming = num_bytes >= STREAMING_BYTES
        order = _order(sources) if num_bytes >= ORDERED_BYTES else slice(None)
        self._table[0], self._table[1], self._table[2] = targets[order], sources[order], lengths[order]
        self._address = self._table.ctypes.data
        self._at = _Position(0, 0)

    @property
    def is_complete(self) -> bool:
        return bool(self._at.piece == self._num_pieces)

    def advance(self, max_bytes: int) -> None:
        """Copy the next bytes, `max_bytes` or as many as there are; other Python threads run meanwhile."""
        if _library is None:
            self._advance_slowly(max_bytes)
            return
        row = self._table.strides[0]
        first = self._address
        _library.scatter_copy(
            first, first + row, first + 2 * row, self._num_pieces, self._at, max_bytes, self._streaming
        )

    def _advance_slowly(self, max_bytes: int) -> None:
        """The same without C: as fast from about 64 KiB a piece, at 4 KiB a third."""
        at = self._at
        while at.piece < self._num_pieces:
            target, source, length = self._table[:, at.piece].tolist()
            n = min(length - at.offset, max_bytes)
            ctypes.memmove(target + at.offset, source + at.offset, n)
            max_bytes -= n
            at.offset += n
            if at.offset < length:
                return
            at.piece, at.offset = at.piece + 1, 0


def _order(addresses: NDArray[np.uint64]) -> slice | NDArray[np.intp]:
    """The pieces by address, as finely as 16 bits tell: numpy sorts numbers of so many bits in one pass."""
    if not (addresses[1:] < addresses[:-1]).any():
        return slice(None)
    places = addresses - addresses.min()
    shift = max(0, int(places.max()).bit_length() - 16)
    return np.argsort((places >> np.uint64(shift)).astype(np.uint16), kind="stable")
