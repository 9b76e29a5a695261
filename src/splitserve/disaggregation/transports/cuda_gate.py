"""The fence of GPU memory: a write gate that also knows whether somebody went without waiting for its GPU.

1. Inside the gate a sender leaves a mark, with its process, and takes it back when its GPU has finished.
2. A lock that fell with the mark in place, by death or by an error of CUDA, proves nothing yet: the kernel under way
   may still write. The fence then stands when that process has ended, for with it the driver ends its work.

The mark lies in the gate's file, behind what `write_gate.py` keeps there.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from splitserve.disaggregation.transports.write_gate import GateKey, WriteGate

# Whether somebody is inside, its process, and when that began, by the kernel's clock: numbers of processes come again.
_MARK = struct.Struct("<?qq")
_PLACE = 8


class DeviceGate(WriteGate):
    def is_closed(self) -> bool:
        """Whether the gate is closed and no GPU writes through it any more."""
        if not super().is_closed():
            return False
        mark = os.pread(self.fd, _MARK.size, _PLACE)
        if len(mark) < _MARK.size:
            return True
        is_inside, pid, began = _MARK.unpack(mark)
        return not is_inside or _began(pid) != began


class DeviceKey(GateKey):
    """Its `held` is for work that has finished, on the GPU too, when the block ends well."""

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
    """When a process began, in ticks since the machine did; -1 for one that has ended, waited for or not."""
    try:
        # The name, in brackets, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])
