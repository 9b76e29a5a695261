"""Systems that benchmarks measure.

Colocated and disaggregated serving are LocalClusters behind their router. A running server receives requests as it is.
Plain transformers is a process that receives `bench main`'s jobs without HTTP. Servers of other engines are in
`splitserve.tools.bench.peers`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
from rich.console import Console

from splitserve.core.errors import ConfigError
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.tools.bench.load import Endpoint, ask
from splitserve.tools.bench.stats import StreamRecord
from splitserve.tools.bench.workload import Job, Prompt
from splitserve.tools.client import RequestFailedError
from splitserve.transfer.transports import missing
from splitserve.worker.scheduler_link import OPENMP_ENVIRONMENT

# Seconds for a system to start.
READY_TIMEOUT = 600.0
# Seconds for all jobs of the baseline.
_BASELINE_TIMEOUT = 3600.0
BASELINE_COMMAND = (sys.executable, "-m", "splitserve.tools.bench.baseline")


class System(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def threads(self) -> str:
        """Return the CPU threads of its models, e.g. "1 + 1" for two workers."""
        ...

    def run(self, warm_up: Sequence[Job], jobs: Sequence[Job], console: Console) -> list[list[StreamRecord]]:
        """Run all jobs and return their records. Progress goes to the console. Raises SplitserveError."""
        ...


@dataclass(frozen=True, slots=True)
class Running:
    """Server that is ready."""

    endpoint: Endpoint
    # Prefill worker of ours, if there are KV transfers. None: no transfers, or unknown.
    prefill_url: str | None = None


class Server(Protocol):
    """System that receives requests over HTTP."""

    @property
    def name(self) -> str: ...

    @property
    def threads(self) -> str: ...

    def running(self, console: Console) -> AbstractContextManager[Running]:
        """Start the server, yield it when it is ready, and stop it on exit. Raises SplitserveError.

        Progress goes to the console.
        """
        ...


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Server that was started outside this benchmark."""

    name: str
    endpoint: Endpoint
    threads: str = "not known"

    def running(self, console: Console) -> AbstractContextManager[Running]:
        return nullcontext(Running(self.endpoint))


@dataclass(frozen=True, slots=True)
class ServedSystem:
    """Deployment of ours on this machine: pairs of workers, or colocated workers."""

    name: str
    model: str
    dtype: str
    num_pairs: int
    num_colocated: int
    threads_each: int
    # Tokens of each worker's KV pool: enough for the largest job.
    pool_tokens: int
    backend: str = "tcp"
    # More options of `splitserve serve` for each worker.
    worker_args: tuple[str, ...] = ()

    @property
    def threads(self) -> str:
        return " + ".join([str(self.threads_each)] * (2 * self.num_pairs + self.num_colocated))

    def cluster(self) -> LocalCluster:
        """Return the cluster, which is not started yet."""
        own = ("--served-model-name", self.model, "--max-total-tokens", str(self.pool_tokens))
        return LocalCluster(
            LocalDeployment(
                model=self.model,
                prefill=self.num_pairs,
                decode=self.num_pairs,
                null=self.num_colocated,
                dtype=self.dtype,
                backend=self.backend,
                threads=self.threads_each,
                worker_args=[*own, *self.worker_args],
                log_level="warning",
            )
        )

    @contextmanager
    def running(self, console: Console) -> Iterator[Running]:
        """Start the cluster and yield it when it is ready. Raises ClusterError."""
        with self.cluster() as cluster:
            cluster.wait_ready(READY_TIMEOUT, console)
            prefill = cluster.urls(DisaggregationMode.PREFILL)
            yield Running(Endpoint(cluster.router_url, self.model), prefill[0] if prefill else None)

    def run(self, warm_up: Sequence[Job], jobs: Sequence[Job], console: Console) -> list[list[StreamRecord]]:
        with self.running(console) as running, console.status(f"{self.name}: warming up") as status:
            for job in warm_up:
                _run_job(running.endpoint, job)
            results = []
            for number, job in enumerate(jobs, start=1):
                status.update(f"{self.name}: run {number} of {len(jobs)}")
                results.append(_run_job(running.endpoint, job))
            return results


def _run_job(endpoint: Endpoint, job: Job) -> list[StreamRecord]:
    return ask(endpoint, [Prompt(ids=ids, text="") for ids in job.prompts], job.max_tokens)


@dataclass(frozen=True, slots=True)
class TransformersSystem:
    """Plain `generate` in a process of its own."""

    name: str
    model_folder: Path
    dtype: str
    num_threads: int
    command: Sequence[str] = BASELINE_COMMAND
    timeout: float = _BASELINE_TIMEOUT

    @property
    def threads(self) -> str:
        return str(self.num_threads)

    def run(self, warm_up: Sequence[Job], jobs: Sequence[Job], console: Console) -> list[list[StreamRecord]]:
        task = {
            "model_folder": str(self.model_folder),
            "dtype": self.dtype,
            "threads": self.num_threads,
            "warm_up": warm_up,
            "jobs": jobs,
        }
        results: list[list[StreamRecord]] = []
        with console.status(f"{self.name}: starting") as status:
            for line in self._lines(msgspec.json.encode(task)):
                results.append(msgspec.json.decode(line, type=list[StreamRecord]))
                status.update(f"{self.name}: {len(results)} of {len(jobs)} runs done")
        if len(results) != len(jobs):
            raise RequestFailedError(f"{self.name}: {len(results)} of {len(jobs)} jobs were answered")
        return results

    def _lines(self, task: bytes) -> Iterator[bytes]:
        """Yield the lines that the process writes. It is killed at the timeout, and when the caller stops reading."""
        with tempfile.TemporaryFile() as log:
            # The same OpenMP settings as in our workers, so that sharing cores affects all systems alike.
            env = {**OPENMP_ENVIRONMENT, **os.environ}
            process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env)
            assert process.stdin is not None
            assert process.stdout is not None
            deadline = threading.Timer(self.timeout, process.kill)
            deadline.start()
            try:
                # If the process has ended already, its exit code is more useful than this error.
                with suppress(BrokenPipeError), process.stdin:
                    process.stdin.write(task)
                yield from process.stdout
                code = process.wait()
            finally:
                deadline.cancel()
                process.kill()
                process.wait()
                process.stdout.close()
            if code != 0:
                log.seek(0)
                tail = "\n".join(log.read().decode(errors="replace").splitlines()[-10:])
                raise RequestFailedError(
                    f"{self.name} ended with code {code} (a kill at {self.timeout:g} s gives -9):\n{tail}"
                )


def choose_backends(named: Sequence[str], default: Iterable[str], option: str, console: Console) -> list[str]:
    """Return the backends to measure. Raises ConfigError if a named one is absent.

    An absent default backend is left out with a remark on `console`.
    """
    chosen = []
    for backend in named or default:
        problem = missing(backend)
        if problem is None:
            chosen.append(backend)
        elif named:
            raise ConfigError(f"{option} {backend}: {problem}")
        else:
            console.print(f"{backend}: absent: {problem}", highlight=False, markup=False)
    return chosen
