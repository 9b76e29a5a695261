"""A whole deployment on this machine: a router and its workers as processes of their own, on free ports.

The life of a LocalCluster
1. `start`: the router's socket is bound here and handed down, so that workers know its address at once; all processes
   start at the same time.
2. `wait_ready`: every worker has loaded, and the router knows it and has proven its path. A process that dies meanwhile
   is a ClusterError with the end of its log.
3. It serves.
4. `close`: drain (the router first, then the workers), then stop. Nothing is left. The logs stay if something failed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from splitserve.core.request import DisaggregationMode
from splitserve.disaggregation.transports import moves_pools_on
from splitserve.errors import ConfigError, SplitserveError
from splitserve.launch.child import POLL_INTERVAL, PROGRAM, ChildProcess, wait_until_ended
from splitserve.launch.cluster_token import write_token_file
from splitserve.launch.http_server import bind, port_of, reachable_host
from splitserve.launch.shape import WorkerShape

# Seconds that the router gets to prove a path through workers that serve; then requests have to find out.
PROOF_PATIENCE = 60.0
# Seconds that running requests get when the cluster is told to drain.
DRAIN_TIMEOUT = 120.0
# In the cluster's own folder, which this user alone can enter.
_TOKEN_FILE = "cluster-token"


ONE_RANK = WorkerShape()


class ClusterError(SplitserveError):
    """A process of the cluster died or was not ready in time."""

    reason = "cluster_failed"


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker as an operator sees it."""

    name: str
    role: DisaggregationMode
    pid: int
    # None until it is ready.
    url: str | None
    # "loading", "ready" or "exited with code N".
    status: str


class LocalCluster:
    """Use as a context manager: starts on entry, drains and stops on exit.

    `null` workers register with the router only where there is no pair; beside a pair they are for comparison.
    `worker_args` go to every worker's `splitserve serve`, `pair_args` to those of prefill and decode, `router_args` to
    `splitserve router`. `threads`: of each rank, None: the cores divided fairly.
    `prefill_shape`, `decode_shape`: of each worker of that kind.
    `hand_over`: prefill and decode workers compute in one pool, and pages change owner instead of being copied.
    `cluster_token_file`: of a cluster that others join, too; None: a token of its own, which nobody else gets to know.
    `worker_program`: what runs as a worker, with the arguments of `splitserve serve`.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        prefill: int = 1,
        decode: int = 1,
        null: int = 0,
        prefill_shape: WorkerShape = ONE_RANK,
        decode_shape: WorkerShape = ONE_RANK,
        dtype: str = "auto",
        backend: str = "tcp",
        host: str = "127.0.0.1",
        port: int = 0,
        threads: int | None = None,
        worker_args: Sequence[str] = (),
        pair_args: Sequence[str] = (),
        router_args: Sequence[str] = (),
        cluster_token_file: Path | None = None,
        hand_over: bool = False,
        log_level: str = "info",
        worker_program: Sequence[str] = PROGRAM,
    ) -> None:
        if (prefill > 0) != (decode > 0):
            raise ConfigError(f"{prefill} prefill and {decode} decode workers: each kind needs the other")
        if min(prefill, decode, null) < 0 or prefill + decode + null == 0:
            raise ConfigError("a cluster needs at least one worker: give --prefill and --decode 1 or more")
        if not prefill and (prefill_shape, decode_shape) != (ONE_RANK, ONE_RANK):
            raise ConfigError(
                "--prefill-..-size and --decode-..-size are of pairs, and there are none: of colocated workers "
                f"say it after --: {model} -- --tp-size N"
            )
        self._roles = (
            [DisaggregationMode.PREFILL] * prefill
            + [DisaggregationMode.DECODE] * decode
            + [DisaggregationMode.NULL] * null
        )
        self._model = model
        self._host = host
        self._port = port
        self._log_level = log_level
        self._worker_program = worker_program
        self._shapes = {DisaggregationMode.PREFILL: prefill_shape, DisaggregationMode.DECODE: decode_shape}
        num_ranks = sum(self._shapes.get(role, ONE_RANK).num_ranks for role in self._roles)
        self.threads = max(1, num_cores() // num_ranks) if threads is None else threads
        if self.threads < 1:
            raise ConfigError(f"--threads {threads}: it must be at least 1")
        self._common = ["--dtype", dtype, "--disaggregation-transfer-backend", backend, *worker_args]
        # Whoever names no device gets one that the backend can hand KV over from.
        names_device = any(arg.startswith("--device") for arg in worker_args)
        if prefill and not names_device and not moves_pools_on(backend, "cuda"):
            self._common += ["--device", "cpu"]
        self._pair_args = list(pair_args)
        self._router_args = list(router_args)
        if hand_over and backend != "shm":
            raise ConfigError(f"--hand-over needs --transfer-backend shm, not {backend}: pages change owner in memory")
        if hand_over and any(shape.tp_size * shape.pp_size > 1 for shape in (prefill_shape, decode_shape)):
            raise ConfigError(
                "--hand-over is between workers of one rank each: leave it out, or --..-tp-size and --..-pp-size"
            )
        self._hands_over = hand_over
        # The file of the pool that prefill and decode workers share; -1: each has its own.
        self._pool_fd = -1
        self._token_file = cluster_token_file
        self._folder: Path | None = None
        self._router: ChildProcess | None = None
        self._workers: list[tuple[DisaggregationMode, ChildProcess]] = []
        self._failed = False
        # Clock time since which the router knows every worker; None: it does not.
        self._known_since: float | None = None
        self.router_url = ""

    def start(self) -> None:
        """Raises ConfigError where the port is taken."""
        sock = bind(self._host, self._port)
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="splitserve-"))
            if self._token_file is None:
                write_token_file(self._folder / _TOKEN_FILE)
            if self._hands_over:
                self._pool_fd = os.memfd_create("splitserve-pool", os.MFD_CLOEXEC)
            self.router_url = f"http://{reachable_host(self._host)}:{port_of(sock)}"
            args = [
                "router",
                "--drain-timeout",
                str(DRAIN_TIMEOUT),
                "--host",
                self._host,
                "--fd",
                str(sock.fileno()),
                "--log-level",
                self._log_level,
                *self._router_args,
            ]
            self._router = ChildProcess("router", args, self._folder, pass_fds=[sock.fileno()])
        finally:
            sock.close()
        counts = dict.fromkeys(DisaggregationMode, 0)
        for role in self._roles:
            counts[role] += 1
            self.add_worker(role, f"{role}-{counts[role]}")

    def add_worker(self, role: DisaggregationMode, name: str) -> ChildProcess:
        """Start one more worker."""
        args = ["serve", self._model, "--disaggregation-mode", role.value, "--port", "0", "--host", "127.0.0.1"]
        args += ["--drain-timeout", str(DRAIN_TIMEOUT)]
        args += ["--disaggregation-bootstrap-port", "0", "--threads", str(self.threads), "--log-level", self._log_level]
        # A colocated one may become one of a pair.
        args += ["--cluster-token-file", str(self._token_file or self.log_folder / _TOKEN_FILE)]
        if role is not DisaggregationMode.NULL:
            args += [*self._shapes[role].args, *self._pair_args]
            if self._hands_over:
                args += ["--shared-pool", f"/proc/{os.getpid()}/fd/{self._pool_fd}"]
        beside = role is DisaggregationMode.NULL and any(r is not role for r in self._roles)
        if not beside:
            args += ["--router", self.router_url]
        # What torch's own pools take from the environment, before any option of ours is read.
        env = {"OMP_NUM_THREADS": str(self.threads), "TOKENIZERS_PARALLELISM": "false"}
        # What a worker that is killed leaves behind goes with the cluster.
        env["TMPDIR"] = str(self.log_folder)
        child = ChildProcess(name, [*args, *self._common], self.log_folder, env=env, program=self._worker_program)
        self._workers.append((role, child))
        return child

    def children_of(self, role: DisaggregationMode) -> list[ChildProcess]:
        """The workers that were started in this role and still run."""
        return [child for r, child in self._workers if r is role and child.exit_code is None]

    def remove_worker(self, child: ChildProcess) -> None:
        """Stop it at once, if it still runs, and forget it. Its log stays with the others."""
        child.close()
        self._workers = [(role, c) for role, c in self._workers if c is not child]

    @property
    def shapes(self) -> list[WorkerShape]:
        """Of the workers of pairs."""
        return list(self._shapes.values())

    @property
    def log_folder(self) -> Path:
        if self._folder is None:
            raise ClusterError("the cluster is not running: start it first")
        return self._folder

    @property
    def workers(self) -> list[WorkerState]:
        return [
            WorkerState(c.name, role, c.pid, c.ready.url if c.ready is not None else None, _status(c))
            for role, c in self._workers
        ]

    @property
    def children(self) -> list[ChildProcess]:
        """The router and the workers."""
        return [*([self._router] if self._router is not None else []), *(c for _, c in self._workers)]

    def urls(self, role: DisaggregationMode) -> list[str]:
        """Of the workers of this role that are ready."""
        return [w.url for w in self.workers if w.role is role and w.url is not None]

    def wait_ready(self, timeout: float = 600.0, on_progress: Callable[[], None] | None = None) -> None:
        """Raises ClusterError. `on_progress` is called a few times a second."""
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
        """Every process serves, and the router has heard from every worker that it is to know, and proven its path."""
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
        is_late = time.monotonic() - self._known_since > PROOF_PATIENCE
        return is_late or expected <= {w["url"] for w in workers if w["ready"]}

    def _error(self, message: str, child: ChildProcess) -> ClusterError:
        self._failed = True
        return ClusterError(f"{message}; the end of its log {child.log_path}:\n{child.log_tail()}")

    def drain(self, timeout: float = DRAIN_TIMEOUT) -> bool:
        """Let running requests finish: first at the router, then at the workers. Whether all ended in time."""
        deadline = time.monotonic() + timeout
        for group in ([self._router] if self._router is not None else [], [c for _, c in self._workers]):
            for child in group:
                child.send_signal()
            if not wait_until_ended(group, max(0.0, deadline - time.monotonic())):
                return False
        return True

    def keep_logs(self) -> None:
        """Something went wrong: `close` leaves the logs where they are."""
        self._failed = True

    def stop_now(self) -> None:
        """Tell every process to stop at once, drained or not. Returns without waiting; `close` waits."""
        for child in self.children:
            child.send_signal()
            child.send_signal()

    def close(self, drain_timeout: float = 10.0) -> None:
        """Drain, then stop what still runs. Idempotent; nothing is left when it returns."""
        try:
            self.drain(drain_timeout)
        finally:
            try:
                for child in self.children:
                    child.let_go()
                for child in self.children:
                    child.close()
            finally:
                self._forget()

    def _forget(self) -> None:
        self._router, self._workers = None, []
        if self._pool_fd >= 0:
            os.close(self._pool_fd)
            self._pool_fd = -1
        if self._folder is not None:
            (self._folder / _TOKEN_FILE).unlink(missing_ok=True)
            if not self._failed:
                shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Whoever ends it himself has no use for the logs.
        self._failed = self._failed or (kind is not None and issubclass(kind, Exception))
        self.close()


def num_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _status(child: ChildProcess) -> str:
    if child.exit_code is not None:
        return f"exited with code {child.exit_code}"
    return "loading" if child.ready is None else "ready"
