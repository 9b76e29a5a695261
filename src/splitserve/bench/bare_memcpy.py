"""The limit of `shm`: one thread's memcpy of one block from one shareable arena into another. No part of ours in it."""

from __future__ import annotations

import ctypes
import statistics
import time

from splitserve.core.arena import Arena
from splitserve.disaggregation.copies import Copies, num_bytes


def measure(copies: Copies, repeats: int) -> float:
    """GB/s (10^9 bytes a second) of as many bytes in one block, median of `repeats`, after one that is not counted."""
    total_bytes = num_bytes(copies)
    source, target = Arena(total_bytes, shareable=True), Arena(total_bytes, shareable=True)
    for arena in (source, target):
        ctypes.memset(arena.address, 1, total_bytes)
    _seconds(source, target)
    return total_bytes / statistics.median(_seconds(source, target) for _ in range(repeats)) / 1e9


def _seconds(source: Arena, target: Arena) -> float:
    start = time.perf_counter()
    ctypes.memmove(target.address, source.address, target.num_bytes)
    return time.perf_counter() - start
