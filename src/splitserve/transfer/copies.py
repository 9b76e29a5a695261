"""Copy lists as numpy tables, so that thousands of pieces are planned, checked and sent without a Python loop.

A row is a copy of `length` bytes from `src_offset` of our region `src_region` to `dst_offset` of the peer's
`dst_region`. Regions are numbered in registration order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from splitserve._native.tables import coalesce as coalesce
from splitserve._native.tables import cut as cut
from splitserve._native.tables import num_bytes as num_bytes
from splitserve._native.tables import parts_of as parts_of
from splitserve._native.tables import select as select

COPY = np.dtype(
    [("src_region", "<u4"), ("src_offset", "<u8"), ("dst_region", "<u4"), ("dst_offset", "<u8"), ("length", "<u8")]
)

# A one-dimensional array of dtype COPY.
Copies = NDArray[np.void]


def copy_table(rows: Iterable[tuple[int, int, int, int, int]]) -> Copies:
    """Return a table of (src_region, src_offset, dst_region, dst_offset, length). Raises ValueError if negative."""
    try:
        return np.array(list(rows), dtype=COPY)
    except OverflowError as error:
        raise ValueError(f"source of a copy, or its target, is out of range: {error}") from error


def joined(tables: Sequence[Copies]) -> Copies:
    # Join bytes: np.concatenate takes five times as long, which matters for senders of many small writes.
    return np.frombuffer(bytearray().join([table.tobytes() for table in tables]), dtype=COPY)


def over_regions(runs: Copies, src_regions: NDArray[np.int64], dst_regions: NDArray[np.int64]) -> Copies:
    """Repeat the runs for each pair (source region, target region), region by region."""
    copies: Copies = np.tile(runs, len(src_regions))
    copies["src_region"] = np.repeat(src_regions, len(runs))
    copies["dst_region"] = np.repeat(dst_regions, len(runs))
    return copies
