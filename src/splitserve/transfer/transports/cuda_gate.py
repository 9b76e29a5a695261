"""Fence of GPU memory: a write gate that also records a sender that left without waiting for its GPU.

1. Inside the gate a sender writes a mark with its process, and removes it when its GPU has finished.
2. A sender may lose the lock with the mark in place, by death or by a CUDA error. Its kernel may then still write. The
   session is fenced when that process has ended, because the driver ends its work with it.

The mark is in the gate's file, behind the data of `write_gate.py`.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from splitserve.transfer.transports.write_gate import GateKey, WriteGate

# Whether a sender is inside, its process id, and the start time of that process: process ids are reused.
_MARK = struct.Struct("<?qq")
_PLACE = 8


class DeviceGate(WriteGate):
    def is_closed(self) -> bool:
        """Return whether the gate is closed and no GPU writes through it any more."""
        if not super().is_closed():
            return False
        mark = os.pread(self.fd, _MARK.size, _PLACE)
        if len(mark) < _MARK.size:
            return True
        is_inside, pid, began = _MARK.unpack(mark)
        return not is_inside or _began(pid) != began


class DeviceKey(GateKey):
    """Sender's key. The work inside `held` must have finished, on the GPU too, when the block ends without an error."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._process = (os.getpid(), _began(os.getpid()))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        with super().held():
            self._mark(True)
            yield
            self._mark(False)

    def _mark(self, is_inside: bool) -> None:
        os.pwrite(self._fd, _MARK.pack(is_inside, *self._process), _PLACE)


def _began(pid: int) -> int:
    """Return when a process started, in clock ticks since boot. -1 if it has ended, reaped or not."""
    try:
        # The name, in brackets, may contain any character.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])
