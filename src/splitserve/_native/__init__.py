"""The few loops that Python is too slow for, in C. Each has a slower twin here for machines where it was not built.

The library is built at installation where there is a C compiler. It is no Python module: plain functions for ctypes.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A table of dtype COPY (disaggregation/copies.py).
Copies = NDArray[np.void]

# Bytes in one transfer from which on it goes past the cache: its pages were not there, whoever reads them next is on
# another core, and to read the old bytes of the target first would cost a third of the time.
STREAMING_BYTES = 256 << 10
# From here on the page tables of both sides do not stay in the cache either: neighbours are read together. To sort them
# takes less than that gains, a tenth of the time where pages are small.
ORDERED_BYTES = 2 << 20


class _Position(ctypes.Structure):
    """struct position of scatter.c."""

    _fields_ = (("piece", ctypes.c_uint64), ("offset", ctypes.c_uint64))


def open_library(name: str, declare: Callable[[ctypes.CDLL], None]) -> ctypes.CDLL | None:
    """With its functions declared; None where it was not built. Raises ImportError for a build of other sources."""
    spec = importlib.util.find_spec(f"splitserve._native.{name}")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    try:
        declare(library)
    except AttributeError as error:
        raise ImportError(f"{spec.origin} was built from other sources, install splitserve again: {error}") from error
    return library


def _declare(library: ctypes.CDLL) -> None:
    table = (ctypes.c_void_p, ctypes.c_uint64)
    library.scatter_inside.argtypes = (*table, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int)
    library.scatter_inside.restype = ctypes.c_int64
    library.scatter_bytes.argtypes = table
    library.scatter_bytes.restype = ctypes.c_uint64
    library.scatter_coalesce.argtypes = (*table, ctypes.c_void_p)
    library.scatter_coalesce.restype = ctypes.c_uint64
    library.scatter_parts.argtypes = (*table, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p)
    library.scatter_parts.restype = ctypes.c_uint64
    library.scatter_blocks.argtypes = (*table, ctypes.c_uint64, *table, ctypes.c_int, ctypes.c_void_p)
    library.scatter_sort.argtypes = (*table, *[ctypes.c_void_p] * 3)
    library.scatter_sort.restype = ctypes.c_void_p
    library.scatter_copy.argtypes = (
        *table,
        *[ctypes.c_void_p] * 2,
        ctypes.POINTER(_Position),
        ctypes.c_uint64,
        ctypes.c_int,
    )
    library.scatter_copy.restype = None
    library.scatter_skip.argtypes = (*table, ctypes.POINTER(_Position), ctypes.c_uint64)
    library.scatter_skip.restype = None
    library.scatter_pieces.argtypes = (*table, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    library.scatter_pieces.restype = None
    library.scatter_store_bytes.restype = ctypes.c_int


_library = open_library("scatter", _declare)
# Whether the C functions are used.
is_built = _library is not None
# Of a store that goes past the cache: as wide as this processor has them.
STORE_BYTES: int = 0 if _library is None else _library.scatter_store_bytes()


class Numbers:
    """A fixed array of 64-bit numbers whose address is at hand: numpy takes a microsecond to say it."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.array = np.array(list(numbers), dtype=np.uint64)
        self.address = self.array.ctypes.data


def address_of(table: NDArray[Any]) -> int:
    """Where a contiguous table begins; numpy's own way takes three times as long, which one page notices."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(table.data))
    except (TypeError, ValueError):
        # Without a row, or read-only.
        return int(table.ctypes.data)


def num_bytes(copies: Copies) -> int:
    """Of all copies. numpy takes three microseconds to add a column up, and each write is asked several times."""
    if _library is None:
        return int(copies["length"].sum())
    copies = np.ascontiguousarray(copies)
    total: int = _library.scatter_bytes(address_of(copies), len(copies))
    return total


def bytes_inside(copies: Copies, lengths: Numbers, *, is_target: bool) -> int:
    """Bytes of all copies; ~i, which is negative, where the target of copy i, or else its source, is the first that is
    not inside its region.
    """
    if _library is None:
        return _bytes_inside_slowly(copies, lengths.array, "dst" if is_target else "src")
    copies = np.ascontiguousarray(copies)
    n: int = _library.scatter_inside(address_of(copies), len(copies), lengths.address, len(lengths.array), is_target)
    return n


def _bytes_inside_slowly(copies: Copies, lengths: NDArray[np.uint64], side: str) -> int:
    regions, offsets = copies[f"{side}_region"], copies[f"{side}_offset"]
    known = regions < len(lengths)
    limits = np.zeros(len(copies), dtype=np.uint64)
    limits[known] = lengths[regions[known]]
    outside = ~known | (offsets > limits) | (copies["length"] > limits - np.minimum(offsets, limits))
    return ~int(outside.argmax()) if outside.any() else num_bytes(copies)


def select(copies: Copies, which: NDArray[Any]) -> Copies:
    """A table of these rows: a mask, or their numbers."""
    # A row in one piece: numpy moves rows of fields field by field, which takes up to fifty times as long.
    table: Copies = copies.view(np.dtype((np.void, copies.itemsize)))[which].view(copies.dtype)
    return table


def coalesce(copies: Copies) -> Copies:
    """The same bytes in fewer copies: each row that goes on where the one before ended, on both sides, joins it."""
    if len(copies) < 2:
        return copies
    if _library is None:
        return _coalesce_slowly(copies)
    copies = np.ascontiguousarray(copies)
    table = np.empty(len(copies), dtype=copies.dtype)
    return table[: _library.scatter_coalesce(address_of(copies), len(copies), address_of(table))]


def _coalesce_slowly(copies: Copies) -> Copies:
    before, after = copies[:-1], copies[1:]
    joins = (
        (after["src_region"] == before["src_region"])
        & (after["dst_region"] == before["dst_region"])
        & (after["src_offset"] == before["src_offset"] + before["length"])
        & (after["dst_offset"] == before["dst_offset"] + before["length"])
    )
    firsts = np.flatnonzero(np.concatenate(([True], ~joins)))
    table = select(copies, firsts)
    table["length"] = np.add.reduceat(copies["length"], firsts)
    return table


def parts_of(copies: Copies, max_bytes: int, max_pieces: int) -> list[Copies]:
    """The same bytes in the same order, in tables of about `max_bytes` and at most `max_pieces` rows.

    No row is empty or longer than `max_bytes`.
    """
    total = num_bytes(copies)
    if len(copies) <= max_pieces and total <= max_bytes:
        whole = copies if copies["length"].all() else select(copies, copies["length"] > 0)
        return [whole] if len(whole) else []
    if _library is None:
        return _parts_slowly(copies, max_bytes, max_pieces)
    copies = np.ascontiguousarray(copies)
    pieces = np.empty(len(copies) + total // max_bytes, dtype=copies.dtype)
    firsts = np.empty(len(pieces) + 1, dtype=np.uint64)
    table = (address_of(copies), len(copies))
    n = _library.scatter_parts(*table, max_bytes, max_pieces, address_of(pieces), address_of(firsts))
    return [pieces[first:end] for first, end in pairwise(firsts[: n + 1].tolist())]


def _parts_slowly(copies: Copies, max_bytes: int, max_pieces: int) -> list[Copies]:
    pieces = cut(copies, max_bytes)
    starts = np.cumsum(pieces["length"]) - pieces["length"]
    by_bytes = np.flatnonzero(np.diff(starts // np.uint64(max_bytes))) + 1
    by_pieces = np.arange(max_pieces, len(pieces), max_pieces)
    return np.split(pieces, np.union1d(by_bytes, by_pieces)) if len(pieces) else []


def cut(copies: Copies, max_bytes: int) -> Copies:
    """The same bytes in the same order, without empty copies, and each at most `max_bytes` long."""
    if len(copies) == 0 or (copies["length"].min() > 0 and copies["length"].max() <= max_bytes):
        return copies
    limit = np.uint64(max_bytes)
    counts = -(-copies["length"].astype(np.int64) // max_bytes)
    pieces = np.repeat(copies, counts)
    ends = np.cumsum(counts)
    place = (np.arange(len(pieces)) - np.repeat(ends - counts, counts)).astype(np.uint64) * limit
    pieces["src_offset"] += place
    pieces["dst_offset"] += place
    pieces["length"] = np.minimum(pieces["length"] - place, limit)
    return pieces


def blocks_of(copies: Copies, size: int, firsts: Numbers, *, is_target: bool) -> NDArray[np.int32] | None:
    """Which block of `size` bytes each source, or target, is; None where one of the copies is no such block.

    `firsts`: the number of each region's first block.
    """
    if _library is None:
        return _blocks_slowly(copies, np.uint64(size), firsts.array, "dst" if is_target else "src")
    copies = np.ascontiguousarray(copies)
    blocks = np.empty(len(copies), dtype=np.int32)
    table = (address_of(copies), len(copies), size, firsts.address, len(firsts.array))
    return blocks if _library.scatter_blocks(*table, is_target, address_of(blocks)) else None


def _blocks_slowly(copies: Copies, size: np.uint64, firsts: NDArray[np.uint64], side: str) -> NDArray[np.int32] | None:
    regions, offsets = copies[f"{side}_region"], copies[f"{side}_offset"]
    if (copies["length"] != size).any() or (regions >= len(firsts)).any() or (offsets % size).any():
        return None
    blocks: NDArray[np.int32] = (firsts[regions] + offsets // size).astype(np.int32)
    return blocks


def in_source_order(copies: Copies, num_bytes: int, sources: Numbers) -> Copies:
    """The same copies, `num_bytes` in all, from ORDERED_BYTES on in the order of their source pages.

    A read waits for the translation of its address, a write does not. `sources`: where our regions begin. For copies
    whose targets do not overlap.
    """
    if _library is None or num_bytes < ORDERED_BYTES or len(copies) < 2:
        return copies
    copies = np.ascontiguousarray(copies)
    first, second = np.empty((2, len(copies)), dtype=copies.dtype)
    rooms = {address_of(first): first, address_of(second): second}
    ordered = _library.scatter_sort(address_of(copies), len(copies), sources.address, *rooms)
    return rooms.get(ordered, copies)


class ScatterCopy:
    """Carries out a table of copies part by part. `sources`, `targets`: where our regions and the peer's begin.

    In `in_source_order`. Nothing is checked (`bytes_inside`): a wrong address ends the process.
    """

    def __init__(self, copies: Copies, num_bytes: int, sources: Numbers, targets: Numbers) -> None:
        """`num_bytes`: of all copies."""
        self._sources, self._targets = sources, targets
        self._num_pieces = len(copies)
        self._copies = np.ascontiguousarray(in_source_order(copies, num_bytes, sources))
        self._address = address_of(self._copies)
        self._store_bytes = STORE_BYTES if num_bytes >= STREAMING_BYTES else 0
        self._at = _Position()
        # Of `_at`, among threads that advance at once.
        self._lock = threading.Lock()

    @property
    def is_complete(self) -> bool:
        """Whether every part was copied, or taken by a thread that is at it."""
        return bool(self._at.piece == self._num_pieces)

    def advance(self, max_bytes: int) -> None:
        """Copy the next bytes, `max_bytes` or as many as there are; other Python threads run meanwhile.

        For several threads at once: each copies a part of its own. Without C they take turns.
        """
        with self._lock:
            if _library is None:
                self._advance_slowly(max_bytes)
                return
            begin = _Position(self._at.piece, self._at.offset)
            _library.scatter_skip(self._address, self._num_pieces, self._at, max_bytes)
        _library.scatter_copy(
            self._address,
            self._num_pieces,
            self._sources.address,
            self._targets.address,
            begin,
            max_bytes,
            self._store_bytes,
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


def copy_at_once(copies: Copies, num_bytes: int, sources: Numbers, targets: Numbers) -> None:
    """A ScatterCopy in one part, in half the time that its object takes: for few bytes."""
    if _library is None:
        ScatterCopy(copies, num_bytes, sources, targets).advance(num_bytes)
        return
    copies = np.ascontiguousarray(copies)
    store_bytes = STORE_BYTES if num_bytes >= STREAMING_BYTES else 0
    n, at = len(copies), _Position()
    _library.scatter_copy(address_of(copies), n, sources.address, targets.address, at, num_bytes, store_bytes)


def gather_pieces(pieces: Copies, buffer: int) -> None:
    """Fill memory at address `buffer` with pieces, rows of (address, length), one after the other. Nothing is checked.

    Through the cache: whoever asks for it reads the buffer next.
    """
    if _library is None:
        _move_slowly(pieces, buffer, is_out=False)
    else:
        _library.scatter_pieces(address_of(pieces), len(pieces), buffer, False, 0)


def scatter_pieces(buffer: int, pieces: Copies) -> None:
    """Fill the pieces from memory at the address `buffer`, past the cache."""
    if _library is None:
        _move_slowly(pieces, buffer, is_out=True)
    else:
        _library.scatter_pieces(address_of(pieces), len(pieces), buffer, True, STORE_BYTES)


def _move_slowly(pieces: Copies, buffer: int, *, is_out: bool) -> None:
    for address, length in pieces.tolist():
        target, source = (address, buffer) if is_out else (buffer, address)
        ctypes.memmove(target, source, length)
        buffer += length
