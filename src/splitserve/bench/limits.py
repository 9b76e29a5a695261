"""What each transport is measured against: the fastest thing that moves the same bytes on this machine, without us.

What our own code moves is set against the same bytes in one piece, however many copies they came in: gathering and
scattering are our business. What a library moves is set against that library given the very same copies, by the call
it has for many of them: what we add must cost nothing, and where we coalesce or stage it must win.

Adding one: a file with `measure(copies, repeats)`, which returns GB/s of one write of all copies, from region 0 into
region 0, the first not counted, median of the repeats; and a line here. It loads only when it is measured.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from splitserve.disaggregation.copies import Copies

# (copies of one write, writes) -> GB/s.
Measure = Callable[[Copies, int], float]


@dataclass(frozen=True, slots=True)
class Limit:
    """The yardstick of one backend."""

    # As tables call it: what moves the bytes, and in which pieces.
    name: str
    module: str

    def load(self) -> Measure:
        measure: Measure = importlib.import_module(f"splitserve.bench.{self.module}").measure
        return measure


# Backends that move host memory between two processes: those that `bench transfer` can measure.
LIMITS = {
    "tcp": Limit("one piece by calls of 2 MiB through raw sockets", "bare_sockets"),
    "shm": Limit("one memcpy", "bare_memcpy"),
    "gloo": Limit("one piece by calls of 2 MiB through raw sockets", "bare_sockets"),
    "mooncake": Limit("the same pieces through the bare library", "bare_mooncake"),
    "nixl": Limit("the same pieces through the bare library", "bare_nixl"),
}
