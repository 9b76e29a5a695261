"""Placer of all processes of a cluster on this machine."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from splitserve.deploy.node_process import NodeProcess
from splitserve.deploy.placer import Observation, Phase, ProcessSpec
from splitserve.process.child import ChildProcess
from splitserve.process.owned_folder import OwnedFolder

ADDRESS = "127.0.0.1"


class LocalPlacer:
    """Placer for this machine. `log_folder` has one log per name. `close` removes it, unless `keep_logs` was called."""

    def __init__(self) -> None:
        self._folder = OwnedFolder.for_sockets()
        self._processes: dict[str, NodeProcess] = {}
        # Processes that could not be started.
        self._failed: dict[str, Observation] = {}
        self._lock = threading.Lock()

    @property
    def log_folder(self) -> Path:
        return self._folder.path

    def start(self, spec: ProcessSpec) -> None:
        try:
            process = NodeProcess(spec, ADDRESS, "this machine", self.log_folder)
        except OSError as error:
            with self._lock:
                self._failed[spec.name] = Observation(phase=Phase.ENDED, detail=f"could not be started: {error}")
            return
        with self._lock:
            self._processes[spec.name] = process

    def child(self, name: str) -> ChildProcess | None:
        """Return the process of that name. None: it could not be started, or was removed."""
        with self._lock:
            process = self._processes.get(name)
        return None if process is None else process.child

    def observe(self) -> Mapping[str, Observation]:
        with self._lock:
            failed, processes = dict(self._failed), dict(self._processes)
        return failed | {name: process.observe() for name, process in processes.items()}

    def terminate(self, name: str) -> None:
        if (child := self.child(name)) is not None:
            child.send_signal()

    def remove(self, name: str) -> None:
        with self._lock:
            process = self._processes.get(name)
        if process is not None:
            process.close()
        with self._lock:
            self._processes.pop(name, None)
            self._failed.pop(name, None)

    def keep_logs(self) -> None:
        """Leave the logs for the user."""
        self._folder.keep()

    def close(self) -> None:
        for process in list(self._processes.values()):
            process.child.let_go()
        for name in list(self._processes):
            self.remove(name)
        self._folder.close()
