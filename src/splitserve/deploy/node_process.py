"""Process of a cluster on its node: its folder, its secrets, its end."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

from splitserve.deploy.placer import NODE_ADDRESS, Observation, Phase, ProcessSpec
from splitserve.process.child import PROGRAM, ChildProcess
from splitserve.process.cluster_token import write_secret_file
from splitserve.process.owned_folder import OwnedFolder


class NodeProcess:
    """Process that the constructor starts. Raises OSError.

    `address`: of this node. `node`: name of the node for operators. `parent`: folder for its own folder and its log;
    the log stays there. None: both are in the temporary directory, and are removed together.
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
                # Files that a killed process leaves in its temporary directory are removed with the folder.
                env={**spec.env, "TMPDIR": str(folder)},
                pass_fds=() if spec.listen_fd is None else (spec.listen_fd,),
                program=spec.program or PROGRAM,
            )
            self._last = self._observe()
            self._closing = closing.pop_all()

    def observe(self) -> Observation:
        """Return its state. Callable from any thread, also during or after `close`."""
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
