"""One process of a cluster, on the node where it runs: its folder, its secrets, its end."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

from splitserve.cluster.placer import NODE_ADDRESS, Observation, Phase, ProcessSpec
from splitserve.core.owned_folder import OwnedFolder
from splitserve.launch.child import PROGRAM, ChildProcess
from splitserve.launch.cluster_token import write_secret_file


class NodeProcess:
    """Runs from construction on. Raises OSError.

    `address`: of this node. `node`: the node for people. `parent`: folder in which its own folder and its log are; the
    log stays there. None: they are in the temporary directory, and go together.
    """

    def __init__(self, spec: ProcessSpec, address: str, node: str, parent: Path | None = None) -> None:
        self._node = node
        # Guards its folder and its last observation.
        self._lock = threading.Lock()
        self._is_closed = False
        with ExitStack() as closing:
            if parent is None:
                folder = closing.enter_context(OwnedFolder.for_sockets())
            else:
                # A short name: paths of Unix sockets in it have at most 107 bytes.
                folder = Path(tempfile.mkdtemp(prefix="", dir=parent))
                closing.callback(shutil.rmtree, folder, ignore_errors=True)
            args = [address if word == NODE_ADDRESS else word for word in spec.args]
            for option, content in spec.secrets.by_option.items():
                path = folder / option.strip("-")
                write_secret_file(path, content)
                args += [option, str(path)]
            self.child = ChildProcess(
                spec.name,
                args,
                folder,
                log_folder=parent,
                # What a killed process leaves in its temporary directory is removed with the folder.
                env={**spec.env, "TMPDIR": str(folder)},
                pass_fds=() if spec.listen_fd is None else (spec.listen_fd,),
                program=spec.program or PROGRAM,
            )
            self._last = self._observe()
            self._closing = closing.pop_all()

    def observe(self) -> Observation:
        """From any thread, also while or after another one closes it."""
        with self._lock:
            if not self._is_closed:
                self._last = self._observe()
            return self._last

    def terminate(self) -> None:
        self.child.send_signal()

    def close(self) -> None:
        """End it at once, with all that it started, and remove its folder. Idempotent."""
        self.child.close()
        with self._lock:
            if not self._is_closed:
                self._is_closed, self._last = True, self._observe()
                self._closing.close()

    def _observe(self) -> Observation:
        child, code = self.child, self.child.exit_code
        if code is not None:
            tail = child.log_tail()
            return Observation(phase=Phase.ENDED, node=self._node, detail=_end(code), log_tail=tail, exit_code=code)
        child.bound_log()
        phase = Phase.LOADING if child.ready is None else Phase.READY
        return Observation(phase=phase, node=self._node, pid=child.pid, ready=child.ready)


def _end(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
