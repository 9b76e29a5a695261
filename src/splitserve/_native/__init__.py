"""The few loops that Python is too slow for, in C. Each has a slower twin here for machines where it was not built.

The library is built at installation where there is a C compiler. It is no Python module: plain functions for ctypes.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

# A table of dtype COPY (disaggregation/copies.py).
Copies = NDArray[np.void]

# Bytes in one transfer from which on it goes past the cache: its pages were not there, whoever reads them next is on
# another core, and to read the old bytes of the target first would cost a third of the time.
STREAMING_BYTES = 256 << 10
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
    table = (ctypes.c_void_p, ctypes.c_uint64)
    library.scatter_outside.argtypes = (*table, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int)
    library.scatter_outside.restype = ctypes.c_uint64
    library.scatter_copy.argtypes = (
        *table,
        *[ctypes.c_void_p] * 2,
        ctypes.POINTER(_Position),
        ctypes.c_uint64,
        ctypes.c_int,
    )
    library.scatter_copy.restype = None
    return library


_library = _load()
# Whether the C functions are used.
is_built = _library is not None


class Numbers:
    """A fixed array of 64-bit numbers whose address is at hand: numpy takes a microsecond to say it."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.array = np.array(list(numbers), dtype=np.uint64)
        self.address = self.array.ctypes.data


def first_outside(copies: Copies, lengths: Numbers, *, is_target: bool) -> int | None:
    """Which copy's target, or else source, is the first that is not inside its region; None where all are."""
    n = len(copies)
    if _library is None:
        return _first_outside_slowly(copies, lengths.array, "dst" if is_target else "src")
    copies = np.ascontiguousarray(copies)
    i: int = _library.scatter_outside(copies.ctypes.data, n, lengths.address, len(lengths.array), is_target)
    return i if i < n else None


def _first_outside_slowly(copies: Copies, lengths: NDArray[np.uint64], side: str) -> int | None:
    regions, offsets = copies[f"{side}_region"], copies[f"{side}_offset"]
    known = regions < len(lengths)
    limits = np.zeros(len(copies), dtype=np.uint64)
    limits[known] = lengths[regions[known]]
    outside = ~known | (offsets > limits) | (copies["length"] > limits - np.minimum(offsets, limits))
    return int(outside.argmax()) if outside.any() else None


class ScatterCopy:
    """Carries out a table of copies part by part. `sources`, `targets`: where our regions and the peer's begin.

    From ORDERED_BYTES on in the order of their sources, since a read waits for the translation of its address and a
    write does not. Nothing is checked (`first_outside`): a wrong address ends the process.
    """

    def __init__(self, copies: Copies, sources: Numbers, targets: Numbers) -> None:
        num_bytes = int(copies["length"].sum())
        if num_bytes >= ORDERED_BYTES:
            copies = copies[_order(sources.array[copies["src_region"]] + copies["src_offset"])]
        self._copies = np.ascontiguousarray(copies)
        self._sources, self._targets = sources, targets
        self._num_pieces = len(copies)
        self._streaming = num_bytes >= STREAMING_BYTES
        self._address = self._copies.ctypes.data
        self._at = _Position(0, 0)

    @property
    def is_complete(self) -> bool:
        return bool(self._at.piece == self._num_pieces)

    def advance(self, max_bytes: int) -> None:
        """Copy the next bytes, `max_bytes` or as many as there are; other Python threads run meanwhile."""
        if _library is None:
            self._advance_slowly(max_bytes)
            return
        _library.scatter_copy(
            self._address,
            self._num_pieces,
            self._sources.address,
            self._targets.address,
            self._at,
            max_bytes,
            self._streaming,
        )

    def _advance_slowly(self, max_bytes: int) -> None:
        """The same without C: as fast from about 64 KiB a piece, at 4 KiB a third."""
        at = self._at
        while at.piece < self._num_pieces:
            src_region, src_offset, dst_region, dst_offset, length = self._copies[at.piece].tolist()
            target, source = int(self._targets.array[dst_region]), int(self._sources.array[src_region])
            n = min(length - at.offset, max_bytes)
            ctypes.memmove(target + dst_offset + at.offset, source + src_offset + at.offset, n)
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
