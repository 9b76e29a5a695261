"""Division of a write between GPUs into parts of bounded size, and of each part into rows for the copy kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Maximum bytes of a row. One row is enough work for one program of the kernel. A few MiB have enough rows to occupy a
# GPU.
ROW_BYTES = 32 << 10


def parts(
    targets: NDArray[np.uint64], sources: NDArray[np.uint64], lengths: NDArray[np.uint64], part_bytes: int
) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]]:
    """Yield (targets, sources, lengths) in parts of at most `part_bytes`. Long pieces are cut, empty ones omitted."""
    counts = (lengths + np.uint64(part_bytes - 1)) // np.uint64(part_bytes)
    pieces = np.repeat(np.arange(len(lengths)), counts.astype(np.int64))
    before = np.cumsum(counts) - counts
    offsets = (np.arange(len(pieces), dtype=np.uint64) - before[pieces]) * np.uint64(part_bytes)
    targets, sources = targets[pieces] + offsets, sources[pieces] + offsets
    lengths = np.minimum(lengths[pieces] - offsets, np.uint64(part_bytes))
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        start = ends[first] - lengths[first]
        end = int(np.searchsorted(ends, start + np.uint64(part_bytes), side="right"))
        yield targets[first:end], sources[first:end], lengths[first:end]
        first = end


@dataclass(frozen=True, slots=True)
class DeviceRows:
    # Target address, source address and number of words of each row, [3, number of rows].
    table: NDArray[np.int64]
    # Bytes per word: 8 or 1.
    word_bytes: int


def rows_of(targets: NDArray[np.uint64], sources: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> DeviceRows:
    """Return rows that copy lengths[i] bytes from sources[i] to targets[i], for each i."""
    counts = (lengths.astype(np.int64) + ROW_BYTES - 1) // ROW_BYTES
    pieces = np.repeat(np.arange(len(lengths)), counts)
    offsets = (np.arange(len(pieces)) - (np.cumsum(counts) - counts)[pieces]) * ROW_BYTES
    table = np.stack(
        (
            targets.astype(np.int64)[pieces] + offsets,
            sources.astype(np.int64)[pieces] + offsets,
            np.minimum(lengths.astype(np.int64)[pieces] - offsets, ROW_BYTES),
        )
    )
    word_bytes = 1 if np.bitwise_or.reduce(table, axis=None) % 8 else 8
    table[2] //= word_bytes
    return DeviceRows(table, word_bytes)
