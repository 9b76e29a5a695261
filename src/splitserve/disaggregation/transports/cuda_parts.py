"""How a write between GPUs is cut: into parts of bounded size, and these into rows for the kernel that copies them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Bytes of a row at most: enough work for one program of the kernel, and enough programs for a GPU in a few MiB.
ROW_BYTES = 32 << 10


def parts(
    targets: NDArray[np.uint64], sources: NDArray[np.uint64], lengths: NDArray[np.uint64], part_bytes: int
) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]]:
    """(targets, sources, lengths) again, in parts of at most `part_bytes`; long pieces are cut, empty ones left out."""
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
class Rows:
    # Address of the target, of the source, and number of words, of each row. [3, number of rows]
    table: NDArray[np.int64]
    # 8 or 1.
    word_bytes: int


def rows_of(targets: NDArray[np.uint64], sources: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> Rows:
    """Of lengths[i] bytes from sources[i] to targets[i], for each i."""
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
    return Rows(table, word_bytes)
