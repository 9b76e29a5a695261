"""Tables of copies (transfer/copies.py): checked, joined, split, numbered and sorted."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitserve._native.library import Int64Array, address_of, open_library

# A table of dtype COPY.
Copies = NDArray[np.void]

# Bytes from which the page tables of both regions do not stay in the cache either, so that neighbours are read
# together. Sorting costs less than it saves, a tenth of the time for small pages.
ORDERED_BYTES = 2 << 20


def _declare(library: ctypes.CDLL) -> None:
    table = (ctypes.c_void_p, ctypes.c_uint64)
    library.copies_inside.argtypes = (*table, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int)
    library.copies_inside.restype = ctypes.c_int64
    library.copies_bytes.argtypes = table
    library.copies_bytes.restype = ctypes.c_uint64
    library.copies_addresses.argtypes = (*table, *[ctypes.c_void_p] * 3)
    library.copies_addresses.restype = ctypes.c_uint64
    library.copies_coalesce.argtypes = (*table, ctypes.c_void_p)
    library.copies_coalesce.restype = ctypes.c_uint64
    library.copies_parts.argtypes = (*table, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p)
    library.copies_parts.restype = ctypes.c_uint64
    library.copies_blocks.argtypes = (*table, ctypes.c_uint64, *table, ctypes.c_int, ctypes.c_void_p)
    library.copies_sort.argtypes = (*table, *[ctypes.c_void_p] * 3)
    library.copies_sort.restype = ctypes.c_void_p


_library = open_library("copies", _declare)
# Whether the C functions are used.
is_built = _library is not None


def num_bytes(copies: Copies) -> int:
    """Return the bytes of all copies. numpy needs three microseconds to sum a column, several times per write."""
    if _library is None:
        return int(copies["length"].sum())
    copies = np.ascontiguousarray(copies)
    total: int = _library.copies_bytes(address_of(copies), len(copies))
    return total


def bytes_inside(copies: Copies, lengths: Int64Array, *, is_target: bool) -> int:
    """Return the bytes of all copies.

    Returns ~i, which is negative, if copy i is the first with a target, or else source, outside its region.
    """
    if _library is None:
        return _bytes_inside_slowly(copies, lengths.array, "dst" if is_target else "src")
    copies = np.ascontiguousarray(copies)
    n: int = _library.copies_inside(address_of(copies), len(copies), lengths.address, lengths.count, is_target)
    return n


def _bytes_inside_slowly(copies: Copies, lengths: NDArray[np.uint64], side: str) -> int:
    regions, offsets = copies[f"{side}_region"], copies[f"{side}_offset"]
    known = regions < len(lengths)
    limits = np.zeros(len(copies), dtype=np.uint64)
    limits[known] = lengths[regions[known]]
    outside = ~known | (offsets > limits) | (copies["length"] > limits - np.minimum(offsets, limits))
    return ~int(outside.argmax()) if outside.any() else num_bytes(copies)


def addresses(copies: Copies, sources: Int64Array, targets: Int64Array) -> tuple[NDArray[np.int64], int]:
    """Return target address, source address and length of each copy, [3, n], and all bits that are set in any.

    `sources`, `targets`: start addresses of the regions.
    """
    table = np.empty((3, len(copies)), dtype=np.int64)
    if _library is None:
        table[0] = targets.array[copies["dst_region"]] + copies["dst_offset"]
        table[1] = sources.array[copies["src_region"]] + copies["src_offset"]
        table[2] = copies["length"]
        return table, int(np.bitwise_or.reduce(table, axis=None))
    copies = np.ascontiguousarray(copies)
    rows = (address_of(copies), len(copies))
    bits: int = _library.copies_addresses(*rows, sources.address, targets.address, address_of(table))
    return table, bits


def select(copies: Copies, which: NDArray[Any]) -> Copies:
    """Return a table of these rows: a mask, or their numbers."""
    # Each row as one element: numpy copies structured rows field by field, which takes up to fifty times as long.
    table: Copies = copies.view(np.dtype((np.void, copies.itemsize)))[which].view(copies.dtype)
    return table


def coalesce(copies: Copies) -> Copies:
    """Return the same bytes in fewer copies: a row that continues the one before, at both ends, is joined to it."""
    if len(copies) < 2:
        return copies
    if _library is None:
        return _coalesce_slowly(copies)
    copies = np.ascontiguousarray(copies)
    table = np.empty(len(copies), dtype=copies.dtype)
    return table[: _library.copies_coalesce(address_of(copies), len(copies), address_of(table))]


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
    """Return the same bytes in the same order, in tables of about `max_bytes` and at most `max_pieces` rows.

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
    n = _library.copies_parts(*table, max_bytes, max_pieces, address_of(pieces), address_of(firsts))
    return [pieces[first:end] for first, end in pairwise(firsts[: n + 1].tolist())]


def _parts_slowly(copies: Copies, max_bytes: int, max_pieces: int) -> list[Copies]:
    pieces = cut(copies, max_bytes)
    starts = np.cumsum(pieces["length"]) - pieces["length"]
    by_bytes = np.flatnonzero(np.diff(starts // np.uint64(max_bytes))) + 1
    by_pieces = np.arange(max_pieces, len(pieces), max_pieces)
    return np.split(pieces, np.union1d(by_bytes, by_pieces)) if len(pieces) else []


def cut(copies: Copies, max_bytes: int) -> Copies:
    """Return the same bytes in the same order, without empty copies, and each at most `max_bytes` long."""
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


def blocks_of(copies: Copies, size: int, firsts: Int64Array, *, is_target: bool) -> NDArray[np.int32] | None:
    """Return the number of the block of `size` bytes that each source, or target, covers. None: one is not a block.

    `firsts`: the number of each region's first block.
    """
    if _library is None:
        return _blocks_slowly(copies, np.uint64(size), firsts.array, "dst" if is_target else "src")
    copies = np.ascontiguousarray(copies)
    blocks = np.empty(len(copies), dtype=np.int32)
    table = (address_of(copies), len(copies), size, firsts.address, firsts.count)
    return blocks if _library.copies_blocks(*table, is_target, address_of(blocks)) else None


def _blocks_slowly(copies: Copies, size: np.uint64, firsts: NDArray[np.uint64], side: str) -> NDArray[np.int32] | None:
    regions, offsets = copies[f"{side}_region"], copies[f"{side}_offset"]
    if (copies["length"] != size).any() or (regions >= len(firsts)).any() or (offsets % size).any():
        return None
    blocks: NDArray[np.int32] = (firsts[regions] + offsets // size).astype(np.int32)
    return blocks


def in_source_order(copies: Copies, num_bytes: int, sources: Int64Array) -> Copies:
    """Return the same copies, `num_bytes` in all, in order of their source pages if they have ORDERED_BYTES or more.

    A read waits for the translation of its address, a write does not. `sources`: start addresses of the source regions.
    The targets of the copies must not overlap.
    """
    if _library is None or num_bytes < ORDERED_BYTES or len(copies) < 2:
        return copies
    copies = np.ascontiguousarray(copies)
    first, second = np.empty((2, len(copies)), dtype=copies.dtype)
    rooms = {address_of(first): first, address_of(second): second}
    ordered = _library.copies_sort(address_of(copies), len(copies), sources.address, *rooms)
    return rooms.get(ordered, copies)
