"""Deployment on this machine for the duration of a `with` block: for the demo, benchmarks, checks and tests.

The processes are those of `splitserve up` (same config, command lines, placer), but they are not supervised. A process
that ends is not started again, because the block measures that end, or has caused it.

Life cycle of a LocalCluster:
1. `start`: the listener of the router is opened here and inherited, so workers get its address at once. All processes
   start at the same time.
2. `wait_ready`: every worker has loaded, and the router has proven its path. If a process ends meanwhile, raises
   ClusterError with the end of its log.
3. It serves.
4. `close`: drain (the router first, then the workers), then stop. Only logs of a failure are left.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from rich.console import Console

from splitserve.api.http_server import bind, port_of, reachable_host
from splitserve.core.cpus import num_cores
from splitserve.core.errors import ClusterError
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.commands import Credentials, router_spec, threads_of, worker_spec
from splitserve.deploy.deployment import LocalDeployment, pool_of
from splitserve.deploy.placer import LocalPlacer, ProcessSpec
from splitserve.process.child import POLL_INTERVAL, PROGRAM, ChildProcess, wait_until_ended
from splitserve.process.console import progress
from splitserve.process.process_end import deferred, unwinding

# Seconds in which the router must prove a path through workers that serve. After that, the cluster counts as ready.
PROOF_TIMEOUT = 60.0
# Seconds in which running requests may finish when a block ends.
_DRAIN_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class WorkerState:
    """State of one worker, as text."""

    name: str
    role: DisaggregationMode
    # None: it is not ready yet.
    url: str | None
    # "loading", "ready" or "exited with code N".
    status: str


class LocalCluster:
    """Cluster on this machine, as a context manager: starts on entry, drains and stops on exit. Raises ConfigError.

    Colocated workers register with the router only if there is no pair; beside a pair they are for comparison.
    `worker_program`: command that runs as a worker, with the arguments of `splitserve serve`.
    """

    def __init__(self, deployment: LocalDeployment, *, worker_program: Sequence[str] = PROGRAM) -> None:
        self._deployment = deployment
        self._worker_program = tuple(worker_program)
        self._scope = ExitStack()
        self._closing = ExitStack()
        self._placer: LocalPlacer | None = None
        self._router: ChildProcess | None = None
        self._workers: list[tuple[DisaggregationMode, ChildProcess]] = []
        self._has_failed = False
        # Clock time since which the router knows every worker. None: it does not.
        self._known_since: float | None = None
        self.router_url = ""

    @property
    def threads(self) -> int:
        """Return the CPU threads per rank."""
        config = self._deployment.config()
        return threads_of(config, next(iter(config.pools.by_name().values())), num_cores())

    def start(self) -> None:
        """Start all processes. Raises ConfigError if the port is in use."""
        deployment = msgspec.structs.replace(self._deployment, threads=self.threads)
        with bind(deployment.host, deployment.port) as sock:
            with deferred():
                self._closing.callback(self._forget)
                self._config = deployment.config(self._closing.enter_context(deployment.shared_pool()))
                self._credentials = Credentials.read(self._config)
                self._placer = LocalPlacer()
            self.router_url = f"http://{reachable_host(deployment.host)}:{port_of(sock)}"
            spec = router_spec(self._config, self._credentials, deployment.host, port_of(sock), sock.fileno())
            self._router = self._start(spec)
        for mode, count in deployment.replicas.items():
            for number in range(1, count + 1):
                self.add_worker(mode, f"{mode}-{number}")

    def add_worker(self, role: DisaggregationMode, name: str) -> ChildProcess:
        """Start one more worker, which is still loading when this returns."""
        is_beside = role is DisaggregationMode.NULL and self._deployment.prefill > 0
        spec = worker_spec(
            self._config,
            self._credentials,
            name,
            pool_of(role),
            threads=self.threads,
            router_url=None if is_beside else self.router_url,
        )
        child = self._start(msgspec.structs.replace(spec, program=self._worker_program))
        self._workers.append((role, child))
        return child

    def _start(self, spec: ProcessSpec) -> ChildProcess:
        with deferred():
            self._running.start(spec)
        child = self._running.child(spec.name)
        if child is None:
            raise ClusterError(f"{spec.name} {self._running.observe()[spec.name].detail}")
        return child

    @property
    def _running(self) -> LocalPlacer:
        if self._placer is None:
            raise ClusterError("the cluster is not running: start it first")
        return self._placer

    def children_of(self, role: DisaggregationMode) -> list[ChildProcess]:
        """Return the workers that were started in this role and still run."""
        return [child for r, child in self._workers if r is role and child.exit_code is None]

    def remove_worker(self, child: ChildProcess) -> None:
        """Stop a worker at once, if it still runs, and forget it. Its log stays with the others."""
        self._running.remove(child.name)
        self._workers = [(role, c) for role, c in self._workers if c is not child]

    @property
    def log_folder(self) -> Path:
        return self._running.log_folder

    @property
    def workers(self) -> list[WorkerState]:
        return [
            WorkerState(child.name, role, None if child.ready is None else child.ready.url, _status(child))
            for role, child in self._workers
        ]

    @property
    def children(self) -> list[ChildProcess]:
        """Return the router and the workers."""
        return [*([self._router] if self._router is not None else []), *(child for _, child in self._workers)]

    def urls(self, role: DisaggregationMode) -> list[str]:
        """Return the URLs of the workers of this role that are ready."""
        return [w.url for w in self.workers if w.role is role and w.url is not None]

    def wait_ready(self, timeout: float = 600.0, on_progress: Callable[[], None] | None = None) -> None:
        """Wait until the cluster is ready. Raises ClusterError. `on_progress` is called a few times per second."""
        deadline = time.monotonic() + timeout
        while not self._is_ready():
            for child in self.children:
                if child.exit_code is not None:
                    raise self._error(f"{child.name} ended with code {child.exit_code} while it started", child)
            if time.monotonic() > deadline:
                late = next(c for c in reversed(self.children) if c.ready is None or c is self._router)
                raise self._error(f"the cluster was not ready after {timeout:g} s", late)
            if on_progress is not None:
                on_progress()
            time.sleep(POLL_INTERVAL)

    def _is_ready(self) -> bool:
        """Return whether every process serves, and the router has proven the path of each of its workers."""
        if any(child.ready is None for child in self.children):
            return False
        is_paired = any(role is not DisaggregationMode.NULL for role, _ in self._workers)
        expected = {
            c.ready.url
            for role, c in self._workers
            if c.ready is not None and not (is_paired and role is DisaggregationMode.NULL)
        }
        try:
            with urllib.request.urlopen(self.router_url + "/workers", timeout=2.0) as response:
                workers = json.load(response)["workers"]
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False
        if not expected <= {w["url"] for w in workers if w["healthy"]}:
            self._known_since = None
            return False
        self._known_since = self._known_since or time.monotonic()
        is_late = time.monotonic() - self._known_since > PROOF_TIMEOUT
        return is_late or expected <= {w["url"] for w in workers if w["ready"]}

    def _error(self, message: str, child: ChildProcess) -> ClusterError:
        self._has_failed = True
        return ClusterError(f"{message}; the end of its log {child.log_path}:\n{child.log_tail()}")

    def keep_logs(self) -> None:
        """Let `close` keep the logs, because of a failure."""
        self._has_failed = True

    def close(self, drain_timeout: float = _DRAIN_TIMEOUT) -> None:
        """Let running requests finish, first at the router, then at the workers; stop what still runs. Idempotent."""
        deadline = time.monotonic() + drain_timeout
        try:
            for group in ([self._router] if self._router is not None else [], [child for _, child in self._workers]):
                for child in group:
                    child.send_signal()
                if not wait_until_ended(group, max(0.0, deadline - time.monotonic())):
                    break
        finally:
            with deferred():
                self._closing.close()

    def _forget(self) -> None:
        """Stop all processes at once."""
        placer, self._placer = self._placer, None
        self._router, self._workers = None, []
        if placer is not None:
            if self._has_failed:
                placer.keep_logs()
            placer.close()

    def __enter__(self) -> Self:
        self._scope.enter_context(unwinding())
        try:
            self.start()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An interrupt is no failure, and does not wait for requests.
        is_interrupt = kind is not None and not issubclass(kind, Exception)
        self._has_failed = self._has_failed or (kind is not None and not is_interrupt)
        try:
            self.close(0.0 if is_interrupt else _DRAIN_TIMEOUT)
        finally:
            self._scope.__exit__(kind, error, trace)


def wait_ready(cluster: LocalCluster, console: Console, timeout: float) -> None:
    """Wait for every worker, with a line of progress. Raises ClusterError."""
    started = time.monotonic()
    with progress(console, "starting") as show:

        def on_progress() -> None:
            states = ", ".join(f"{w.name} {w.status}" for w in cluster.workers)
            # Without a terminal each text is a line, so it must not change with the time.
            seconds = f" ({time.monotonic() - started:.0f} s)" if console.is_terminal else ""
            show(f"starting{seconds}: {states}")

        cluster.wait_ready(timeout, on_progress)


def _status(child: ChildProcess) -> str:
    if child.exit_code is not None:
        return f"exited with code {child.exit_code}"
    return "loading" if child.ready is None else "ready"
