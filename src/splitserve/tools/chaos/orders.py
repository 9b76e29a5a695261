"""Fault orders from a test to a worker. An order is a file that exists while the order is pending.

The worker that reaches the ordered stage removes the file and fails. The test may remove the file before that. Only one
of them succeeds, because a file can be removed only once.
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

from splitserve.tools.chaos.points import FaultStage

# Command of a worker that accepts fault orders.
PROGRAM = (sys.executable, "-m", "splitserve.cli.faulty")
# Environment variable with the path of the file, for the worker's schedulers.
FAULT_FILE = "SPLITSERVE_FAULT_FILE"
_SUFFIX = ".fault.json"


class Fault(msgspec.Struct, frozen=True):
    stage: FaultStage
    # Signal that the worker's processes receive: SIGKILL or SIGSTOP.
    signal: signal.Signals
    # Number of times that the stage is reached without a fault before.
    skip: int = 0


@dataclass(frozen=True, slots=True)
class FaultOrder:
    """Fault that is pending or has happened."""

    path: Path

    @classmethod
    def give(cls, ready_file: Path, fault: Fault) -> FaultOrder:
        """Order a fault from the worker with that ready file. Replaces its pending order."""
        order = cls(fault_file(ready_file))
        partial = order.path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(fault))
        partial.replace(order.path)
        return order

    @property
    def is_taken(self) -> bool:
        """Return whether the worker has reached the stage."""
        return not self.path.exists()

    def withdraw(self) -> bool:
        """Withdraw the order. Return False if it is too late."""
        try:
            self.path.unlink()
        except FileNotFoundError:
            return False
        return True


def fault_file(ready_file: Path) -> Path:
    """Return the path of the order file of the worker with that ready file."""
    return ready_file.with_suffix(_SUFFIX)


class Trap:
    """Worker side of fault orders. `pids`: processes that fail together, its own last."""

    def __init__(self, path: Path, pids: Sequence[int]) -> None:
        self._path = path
        self._pids = pids
        # Pending order, by the file's identity, and how often its stage may still be reached without a fault.
        self._known: tuple[int, int] | None = None
        self._left = 0

    def visit(self, stage: FaultStage) -> None:
        """Fail if an order for this stage is due. Called at every stage, from any thread."""
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
        if FaultOrder(self._path).withdraw():
            self._fail(fault.signal)

    def _fail(self, number: signal.Signals) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
