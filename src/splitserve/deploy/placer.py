"""Where the processes of a cluster run: the interface `Placer`, and its implementation for this machine.

The one for the nodes of a Ray cluster is `ray_placer.py`. No call waits for a process to start, serve or end: `observe`
returns that later.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import msgspec

from splitserve.core.machine import num_cores
from splitserve.process.child import PROGRAM, ChildProcess
from splitserve.process.cluster_token import write_secret_file
from splitserve.process.lifecycle import ReadyInfo
from splitserve.process.owned_folder import OwnedFolder
from splitserve.process.template import (
    WORKER_MODULES,
    TemplateProcess,
    end_early_template,
    is_supported,
    reap_orphans,
    take_early_template,
    worker_environment,
)

# In the words of `ProcessSpec.args`: replaced by the address of the process's node.
NODE_ADDRESS = "{node}"
# Maximum number of processes that are started in parallel.
_NUM_STARTERS = 32


class Phase(StrEnum):
    # There is no room for it yet.
    PENDING = "pending"
    LOADING = "loading"
    READY = "ready"
    ENDED = "ended"
    # Its node is gone, or does not answer any more.
    LOST = "lost"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSpec:
    """Specification of one process, for any node. Its repr has no secret."""

    name: str
    # Arguments of `splitserve`.
    args: tuple[str, ...]
    # Content of the files for the process, by the option that names them; not part of the command line.
    secrets: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    env: Mapping[str, str] = field(default_factory=dict)
    # On this machine: listening socket that the process inherits. None: it has none.
    listen_fd: int | None = None
    # Resources for all its ranks, reserved on the node if the placer supports it.
    num_cpus: int = 0
    num_gpus: int = 0
    # Whether to prefer the supervisor's own node over the others.
    is_near: bool = False
    # Whether it is a worker without GPUs.
    is_cpu_worker: bool = False


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """The latest known state of a process."""

    phase: Phase
    node: str = ""
    pid: int | None = None
    # Content of its ready file.
    ready: ReadyInfo | None = None
    # Why it is pending, ended or lost, as text for operators.
    detail: str = ""
    # The end of its log, if it has ended.
    log_tail: str = ""
    # Exit code if it has ended by itself; negative: the signal.
    exit_code: int | None = None


class Placer(Protocol):
    """Placer of processes. Called from several threads, but never for one process at the same time.

    `address`: where the router listens if the config names no host. `num_cores`: cores of the machine that all
    processes share. None: they have nodes of their own.
    """

    address: str
    num_cores: int | None

    def start(self, spec: ProcessSpec) -> None:
        """Start a process with an unused name. `observe` returns a failure."""
        ...

    def observe(self) -> Mapping[str, Observation]:
        """Return the state of everything that was started and not removed."""
        ...

    def terminate(self, name: str) -> None:
        """Drain a process: it accepts no new requests, and ends after its running requests."""
        ...

    def remove(self, name: str) -> None:
        """End a process now, with all that it started, and release its resources. May take half a minute."""
        ...

    def close(self) -> None:
        """Remove all remaining processes, and release all resources."""
        ...


class NodeProcess:
    """Process that the constructor starts. Raises OSError.

    `address`: of this node. `node`: name of the node for operators. `parent`: folder for its own folder and its log;
    the log stays there. None: both are in the temporary directory, and are removed together. `program`: command that
    takes the arguments. `template`: template that forks the process, unless it has ended. None: `program` is started.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        address: str,
        node: str,
        parent: Path | None = None,
        program: Sequence[str] = PROGRAM,
        template: TemplateProcess | None = None,
    ) -> None:
        self._node = node
        # Guards its folder and `_final`.
        self._lock = threading.Lock()
        # The observation at its end. None: it is not closed.
        self._final: Observation | None = None
        with ExitStack() as closing:
            if parent is None:
                folder = closing.enter_context(OwnedFolder.for_sockets())
            else:
                # A short name: paths of Unix sockets in it have at most 107 bytes.
                folder = Path(tempfile.mkdtemp(prefix="", dir=parent))
                closing.callback(shutil.rmtree, folder, ignore_errors=True)
            args = [word.replace(NODE_ADDRESS, address) for word in spec.args]
            for option, content in spec.secrets.items():
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
                program=program,
                template=template,
            )
            self._closing = closing.pop_all()

    def observe(self) -> Observation:
        """Return its state. Callable from any thread, also during or after `close`."""
        with self._lock:
            return self._final or self._observe()

    def terminate(self) -> None:
        self.child.send_signal()

    def close(self) -> None:
        """End the process at once, with all processes that it started, and remove its folder. Idempotent."""
        self.child.close()
        with self._lock:
            if self._final is None:
                self._final = self._observe()
                self._closing.close()

    def _observe(self) -> Observation:
        child, code = self.child, self.child.exit_code
        if code is not None:
            tail = child.log_tail()
            detail = f"killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
            return Observation(phase=Phase.ENDED, node=self._node, detail=detail, log_tail=tail, exit_code=code)
        child.bound_log()
        phase = Phase.LOADING if child.ready is None else Phase.READY
        return Observation(phase=phase, node=self._node, pid=child.pid, ready=child.ready)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        # A real-time signal.
        return f"signal {number}"


class LocalPlacer:
    """Placer for this machine. `log_folder` has one log per name. `close` removes it, unless `keep_logs` was called.

    `worker_program`: command that runs as a worker, with the arguments of `splitserve serve`. `has_template`: workers
    fork from one template process, which shares its imported modules with them. This process is then the parent of all
    orphans below it.
    """

    address = "127.0.0.1"

    def __init__(self, worker_program: Sequence[str] = PROGRAM, *, has_template: bool = False) -> None:
        self.num_cores: int | None = num_cores()
        self._worker_program = worker_program
        self._folder = OwnedFolder.for_sockets()
        self.log_folder = self._folder.path
        # By name. Several threads use it, by atomic operations. A future raises OSError if the start failed.
        self._processes: dict[str, Future[NodeProcess]] = {}
        self._starters = ThreadPoolExecutor(_NUM_STARTERS, thread_name_prefix="start")
        # Starts with the first worker on CPUs. Others fork from it if their environments differ by threads only.
        self._template: TemplateProcess | None = None
        self._has_template = has_template and is_supported()
        if not self._has_template:
            end_early_template()

    def start(self, spec: ProcessSpec) -> None:
        template = self._template_for(spec)
        if template is not None:
            # The first start waits for the template.
            self._processes[spec.name] = self._starters.submit(self._start, spec, template)
            return
        process: Future[NodeProcess] = Future()
        try:
            process.set_result(self._start(spec, None))
        except Exception as error:
            process.set_exception(error)
        self._processes[spec.name] = process

    def _start(self, spec: ProcessSpec, template: TemplateProcess | None) -> NodeProcess:
        program = PROGRAM if spec.is_near else self._worker_program
        return NodeProcess(spec, self.address, "localhost", self.log_folder, program, template)

    def _template_for(self, spec: ProcessSpec) -> TemplateProcess | None:
        # A forked process cannot use a GPU if its library was loaded before the fork.
        if not (self._has_template and spec.is_cpu_worker):
            if not spec.is_near:
                # Workers on GPUs do not need the one that `up` has started early.
                end_early_template()
            return None
        env = worker_environment(spec.env)
        if self._template is None:
            try:
                self._template = take_early_template(env) or TemplateProcess(WORKER_MODULES, env)
            except OSError:
                return None
        return self._template if env == self._template.env else None

    @property
    def children(self) -> list[ChildProcess]:
        """Return the processes that were started and not removed, in that order."""
        started = [process for process in self._processes.copy().values() if process.done()]
        return [process.result().child for process in started if process.exception() is None]

    def observe(self) -> Mapping[str, Observation]:
        processes = self._processes.copy()
        found = {name: _observation(process) for name, process in processes.items()}
        if self._template is not None and all(process.done() for process in processes.values()):
            reap_orphans({self._template.pid, *(child.pid for child in self.children)})
        return found

    def terminate(self, name: str) -> None:
        process = self._processes.get(name)
        if process is not None and process.exception() is None:
            with suppress(OSError):
                process.result().terminate()

    def remove(self, name: str) -> None:
        process = self._processes.get(name)
        if process is not None:
            if self._template is not None and not process.done():
                # Do not wait for the template's imports. Other pending starts continue without the template.
                self._template.kill()
            # A failed start, whatever its error, has nothing to end.
            if process.exception() is None:
                with suppress(OSError):
                    process.result().close()
        self._processes.pop(name, None)

    def keep_logs(self) -> None:
        """Leave the logs for the user."""
        self._folder.keep()

    def close(self) -> None:
        end_early_template()
        if self._template is not None:
            self._template.close()
        for child in self.children:
            child.let_go()
        for name in list(self._processes):
            self.remove(name)
        self._starters.shutdown()
        self._folder.close()


def _observation(process: Future[NodeProcess]) -> Observation:
    if not process.done():
        return Observation(phase=Phase.LOADING)
    if (error := process.exception()) is not None:
        return Observation(phase=Phase.ENDED, detail=f"could not be started: {error}")
    return process.result().observe()
