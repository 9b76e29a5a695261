"""Worker that was forked from the template of the tests. Its ranks fork, too, which saves each the import of torch.

Before `main`, while the worker has one thread, it forks a template of its own, which ends before it. An orphan would be
a zombie until init reaps it, and init may take two seconds, for which the end of each worker would wait.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import threading
from collections.abc import Sequence
from importlib import import_module

from splitserve.core.environment import OPENMP_ENVIRONMENT
from splitserve.process import forks, template
from splitserve.process.engine_start import QUICK_START
from splitserve.process.forks import ForkedProcess
from splitserve.ranks import processes

# Environment variable with the module of the worker.
MODULE = "SPLITSERVE_TESTS_WORKER_MODULE"


class _RankTemplate(template.TemplateProcess):
    """Template of the ranks of this worker. The worker adopts them."""

    def __init__(self) -> None:
        template._adopt_orphans(True)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        if (pid := os.fork()) == 0:
            try:
                self._socket.close()
                if (early := forks.take_early()) is not None:
                    # It ends with its standard input, so only the worker may hold the other end.
                    early.stdin.close()  # type: ignore[union-attr]
                template.main(theirs.detach(), ())
            finally:
                os._exit(0)
        theirs.close()
        atexit.register(_end, pid)

    def _log_end(self) -> None:
        """Log nothing: it is no process of its own."""

    def spawn(self, command: Sequence[str]) -> ForkedProcess | None:
        env = {**OPENMP_ENVIRONMENT, **os.environ}
        request = template.ForkRequest(module=command[-1], args=(), env=env, early=None)
        return self.fork(request, forks.STANDARD_ERROR)


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def main() -> None:
    ranks, spawn = _RankTemplate(), processes.spawn  # type: ignore[attr-defined]

    def fork_or_spawn(command: Sequence[str], descriptors: Sequence[int] = ()) -> forks.EngineProcess:
        # A forked process has no descriptors of its starter.
        can_fork = tuple(command[:-1]) == QUICK_START and not descriptors
        return (ranks.spawn(command) if can_fork else None) or spawn(command, descriptors)

    processes.spawn = fork_or_spawn  # type: ignore[attr-defined, assignment]
    import_module(os.environ.pop(MODULE)).main()
