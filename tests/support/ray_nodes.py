"""Ray cluster of several nodes on this machine. A node is a process tree that tests can kill as a machine fails."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

# Seconds until a node must have joined.
_START_SECONDS = 60.0
_POLL_INTERVAL = 0.1
# Settings for the detection of a dead node within seconds.
_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}


def missing() -> str | None:
    """Return why Ray cannot run here. None: it can."""
    return None if importlib.util.find_spec("ray") else "the Python package 'ray' is missing"


class RayNode:
    """Process of `ray start --block`. The constructor returns when the log has a match of the pattern `sign`."""

    def __init__(self, *options: str, log: Path, sign: str) -> None:
        # Ray's own script, run by the interpreter of these tests.
        script = "from ray.scripts.scripts import main; main()"
        command = [sys.executable, "-c", script, "start", *options, "--block", "--disable-usage-stats"]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True, env={**os.environ, **_ENV}
            )
        deadline = time.monotonic() + _START_SECONDS
        while (found := re.search(sign, log.read_text())) is None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"no Ray node: {log.read_text()}")
            time.sleep(_POLL_INTERVAL)
        self.sign = found

    def has(self, pid: int) -> bool:
        """Return whether the process runs on this node."""
        return any(process.pid == pid for process in self._family())

    def kill(self) -> None:
        """Kill all processes at once, as a power failure does. Idempotent."""
        family = [*self._family(), psutil.Process(self._process.pid)] if self._process.poll() is None else []
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=10.0)
        self._process.wait()

    def _family(self) -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(self._process.pid).children(recursive=True)
        return children


class RayNodes:
    def __init__(self, closing: ExitStack, folder: Path) -> None:
        self._closing = closing
        self._folder = folder
        self._count = 0
        self.address = ""

    def start(self, num_cpus: int) -> RayNode:
        """Start a node. The first one is the head."""
        options, sign = ["--num-cpus", str(num_cpus), "--object-store-memory", str(80 << 20)], "Ray runtime started"
        if self.address:
            options += ["--address", self.address]
        else:
            options += ["--head", "--port", "0", "--include-dashboard", "false", "--temp-dir", str(self._folder)]
            sign = r"--address='([^']+)'"
        self._count += 1
        node = RayNode(*options, log=self._folder / f"node-{self._count}.log", sign=sign)
        self._closing.callback(node.kill)
        self.address = self.address or node.sign[1]
        return node


@contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    """Yield an empty cluster. All its nodes are killed at the end."""
    # Ray creates Unix sockets deep inside this folder, and their paths have a short limit.
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    try:
        with ExitStack() as closing:
            yield RayNodes(closing, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
