"""CPU cores: how many this process may use, and their numbers as text."""

from __future__ import annotations

import os

# Limit of CPU threads per rank: more cores than a host has.
MAX_THREADS = 1024


def parse_cpus(text: str) -> set[int]:
    """Return the core numbers in a list such as `0-3,8`, the format of taskset and Linux. Raises ValueError."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        named = range(int(first), int(last if dash else first) + 1)
        if not named:
            raise ValueError(f"{part!r} names no core")
        cpus |= set(named)
    return cpus


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
