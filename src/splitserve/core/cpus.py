"""Numbers of CPU cores as text."""

from __future__ import annotations

# CPU threads of a rank, at most: more than a host has cores.
MAX_THREADS = 1024


def parse_cpus(text: str) -> set[int]:
    """Return the cores in numbers and ranges as taskset and Linux write them, such as `0-3,8`. Raises ValueError."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        named = range(int(first), int(last if dash else first) + 1)
        if not named:
            raise ValueError(f"{part!r} names no core")
        cpus |= set(named)
    return cpus
