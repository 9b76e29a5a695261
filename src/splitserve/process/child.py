"""Processes that are started and awaited: log, readiness, end. `ChildProcess` runs splitserve, `ForeignServer` others.

`wait_ready` has a deadline, and its error has the end of the log. `close` ends a process with all that it started. A
process also ends if this one is killed.
"""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]

from splitserve.core.errors import ClusterError
from splitserve.process.forks import ForkedProcess
from splitserve.process.lifecycle import ReadyInfo, read_ready_file
from splitserve.process.log_format import text_of
from splitserve.process.process_end import is_stopped
from splitserve.process.template import SCHEDULER_MODULE, ForkRequest, TemplateProcess

PROGRAM = (sys.executable, "-m", "splitserve")
# Module of the same program in a forked process.
_PROGRAM_MODULE = "splitserve.__main__"
# Seconds between two checks of a child.
POLL_INTERVAL = 0.05
# Seconds until a child that has to stop at once is killed.
_STOP_TIMEOUT = 12.0
# Seconds in which a server of another project must answer a probe.
_PROBE_TIMEOUT = 5.0
# Logger of the lines about single requests, as it is in a line.
_ACCESS_LOG = "[splitserve.router.access_log]"
# Bytes of a log. A longer one is moved to NAME.log.1, which replaces the one before.
_MAX_LOG_BYTES = 64 << 20
# The part of a log in which its last lines are searched.
_TAIL_BYTES = 1 << 16


class ChildProcess:
    """Child with the command `PROGRAM ARGS`, started by the constructor.

    `folder`: folder of its ready file, and of its log without `log_folder`. The log of an earlier process of the same
    name is continued. It ends when its standard input does (`--exit-with-parent`). `template`: template process
    that forks it. If that has ended, or is None, `program` is started. A forked process ignores `pass_fds`.
    """

    # Seconds in which its own children must end after it, until they are killed.
    _family_timeout = _STOP_TIMEOUT

    def __init__(
        self,
        name: str,
        args: Sequence[str],
        folder: Path,
        *,
        log_folder: Path | None = None,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        program: Sequence[str] = PROGRAM,
        template: TemplateProcess | None = None,
    ) -> None:
        self.name = name
        self.log_path = (log_folder or folder) / f"{name}.log"
        self.ready_path = folder / f"{name}.ready.json"
        self._ready: ReadyInfo | None = None
        # Child processes at the time when its standard input was closed. None: it is still open.
        self._left: list[psutil.Process] | None = None
        env = {**os.environ, **(env or {})}
        with self.log_path.open("ab") as log:
            # Position at which the lines of this process begin.
            self._log_start = log.tell()
            # The child is in its own session, so that a Ctrl-C in the terminal does not reach it.
            self._process = self._fork(template, args, env, log.fileno()) or subprocess.Popen(
                self._command(program, args),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=pass_fds,
                start_new_session=True,
            )

    def _fork(
        self, template: TemplateProcess | None, args: Sequence[str], env: Mapping[str, str], output: int
    ) -> ForkedProcess | None:
        if template is None:
            return None
        # Only workers are forked: `serve MODEL`.
        model = args[1] if len(args) > 1 and args[0] == "serve" else None
        command = self._command((), args)
        request = ForkRequest(module=_PROGRAM_MODULE, args=command, env=env, early=SCHEDULER_MODULE, model=model)
        return template.fork(request, output)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Return its exit code. None: it runs; negative: the signal that killed it."""
        return self._process.poll()

    @property
    def ready(self) -> ReadyInfo | None:
        """Return the content of its ready file. None: it is not ready yet."""
        self._ready = self._ready or self._read_ready()
        return self._ready

    def _command(self, program: Sequence[str], args: Sequence[str]) -> list[str]:
        return [*program, *args, "--exit-with-parent", "--ready-file", str(self.ready_path)]

    def _read_ready(self) -> ReadyInfo | None:
        return read_ready_file(self.ready_path)

    def wait_ready(self, timeout: float, interval: float = POLL_INTERVAL) -> ReadyInfo:
        """Wait until it is ready. Raises ClusterError with the end of its log."""
        deadline = time.monotonic() + timeout
        while (ready := self.ready) is None:
            if (code := self.exit_code) is not None:
                raise ClusterError(f"{self.name} ended with code {code} before it was ready:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ClusterError(f"{self.name} was not ready after {timeout:g} s:\n{self.log_tail()}")
            time.sleep(interval)
        return ready

    def log_tail(self, num_lines: int = 20) -> str:
        """Return the last lines of its log, as text also if it logs JSON. Empty: the log cannot be read.

        Lines of the access log are left out, because they would hide the reason for the end of a router.
        """
        try:
            with self.log_path.open("rb") as log:
                start = log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                found = log.read().decode(errors="replace").splitlines()
                # The first line may lack its beginning. A last line that long is shown nevertheless.
                if start > self._log_start and len(found) > 1:
                    del found[0]
        except OSError:
            return ""
        lines = "\n".join(map(text_of, found)).splitlines()
        return "\n".join([line for line in lines if _ACCESS_LOG not in line][-num_lines:])

    def bound_log(self, max_bytes: int = _MAX_LOG_BYTES) -> None:
        """Move a log of more than `max_bytes` to NAME.log.1. Lines that the process writes meanwhile may be lost.

        If the copy fails, for example on a full disk, the old lines are lost.
        """
        # The log may have been removed.
        with suppress(OSError):
            if self.log_path.stat().st_size > max_bytes:
                with suppress(OSError):
                    shutil.copyfile(self.log_path, f"{self.log_path}.1")
                # The process appends, so it continues at the beginning.
                os.truncate(self.log_path, 0)
                self._log_start = 0

    def send_signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send it a signal: the first SIGTERM drains it, the second stops it at once. No-op if it has ended."""
        if self.exit_code is None:
            self._process.send_signal(number)

    def wait(self, timeout: float) -> bool:
        """Return whether it has ended within `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def let_go(self) -> None:
        """Close its standard input, so that it stops at once. Does not wait; `close` does. Idempotent."""
        if self._left is None:
            # Collect the children before the process ends, because they get another parent then.
            self._left = self._family()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        """Stop it at once and wait until it and its own children are gone; kill those that do not end. Idempotent."""
        self.let_go()
        # By their handles: the pid of an ended process may be in use again.
        for process in (self._process, *(self._left or ())):
            if is_stopped(process.pid):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        if not self.wait(_STOP_TIMEOUT):
            self._process.kill()
            self._process.wait()
        _, alive = psutil.wait_procs(self._left or [], timeout=self._family_timeout)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive)

    def _family(self) -> list[psutil.Process]:
        """Return its children. psutil also compares start times, so a pid that is in use again is not touched."""
        with suppress(psutil.NoSuchProcess):
            children: list[psutil.Process] = psutil.Process(self.pid).children(recursive=True)
            return children
        # The schedulers of a worker that died end by themselves, which takes a while.
        found = []
        for pid in (*self.ready.scheduler_pids, *self.ready.follower_pids) if self.ready else ():
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if any("splitserve" in word for word in process.cmdline()):
                    found.append(process)
        return found


class ForeignServer(ChildProcess):
    """Server of another project. It is ready when a GET of `url` returns 200, and ended by SIGTERM."""

    _family_timeout = 1.0

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, url: str, *, env: Mapping[str, str] | None = None
    ) -> None:
        self._url = url
        super().__init__(name, command, folder, env=env, program=())

    def _command(self, program: Sequence[str], args: Sequence[str]) -> list[str]:
        setpriv = shutil.which("setpriv")
        # It ends with this process, even if this process is killed.
        return [*([setpriv, "--pdeathsig", "TERM"] if setpriv else []), *args]

    def _read_ready(self) -> ReadyInfo | None:
        try:
            with urllib.request.urlopen(self._url, timeout=_PROBE_TIMEOUT) as response:
                is_ready = response.status == 200
        except (OSError, http.client.HTTPException):
            return None
        parts = urlsplit(self._url)
        return ReadyInfo(pid=self.pid, port=parts.port or 0, url=f"http://{parts.netloc}") if is_ready else None

    def let_go(self) -> None:
        super().let_go()
        self.send_signal()
