"""All processes of a cluster on this machine."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from splitserve.cluster.node_process import NodeProcess
from splitserve.cluster.placer import Observation, Phase, ProcessSpec

ADDRESS = "127.0.0.1"


class LocalPlacer:
    """`log_folder` has the log of each process that has ended; it goes with a `close` before which none had failed."""

    def __init__(self) -> None:
        self.log_folder = Path(tempfile.mkdtemp(prefix="splitserve-"))
        self._processes: dict[str, NodeProcess] = {}
        # Those that could not be started.
        self._failed: dict[str, Observation] = {}
        self._has_failed = False
        self._lock = threading.Lock()

    def start(self, spec: ProcessSpec) -> None:
        try:
            process = NodeProcess(spec, ADDRESS, "this machine", self.log_folder)
        except OSError as error:
            with self._lock:
                self._failed[spec.name] = Observation(phase=Phase.ENDED, detail=f"could not be started: {error}")
            return
        with self._lock:
            self._processes[spec.name] = process

    def observe(self) -> Mapping[str, Observation]:
        with self._lock:
            failed, processes = dict(self._failed), dict(self._processes)
        seen = failed | {name: process.observe() for name, process in processes.items()}
        self._has_failed = self._has_failed or any(_is_failure(found) for found in seen.values())
        return seen

    def terminate(self, name: str) -> None:
        with self._lock:
            process = self._processes.get(name)
        if process is not None:
            process.terminate()

    def remove(self, name: str) -> None:
        with self._lock:
            process = self._processes.get(name)
        if process is not None:
            process.close(keep_log=self.log_folder / f"{name}.log")
        with self._lock:
            self._processes.pop(name, None)
            self._failed.pop(name, None)

    def close(self) -> None:
        for name in list(self._processes):
            self.remove(name)
        if not self._has_failed:
            shutil.rmtree(self.log_folder, ignore_errors=True)


def _is_failure(found: Observation) -> bool:
    return found.phase is Phase.ENDED and found.detail != "exited with code 0"
