"""Cluster on this machine for the duration of a `with` block: for the demo, benchmarks, checks and tests.

It is `splitserve up` without a terminal: the same config, command lines, placer and supervisor, which runs in a thread.
One setting differs: a process that ends is not started again, because the block measures that end, or has caused it.

1. Entry: the listener of the router is opened here and inherited, and all processes start at the same time.
2. `wait_ready`: every worker has loaded, and the router has proven its path. Raises ClusterError with the end of the
   log of a process that could not start.
3. The block runs.
4. Exit: drain (the router first, then the workers), then stop. Only logs of a failure are left.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, nullcontext
from types import TracebackType
from typing import Self, TypeVar

import msgspec
from rich.console import Console

from splitserve.api.http_server import bind
from splitserve.core.errors import ClusterError
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.commands import Credentials
from splitserve.deploy.config import POOL_NAMES
from splitserve.deploy.control import ClusterStatus, ProcessStatus, process_states, start_line
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.placer import LocalPlacer
from splitserve.deploy.reconciler import SlotState
from splitserve.deploy.supervisor import Supervisor
from splitserve.process.child import POLL_INTERVAL, PROGRAM, ChildProcess
from splitserve.process.console import progress
from splitserve.process.process_end import deferred, unwinding
from splitserve.process.threads import LoopThread

T = TypeVar("T")

# Seconds in which running requests may finish when a block ends.
_DRAIN_TIMEOUT = 10.0
# Seconds in which the supervisor must start an ended worker again.
_RESTART_TIMEOUT = 60.0


class LocalCluster:
    """Cluster on this machine, as a context manager: starts on entry, drains and stops on exit. Raises ConfigError.

    Colocated workers register with the router only if there is no pair; beside a pair they are for comparison.
    `worker_program`: command that runs as a worker, with the arguments of `splitserve serve`.
    """

    def __init__(self, deployment: LocalDeployment, *, worker_program: Sequence[str] = PROGRAM) -> None:
        self._deployment = deployment
        self._worker_program = worker_program
        self._scope = ExitStack()
        self._closing = ExitStack()
        self._has_failed = False
        # Done when the supervisor has ended all processes.
        self._running: Future[None] | None = None
        self.router_url = ""

    def _start(self) -> None:
        """Start all processes. Raises ConfigError if the port is in use."""
        deployment, closing = self._deployment, self._closing
        config = deployment.config(closing.enter_context(deployment.shared_pool()))
        supervision = msgspec.structs.replace(config.supervision, restart=False, max_failed_starts=1)
        config = msgspec.structs.replace(config, supervision=supervision)
        credentials = Credentials.read(config)
        sock = closing.enter_context(bind(deployment.host, deployment.port))
        self._placer = LocalPlacer(self._worker_program)
        self.log_folder = self._placer.log_folder
        closing.callback(self._close_placer)
        self._supervisor = Supervisor(
            config,
            credentials,
            self._placer,
            router_socket=sock,
            unregistered={"colocated"} if deployment.prefill else set(),
        )
        self.router_url = self._supervisor.router_url or ""
        self._loop = LoopThread("local-cluster")
        closing.callback(self._loop.close)
        # The first turn starts all processes.
        self._loop.submit(self._supervisor.turn()).result()
        self._running = self._loop.submit(self._supervisor.run())
        closing.callback(self._down, None, now=True)

    def add_worker(self, role: DisaggregationMode) -> None:
        """Start one more worker, which is still loading when this returns."""
        pool = POOL_NAMES[role]
        replicas = {pool: self._supervisor.replicas[pool] + 1}
        self._loop.submit(self._supervisor.scale(replicas)).result()

    def restart(self, child: ChildProcess) -> None:
        """End a worker at once, if it still runs, and start it again. It is still loading when this returns.

        Raises ClusterError.
        """
        child.close()
        deadline = time.monotonic() + _RESTART_TIMEOUT
        # False: the supervisor has not observed its end yet, or not removed it.
        is_ordered = False
        while not is_ordered or child.name not in self._placer.observe():
            if time.monotonic() > deadline:
                raise self._error(f"{child.name} was not started again within {_RESTART_TIMEOUT:g} s")
            is_ordered = is_ordered or self._call(lambda: self._supervisor.restart(child.name))
            time.sleep(POLL_INTERVAL)

    @property
    def children(self) -> list[ChildProcess]:
        """Return the router and the workers in the order of their starts, without those that have ended."""
        return [child for child in self._placer.children if child.exit_code is None]

    def children_of(self, role: DisaggregationMode) -> list[ChildProcess]:
        return [child for child in self.children if child.name.rpartition("-")[0] == POOL_NAMES[role]]

    def urls(self, role: DisaggregationMode) -> list[str]:
        return [child.ready.url for child in self.children_of(role) if child.ready is not None]

    def status(self) -> ClusterStatus:
        return self._loop.submit(self._supervisor.status()).result()

    @property
    def workers(self) -> list[ProcessStatus]:
        return self.status().processes[1:]

    def wait_ready(self, timeout: float = 600.0, console: Console | None = None) -> None:
        """Wait until the cluster is ready, with a line of progress on `console`. Raises ClusterError."""
        began = time.monotonic()
        status = self.status()
        with nullcontext() if console is None else progress(console, start_line(console, status, began)) as show:
            while not (status := self.status()).is_ready:
                self._check_start(status)
                if time.monotonic() > began + timeout:
                    late = next((c for c in reversed(self.children) if c.ready is None), self.children[0])
                    problem = f"the cluster was not ready after {timeout:g} s: {process_states(status)}"
                    raise self._error(f"{problem}; the end of the log of {late.name}:\n{late.log_tail()}")
                if console is not None and show is not None:
                    show(start_line(console, status, began))
                time.sleep(POLL_INTERVAL)

    def _check_start(self, status: ClusterStatus) -> None:
        """Raise ClusterError if a process could not start, or has ended."""
        if (failure := self._supervisor.failure) is not None:
            raise self._error(failure.message)
        for process in status.processes:
            if process.state == SlotState.FAILED:
                raise self._error(f"{process.name} has ended: {process.detail}")

    def _error(self, message: str) -> ClusterError:
        self.keep_logs()
        return ClusterError(f"{message}\nthe logs stay in {self.log_folder}")

    def keep_logs(self) -> None:
        """Let `close` keep the logs, because of a failure."""
        self._has_failed = True

    def close(self, drain_timeout: float = _DRAIN_TIMEOUT) -> None:
        """Let running requests finish, first at the router, then at the workers; stop what still runs. Idempotent."""
        try:
            self._down(drain_timeout, now=drain_timeout <= 0)
        finally:
            with deferred():
                self._closing.close()

    def _down(self, timeout: float | None, *, now: bool) -> None:
        """End the cluster and wait until its processes have ended, for `timeout` seconds at most. Idempotent."""

        if self._running is not None and not self._running.done():
            self._call(lambda: self._supervisor.down(now=now))
            wait([self._running], timeout)

    def _call(self, function: Callable[[], T]) -> T:
        """Call a function of the supervisor in its loop."""

        async def call() -> T:
            return function()

        return self._loop.submit(call()).result()

    def _close_placer(self) -> None:
        if self._has_failed:
            self._placer.keep_logs()
        self._placer.close()

    def __enter__(self) -> Self:
        self._scope.enter_context(unwinding())
        try:
            with deferred():
                self._start()
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
