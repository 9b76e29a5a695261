"""A Ray cluster of several nodes on this machine, each a tree of processes that can be killed as a machine dies."""

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
# That a dead node is noticed in seconds.
_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}


def missing() -> str | None:
    """Why there can be no Ray here; None: there can."""
    return None if importlib.util.find_spec("ray") else "the Python package 'ray' is missing"


class RayNode:
    """`ray start --block`. Constructed when it has written `sign` into its log."""

    def __init__(self, *options: str, log: Path, sign: str) -> None:
        # Ray's own script, by the interpreter of these tests.
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
        """Whether that process runs on this node."""
        return any(process.pid == pid for process in self._family())

    def kill(self) -> None:
        """All at once, as if its power were gone. Idempotent."""
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
        """One more; the first is the head."""
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
    """All are gone when it is left."""
    # Ray makes Unix sockets deep in it, whose paths may not be long.
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    try:
        with ExitStack() as closing:
            yield RayNodes(closing, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
