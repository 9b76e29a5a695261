"""Copy lists as numpy tables: thousands of pieces are planned, checked and handed to a transport without a Python loop.

A row says: `length` bytes from `src_offset` of our region `src_region` to `dst_offset` of the peer's `dst_region`.
Regions are numbered in the order in which they were registered.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

COPY = np.dtype(
    [("src_region", "<u4"), ("src_offset", "<u8"), ("dst_region", "<u4"), ("dst_offset", "<u8"), ("length", "<u8")]
)

# A one-dimensional array of dtype COPY.
Copies = NDArray[np.void]


def copy_table(rows: Iterable[tuple[int, int, int, int, int]]) -> Copies:
    """A table of (src_region, src_offset, dst_region, dst_offset, length). Raises ValueError for negative numbers."""
    try:
        return np.array(list(rows), dtype=COPY)
    except OverflowError as error:
        raise ValueError(f"source of a copy, or its target, is out of range: {error}") from error


def num_bytes(copies: Copies) -> int:
    return int(copies["length"].sum())


def coalesce(copies: Copies) -> Copies:
    """The same bytes in fewer copies: each row that goes on where the one before ended, on both sides, joins it."""
    if len(copies) < 2:
        return copies
    before, after = copies[:-1], copies[1:]
    joins = (
        (after["src_region"] == before["src_region"])
        & (after["dst_region"] == before["dst_region"])
        & (after["src_offset"] == before["src_offset"] + before["length"])
        & (after["dst_offset"] == before["dst_offset"] + before["length"])
    )
    firsts = np.flatnonzero(np.concatenate(([True], ~joins)))
    joined = copies[firsts].copy()
    joined["length"] = np.add.reduceat(copies["length"], firsts)
    return joined


def over_regions(runs: Copies, src_regions: NDArray[np.int64], dst_regions: NDArray[np.int64]) -> Copies:
    """The same runs once for each (source region, target region), region by region."""
    copies: Copies = np.tile(runs, len(src_regions))
    copies["src_region"] = np.repeat(src_regions, len(runs))
    copies["dst_region"] = np.repeat(dst_regions, len(runs))
    return copies
