"""Splitserve command in its own process, for tests of its output, signal handling and leftover files."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from splitserve.process.child import POLL_INTERVAL, PROGRAM
from splitserve.process.owned_folder import RUN_FOLDER_VARIABLE

# Seconds each wait may take.
DEADLINE = 180.0


class RunningCommand:
    """Running process of `PROGRAM ARGS`.

    `temporary`: its temporary directory. `run_folder`: its folder of running clusters. `output`: file that receives its
    standard output and standard error.
    """

    def __init__(self, command: Sequence[str], temporary: Path, run_folder: Path, output: Path) -> None:
        self.temporary = temporary
        self._run_folder = run_folder
        self._output = output
        # Environment for other commands that work with the same cluster.
        self.env = {**os.environ, "TMPDIR": str(temporary), RUN_FOLDER_VARIABLE: str(run_folder)}
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**self.env, "PYTHONUNBUFFERED": "1"},
            )
        self._children: dict[int, psutil.Process] = {}

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until the output contains `text` `count` times."""
        self._wait(lambda: self.output.count(text) >= count, f"it did not print {text!r}")

    def wait_for_handlers(self) -> None:
        """Wait until the process handles SIGINT and SIGTERM."""
        mask = (1 << (signal.SIGINT - 1)) | (1 << (signal.SIGTERM - 1))
        self._wait(lambda: self._caught_signals() & mask == mask, "it does not handle signals")

    def wait_for_child(self) -> None:
        """Wait until the process has started a child."""
        self._wait(lambda: bool(self.children()), "it has no child")

    def wait_for_cpu_seconds(self, seconds: float) -> None:
        """Wait until the process and its children have used `seconds` of CPU time, or until the process has ended."""
        deadline = time.monotonic() + DEADLINE
        while self._process.poll() is None and self._cpu_seconds() < seconds and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL / 5)

    def children(self) -> list[psutil.Process]:
        """Return all descendants that the process has started so far."""
        for process in psutil.Process(self.pid).children(recursive=True):
            self._children[process.pid] = process
        return list(self._children.values())

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def exit_code(self) -> int:
        """Wait for the end of the process and return its exit code."""
        return self._process.wait(DEADLINE)

    def check_nothing_is_left(self) -> None:
        """Assert that no process runs and that both folders are empty."""
        _, alive = psutil.wait_procs(list(self._children.values()), timeout=DEADLINE)
        assert alive == [], alive
        left = [*self.temporary.rglob("*"), *self._run_folder.rglob("*")]
        assert left == [], left

    def _cpu_seconds(self) -> float:
        total = 0.0
        for process in [psutil.Process(self.pid), *self.children()]:
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def _caught_signals(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1], 16)

    def close(self) -> None:
        """Kill the process if it still runs."""
        with self._process:
            self._process.kill()

    def _wait(self, holds: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while not holds():
            assert self._process.poll() is None, f"{problem}, and has ended:\n{self.output}"
            assert time.monotonic() < deadline, f"{problem}:\n{self.output}"
            time.sleep(POLL_INTERVAL)


@contextmanager
def running_command(*args: str, folder: Path, program: Sequence[str] = PROGRAM) -> Iterator[RunningCommand]:
    """Run a command with its output in `folder`.

    Its other folders have short names, because paths of Unix sockets have a short limit.
    """
    with tempfile.TemporaryDirectory(prefix="t") as temporary, tempfile.TemporaryDirectory(prefix="r") as run_folder:
        command = RunningCommand([*program, *args], Path(temporary), Path(run_folder), folder / "output")
        try:
            yield command
        finally:
            command.close()
