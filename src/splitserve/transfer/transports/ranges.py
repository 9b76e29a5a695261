"""Wire format of a write's target ranges: (region u32, offset u64, length u64) each, in the receiver's memory."""

from __future__ import annotations

import numpy as np

from splitserve.transfer.copies import COPY, Copies

# Maximum number of target ranges of one write: 20 MiB of table.
MAX_RANGES = 1 << 20

RANGE = np.dtype([("region", "<u4"), ("offset", "<u8"), ("length", "<u8")])


def encode_targets(copies: Copies) -> bytes:
    ranges = np.empty(len(copies), dtype=RANGE)
    ranges["region"], ranges["offset"], ranges["length"] = (copies[f] for f in ("dst_region", "dst_offset", "length"))
    return ranges.tobytes()


def decode_targets(table: bytes) -> Copies:
    """Return copies without sources. They are not checked yet."""
    ranges = np.frombuffer(table, dtype=RANGE)
    copies = np.zeros(len(ranges), dtype=COPY)
    copies["dst_region"], copies["dst_offset"], copies["length"] = (ranges[f] for f in ("region", "offset", "length"))
    return copies
