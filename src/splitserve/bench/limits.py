"""What each transport is measured against: the fastest thing that moves the same bytes on this machine, without us.

What our own code moves is set against the same bytes in one piece, however many copies they came in: gathering and
scattering are our business. What a library moves is set against that library given the very same copies, by the call
it has for many of them: what we add must cost nothing, and where we coalesce or stage it must win.

Adding one: a file with `opened(copies)`, a context manager, and a line here. What it gives writes all copies once, from
region 0 into region 0, and returns the seconds; first writes, which connect and touch memory, lie behind it. Between
two calls it takes no core: ours is measured then. The file loads only when it is measured.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from splitserve.disaggregation.copies import Copies

# One write of all copies; its seconds.
Once = Callable[[], float]
OpenLimit = Callable[[Copies], AbstractContextManager[Once]]


@dataclass(frozen=True, slots=True)
class Limit:
    """The yardstick of one backend."""

    # As tables call it: what moves the bytes, and in which pieces.
    name: str
    module: str

    def load(self) -> OpenLimit:
        opened: OpenLimit = importlib.import_module(f"splitserve.bench.{self.module}").opened
        return opened


# Backends that move host memory between two processes: those that `bench transfer` can measure.
LIMITS = {
    "tcp": Limit("one piece by calls of 2 MiB through raw sockets", "bare_sockets"),
    "shm": Limit("one memcpy", "bare_memcpy"),
    "gloo": Limit("one piece by calls of 2 MiB through raw sockets", "bare_sockets"),
    "mooncake": Limit("the same pieces through the bare library", "bare_mooncake"),
    "nixl": Limit("the same pieces through the bare library", "bare_nixl"),
}
