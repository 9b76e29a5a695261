"""Faults of a worker: at which stage of a request it fails, and the orders for them.

- Stages. The scheduler process reaches a stage when it calls a certain function, returns from it, or is halfway through
  it. Only workers that were started for faults (PROGRAM) wrap these functions.
- Orders. An order is a file that exists while it is pending. The worker that reaches the ordered stage removes the file
  and fails. The test may remove the file before that. Only one of them succeeds, because a file can be removed only
  once.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from splitserve.transfer.copies import cut, num_bytes

# Command of a worker that accepts fault orders.
PROGRAM = (sys.executable, "-m", "splitserve.cli.faulty")
# Environment variable with the path of the file, for the worker's schedulers.
FAULT_FILE = "SPLITSERVE_FAULT_FILE"
_SUFFIX = ".fault.json"
# Called when a stage is reached. It need not return.
OnStage = Callable[["FaultStage"], None]


class FaultStage(enum.StrEnum):
    """Stage of one request, from the view of the worker that fails."""

    # The request waits for its computation (prefill) or its handshake (decode).
    QUEUED = "queued"
    # It waits for the pair's pages (prefill), or has just announced its own (decode).
    HANDSHAKE = "handshake"
    # A chunk of the prompt was computed (prefill), or its KV has arrived (decode).
    MID_CHUNK = "mid-chunk"
    # Half the bytes of a write were sent (prefill), or have arrived (decode).
    MID_TRANSFER = "mid-transfer"
    # All KV is in place, but no message about it has been sent yet.
    BEFORE_FIRST_TOKEN = "before-first-token"
    # Output tokens are sent.
    MID_STREAM = "mid-stream"


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

    def reach(self, stage: FaultStage) -> None:
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


def install(on_stage: OnStage) -> None:
    """Call `on_stage` at every stage of this process, whatever its role is and will be."""
    from splitserve.scheduler.roles.decode import DecodePreallocQueue, DecodeRole
    from splitserve.scheduler.roles.prefill import PrefillBootstrapQueue, PrefillEntry, PrefillRole
    from splitserve.scheduler.running import RunningSet
    from splitserve.transfer.receiver import KVReceiver
    from splitserve.transfer.transports import shm, tcp

    # (owner, method, whether its end is the stage instead of its start, stage)
    methods: list[tuple[type, str, bool, FaultStage]] = [
        (PrefillBootstrapQueue, "add", True, FaultStage.HANDSHAKE),
        (RunningSet, "add", True, FaultStage.QUEUED),
        (PrefillEntry, "send_chunk", True, FaultStage.MID_CHUNK),
        (PrefillRole, "_finish", False, FaultStage.BEFORE_FIRST_TOKEN),
        (PrefillRole, "finish_step", True, FaultStage.MID_STREAM),
        (DecodePreallocQueue, "add", True, FaultStage.QUEUED),
        (KVReceiver, "init", True, FaultStage.HANDSHAKE),
        (DecodeRole, "_begin_decoding", False, FaultStage.BEFORE_FIRST_TOKEN),
        (DecodeRole, "finish_step", True, FaultStage.MID_STREAM),
    ]
    for owner, name, at_end, stage in methods:
        setattr(owner, name, _reporting(getattr(owner, name), on_stage, stage, at_end=at_end))
    # Of `shm`, and of `tcp` on one host. Such a write calls nothing at the receiver, so decode does not reach MID_CHUNK
    # and MID_TRANSFER.
    shm.ShmOutgoing.write = _halved(shm.ShmOutgoing.write, on_stage, at=2)  # type: ignore[method-assign]
    # Only `tcp` through sockets moves bytes with these functions.
    tcp.send_copies = _halved(tcp.send_copies, on_stage)
    tcp.receive_copies = _reporting(_halved(tcp.receive_copies, on_stage), on_stage, FaultStage.MID_CHUNK, at_end=True)


def _reporting(
    function: Callable[..., Any], on_stage: OnStage, stage: FaultStage, *, at_end: bool
) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not at_end:
            on_stage(stage)
        result = function(*args, **kwargs)
        if at_end:
            on_stage(stage)
        return result

    return wrapped


def _halved(move: Callable[..., None], on_stage: OnStage, at: int = 1) -> Callable[..., None]:
    """Split a call that moves copies into two of about half the bytes, with `on_stage` between.

    `at`: position of the copies in the arguments. Only the first call passes on `head`.
    """

    @functools.wraps(move)
    def wrapped(*args: Any, **head: Any) -> None:
        before, copies, after = args[:at], args[at], args[at + 1 :]
        pieces = cut(copies, max(1, num_bytes(copies) // 2))
        half = len(pieces) // 2
        move(*before, pieces[:half], *after, **head)
        on_stage(FaultStage.MID_TRANSFER)
        move(*before, pieces[half:], *after)

    return wrapped


def main() -> int:
    """Run a scheduler process of a worker that accepts fault orders."""
    from splitserve.worker import scheduler_process

    # The front end fails with the scheduler, as on a machine that fails.
    install(Trap(Path(os.environ[FAULT_FILE]), (os.getppid(), os.getpid())).reach)
    return scheduler_process.main()
