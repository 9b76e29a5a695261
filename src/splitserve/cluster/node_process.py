"""One process of a cluster, on the node where it runs: its folder, its secrets, its end."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from pathlib import Path

from splitserve.cluster.placer import NODE_ADDRESS, Observation, Phase, ProcessSpec
from splitserve.launch.child import ChildProcess
from splitserve.launch.cluster_token import write_secret_file


class NodeProcess:
    """Runs from construction on. `address`: of this node; `node`: the node for people. Raises OSError."""

    def __init__(self, spec: ProcessSpec, address: str, node: str, parent: Path | None = None) -> None:
        self._node = node
        # Over its folder, and what is known of it.
        self._lock = threading.Lock()
        self._is_closed = False
        self._folder = Path(tempfile.mkdtemp(prefix=f"{spec.name}-", dir=parent))
        try:
            args = [address if word == NODE_ADDRESS else word for word in spec.args]
            for option, content in spec.secrets.by_option.items():
                path = self._folder / option.strip("-")
                write_secret_file(path, content)
                args += [option, str(path)]
            # What a process that is killed leaves behind goes with the folder.
            env = {**spec.env, "TMPDIR": str(self._folder)}
            self._child = ChildProcess(spec.name, args, self._folder, env=env)
            self._last = self._look()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def observe(self) -> Observation:
        """From any thread, also while or after another one closes it."""
        with self._lock:
            if not self._is_closed:
                self._last = self._look()
            return self._last

    def terminate(self) -> None:
        self._child.send_signal()

    def close(self, keep_log: Path | None = None) -> None:
        """End it at once, with all that it started. `keep_log`: where its log goes; None: nowhere. Idempotent."""
        self._child.close()
        with self._lock:
            if self._is_closed:
                return
            self._is_closed, self._last = True, self._look()
            if keep_log is not None:
                shutil.move(self._child.log_path, keep_log)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _look(self) -> Observation:
        child, code = self._child, self._child.exit_code
        if code is not None:
            tail = child.log_tail()
            return Observation(phase=Phase.ENDED, node=self._node, detail=_end(code), log_tail=tail, exit_code=code)
        phase = Phase.LOADING if child.ready is None else Phase.READY
        return Observation(phase=phase, node=self._node, pid=child.pid, ready=child.ready)


def _end(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
