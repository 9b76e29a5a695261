"""Limit of `shm`: one memcpy of one block from one shareable arena into another, by one thread."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from splitserve.core.arena import Arena
from splitserve.tools.bench.limits import Once
from splitserve.transfer.copies import Copies, num_bytes


@contextmanager
def opened(copies: Copies) -> Iterator[Once]:
    """Open memory for one block with the bytes of all copies."""
    total_bytes = num_bytes(copies)
    source, target = Arena(total_bytes, shareable=True), Arena(total_bytes, shareable=True)
    for arena in (source, target):
        ctypes.memset(arena.address, 1, total_bytes)
    _seconds(source, target)
    yield partial(_seconds, source, target)


def _seconds(source: Arena, target: Arena) -> float:
    start = time.perf_counter()
    ctypes.memmove(target.address, source.address, target.num_bytes)
    return time.perf_counter() - start
