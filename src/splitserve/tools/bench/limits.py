"""Limits of the transports: the fastest way to move the same bytes on this machine without Splitserve's transports.

The limit of a transport with our own code is the same bytes in one piece, because gathering and scattering are part of
our work. The limit of a transport over a library is that library with the same copies, in its call for many of them:
our additions must cost nothing, and coalescing or staging must win.

To add one, write a file with `opened(copies)`, a context manager, and add a line here. It yields a function that writes
all copies once, from region 0 into region 0, and returns the seconds. First writes, which connect and touch memory, are
done before. Between two calls it uses no core, because our transport is measured then. The file is loaded only when it
is measured.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from splitserve.transfer.copies import Copies

# Writes all copies once and returns the seconds.
Once = Callable[[], float]
OpenLimit = Callable[[Copies], AbstractContextManager[Once]]


@dataclass(frozen=True, slots=True)
class Limit:
    """Limit of one backend."""

    # Name in tables: what moves the bytes, and in which pieces.
    name: str
    module: str

    def load(self) -> OpenLimit:
        opened: OpenLimit = importlib.import_module(f"splitserve.tools.bench.{self.module}").opened
        return opened


# Backends that move host memory between two processes, which `bench transfer` can measure.
LIMITS = {
    "tcp": Limit("one piece by calls of 2 MiB through raw sockets", "bare_sockets"),
    "shm": Limit("one memcpy", "bare_memcpy"),
    "gloo": Limit("one piece by calls of 2 MiB through raw sockets", "bare_sockets"),
    "mooncake": Limit("the same pieces through the bare library", "bare_mooncake"),
    "nixl": Limit("the same pieces through the bare library", "bare_nixl"),
}
