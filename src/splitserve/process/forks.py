"""Forked processes, which share the imported modules of their parent.

Fork only in a process with one thread: a lock that another thread holds is never released in the child.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import select
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from typing import IO, NoReturn

from splitserve.process.process_end import leave

STANDARD_ERROR = 2
# Process that was started, or forked by this process, before its `main`. `take_early` returns it and sets this to None.
_early: EngineProcess | None = None


class ForkedProcess:
    """Forked child of this process, with the methods of `subprocess.Popen` that are used here.

    `stdin`: writes to its standard input.
    """

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        self.pid = pid
        self.stdin = stdin
        # Exit code. Negative: the signal that killed the process. None: it runs.
        self.returncode: int | None = None
        # Guards `returncode`. While a thread holds it, the system cannot reuse the process id.
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code. None: the process runs. Negative: the signal that killed it."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended, and return its exit code. Raises subprocess.TimeoutExpired."""
        with self._lock:
            fd = os.pidfd_open(self.pid) if self.returncode is None else None
        if fd is not None:
            try:
                ended = select.poll()
                ended.register(fd, select.POLLIN)
                ended.poll(None if timeout is None else timeout * 1000)
            finally:
                os.close(fd)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal. No-op if the process has ended."""
        if self.poll() is None:
            with self._lock:
                if self.returncode is None:
                    os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(9)


EngineProcess = subprocess.Popen[bytes] | ForkedProcess


def run_forked(module: str, args: Sequence[str], stdin: int, output: int, early: str | None = None) -> NoReturn:
    """Run `main` of a module in this forked process, in a session of its own, then end the process.

    `stdin`, `output`: descriptors that become its standard input, and its standard output and error. `early`: module
    of a process to fork before `main`, for `take_early`.
    """
    code: int | str | None = 1
    try:
        os.setsid()
        for number, fd in enumerate((stdin, output, output)):
            os.dup2(fd, number)
        for fd in {stdin, output} - {0, 1, 2}:
            os.close(fd)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.argv = [module, *args]
        show_command(module, args)
        # The temporary folder of the parent may differ.
        tempfile.tempdir = None
        if early is not None:
            _fork_early(early)
        code = importlib.import_module(module).main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)


def show_command(module: str, args: Sequence[str]) -> None:
    """Write `python -m MODULE ARGS` over the command line that `ps` shows for this process, within its length."""
    with open("/proc/self/stat") as stat:
        # Fields 48 and 49 of proc(5): first and last address of the command line. The second field ends with ")".
        start, end = map(int, stat.read().rpartition(")")[2].split()[45:47])
    content = os.fsencode("\0".join((sys.executable, "-m", module, *args)))[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, content, len(content))


def _fork_early(module: str) -> None:
    global _early
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(writer)
        run_forked(module, (), reader, STANDARD_ERROR)
    os.close(reader)
    _early = ForkedProcess(pid, os.fdopen(writer, "wb", buffering=0))


def has_early() -> bool:
    """Return whether `take_early` would return a process."""
    return _early is not None


def set_early(process: EngineProcess) -> None:
    """Keep a process for `take_early`."""
    global _early
    _early = process


def end_early() -> None:
    """End the process that `take_early` would return, which holds nothing. No-op if there is none."""
    if (process := take_early()) is not None:
        end(process)


def end(process: EngineProcess) -> None:
    """Kill a process that holds nothing, and wait for its end."""
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def take_early() -> EngineProcess | None:
    """Return the process that was started or forked before `main` of this one. None: none, or already taken."""
    global _early
    found, _early = _early, None
    return found
