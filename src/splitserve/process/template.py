"""Template process: imports modules once, and forks processes that share them.

`python -m splitserve.process.template FD SPACE MODULE...` imports the modules. Then it forks one process per request
on the socket FD, and ends when the peer closes the socket. It has one thread then, so a fork is safe.

The template forks twice per request, and the intermediate process ends at once. So the system makes the owner of the
template, a subreaper, the parent of the new process. The owner gets its exit code, and it outlives the template.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

import msgspec

from splitserve.core.environment import OPENMP_ENVIRONMENT
from splitserve.process.forks import ForkedProcess, run_forked, show_command

logger = logging.getLogger(__name__)

# Module of a scheduler's process, which the front end forks before its `main`.
SCHEDULER_MODULE = "splitserve.worker.scheduler_process"
# Modules of a worker's front end and scheduler. Functions import those after the first line.
WORKER_MODULES = (
    *("splitserve.__main__", "splitserve.cli", "splitserve.worker.start", "splitserve.worker.worker", SCHEDULER_MODULE),
    *("uvloop", "uvicorn.lifespan.on", "pydantic.v1", "httpcore", "splitserve.transfer.transports.tcp"),
    *("encodings.idna", "numpy.ctypeslib", "transformers.models.llama.modeling_llama"),
)
# Module and function that load the tokenizer of a model for all forked processes.
_SHARE_TOKENIZER = ("splitserve.worker.shared_tokenizer", "share_tokenizer")
# Environment of every template. OpenMP and BLAS must not start threads on import. Workers set torch's number later.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
# Maximum size of a request, bytes. A socket cannot send a larger one.
_MAX_REQUEST = 1 << 20
# Seconds in which a process that does not reply may end.
_END_TIMEOUT = 1.0
# Bytes of its output that are logged when it has ended.
_TAIL_BYTES = 4096
# Argument that leaves space for the command lines of forked processes.
_SPACE = "-" * 2000
# From linux/prctl.h.
_PR_SET_CHILD_SUBREAPER = 36


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request for one process. The message also carries descriptors of its standard input and of its log."""

    # Module, and arguments and environment of its `main`. The environment replaces that of the template.
    module: str
    args: Sequence[str]
    env: Mapping[str, str]
    # Module of a process that the new process forks before its `main` (`take_early`). None: no such process.
    early: str | None
    # The template loads the tokenizer of this model before it forks, unless it has it. None: no tokenizer.
    model: str | None = None


def is_supported() -> bool:
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


class TemplateProcess:
    """Template process, as seen by its owner. The constructor starts it.

    Until `close`, the owner is the parent of all orphans below it, so it has to call `reap_orphans`. `env`: variables
    for its imports. If it ends, its last output is logged. Raises OSError.
    """

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "splitserve.process.template", str(theirs.fileno()), _SPACE, *modules]
        self.env = env
        # A file without a name.
        self._output = os.fdopen(os.memfd_create("splitserve-template-output", os.MFD_CLOEXEC), "rb", buffering=0)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **env},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except BaseException:
            self._socket.close()
            self._output.close()
            raise
        # Whether it was killed, or its end was logged.
        self._is_end_known = False
        _adopt_orphans(True)
        # Held during a request and its reply.
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, request: ForkRequest, output: int) -> ForkedProcess | None:
        """Return a forked process with `output` as its standard output and error. None: the template has ended.

        Waits until the template has imported its modules.
        """
        reader, writer = os.pipe()
        stdin = os.fdopen(writer, "wb", buffering=0)
        try:
            with self._lock:
                # Words and variables need not be UTF-8. The standard library encodes also such text.
                content = json.dumps(msgspec.to_builtins(request)).encode()
                socket.send_fds(self._socket, [content], [reader, output])
                reply = self._socket.recv(32)
            if reply:
                return ForkedProcess(int(reply), stdin)
        except OSError as error:
            logger.debug("template process did not reply: %s", error)
        finally:
            os.close(reader)
        # If the template forked a process without a reply, this ends it: its standard input is closed.
        stdin.close()
        self._log_end()
        return None

    def _log_end(self) -> None:
        """Log, once, that it has ended by itself. If only a fork failed, it runs."""
        with self._lock:
            if self._is_end_known:
                return
            try:
                code = self._process.wait(_END_TIMEOUT)
            except subprocess.TimeoutExpired:
                return
            self._is_end_known = True
            self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = self._output.read().decode(errors="replace").strip()
        logger.warning("worker template ended, workers start without it exit_code=%d output=%r", code, tail)

    def kill(self) -> None:
        """Kill the template. A pending request returns no process. Idempotent."""
        self._is_end_known = True
        self._process.kill()

    def close(self) -> None:
        """Kill the template, and wait until it has ended. Idempotent."""
        self.kill()
        self._process.wait()
        with self._lock:
            self._socket.close()
            self._output.close()
        _adopt_orphans(False)


# Template that `start_early_template` started. `take_early_template` returns it and sets this to None.
_early: TemplateProcess | None = None


def worker_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the template for workers with `env`, beyond that of this process."""
    openmp = {name: value for name, value in OPENMP_ENVIRONMENT.items() if name not in os.environ}
    return {**openmp, **env, **_ENVIRONMENT}


def start_early_template() -> None:
    """Start a template of workers, before it is known whether it is needed. Raises OSError."""
    global _early
    _early = TemplateProcess(WORKER_MODULES, worker_environment({}))


def take_early_template(env: Mapping[str, str]) -> TemplateProcess | None:
    """Return the early template if it has this environment. Else end it, and return None."""
    global _early
    found = _early
    if found is not None and found.env != env:
        end_early_template()
        return None
    _early = None
    return found


def end_early_template() -> None:
    """End the early template, unless it was taken."""
    global _early
    found, _early = _early, None
    if found is not None:
        found.close()


def _adopt_orphans(is_on: bool) -> None:
    """Make this process the parent of descendants after their own parents have ended, or stop that."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


def reap_orphans(own: Collection[int]) -> None:
    """Collect the exit codes of adopted orphans: ended children of this process, except those in `own`."""
    # ChildProcessError: there are no children.
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
            os.waitpid(ended.si_pid, 0)


def main(fd: int, modules: Sequence[str]) -> None:
    # Not above: every command imports this module.
    from splitserve.process.quick_start import import_modules
    from splitserve.process.settings import trim_memory

    # Collections in forked processes skip the objects, so they do not copy their pages.
    import_modules(fd, *modules)
    trim_memory()
    sys.stdout.flush()
    with socket.socket(fileno=fd) as requests:
        while True:
            content, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST, 2)
            if not content:
                return
            request = msgspec.convert(json.loads(content), ForkRequest)
            if request.model is not None:
                module, function = _SHARE_TOKENIZER
                getattr(importlib.import_module(module), function)(request.model)
            pid = _fork_twice(requests, request, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            requests.send(pid)


def _fork_twice(requests: socket.socket, request: ForkRequest, descriptors: Sequence[int]) -> bytes:
    """Fork a grandchild for a request, and return its process id after its parent has ended. Empty: the fork failed."""
    reader, writer = os.pipe()
    if (between := os.fork()) == 0:
        try:
            if (pid := os.fork()) == 0:
                requests.close()
                os.close(reader)
                os.close(writer)
                _run(request, descriptors)
            os.write(writer, str(pid).encode())
        finally:
            os._exit(0)
    os.close(writer)
    found = os.read(reader, 32)
    os.close(reader)
    os.waitpid(between, 0)
    return found


def _run(request: ForkRequest, descriptors: Sequence[int]) -> NoReturn:
    stdin, output = descriptors
    os.environ.clear()
    os.environ.update(request.env)
    run_forked(request.module, request.args, stdin, output, request.early)


if __name__ == "__main__":
    show_command("splitserve.process.template", ())
    main(int(sys.argv[1]), sys.argv[3:])
