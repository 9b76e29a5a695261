"""What each transport is measured against: the fastest thing that moves the same bytes on this machine, without us.

Adding one: a file with `measure(total_bytes, repeats)`, which returns GB/s of one large contiguous piece, memory
touched before, median of the repeats; and a line here. It loads only when it is measured.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

# (bytes of one transfer, transfers) -> GB/s.
Measure = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class Limit:
    """The yardstick of one backend."""

    # As tables call it.
    name: str
    module: str

    def load(self) -> Measure:
        measure: Measure = importlib.import_module(f"splitserve.bench.{self.module}").measure
        return measure


# Backends that move host memory between two processes: those that `bench transfer` can measure.
LIMITS = {
    "tcp": Limit("raw sockets", "bare_sockets"),
    "shm": Limit("memcpy", "bare_memcpy"),
    "gloo": Limit("raw sockets", "bare_sockets"),
    "mooncake": Limit("bare mooncake", "bare_mooncake"),
    "nixl": Limit("bare nixl", "bare_nixl"),
}
