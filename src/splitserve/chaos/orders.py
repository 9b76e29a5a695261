"""Orders to fail, from whoever runs the test to a worker, as a file that is there while the order stands.

The worker that meets the ordered stage takes the file away and fails; whoever ordered it may take it back before. One
of them wins: a file can be removed only once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from splitserve.chaos.points import Stage

# Runs as a worker that takes orders.
PROGRAM = (sys.executable, "-m", "splitserve.chaos.faulty")
# The environment variable that names the file to the worker's schedulers.
FAULT_FILE = "SPLITSERVE_FAULT_FILE"
_SUFFIX = ".fault.json"


class Fault(msgspec.Struct, frozen=True):
    stage: Stage
    # What the worker's processes get: SIGKILL or SIGSTOP.
    signal: signal.Signals
    # How often the stage is passed before.
    skip: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """A fault that stands, or has happened."""

    path: Path

    @classmethod
    def give(cls, ready_file: Path, fault: Fault) -> Order:
        """To the worker with that ready file; an order that it has already is replaced."""
        order = cls(fault_file(ready_file))
        partial = order.path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(fault))
        partial.replace(order.path)
        return order

    @property
    def is_taken(self) -> bool:
        """The worker has met the stage."""
        return not self.path.exists()

    def withdraw(self) -> bool:
        """False: too late."""
        try:
            self.path.unlink()
        except FileNotFoundError:
            return False
        return True


def fault_file(ready_file: Path) -> Path:
    """Where the worker with that ready file looks for orders."""
    return ready_file.with_suffix(_SUFFIX)


class Trap:
    """The worker's end. `pids`: of the processes that fail together, its own last."""

    def __init__(self, path: Path, pids: Sequence[int]) -> None:
        self._path = path
        self._pids = pids
        # The order that is counted down, by the file's identity, and how often its stage may still pass.
        self._known: tuple[int, int] | None = None
        self._left = 0

    def visit(self, stage: Stage) -> None:
        """Called at every stage, from whatever thread."""
        try:
            stat = os.stat(self._path)
            fault = msgspec.json.decode(self._path.read_bytes(), type=Fault)
        except FileNotFoundError:
            return
        if self._known != (stat.st_ino, stat.st_mtime_ns):
            self._known, self._left = (stat.st_ino, stat.st_mtime_ns), fault.skip
        if fault.stage is not stage:
            return
        if self._left > 0:
            self._left -= 1
            return
        if Order(self._path).withdraw():
            self._fail(fault.signal)

    def _fail(self, number: signal.Signals) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
