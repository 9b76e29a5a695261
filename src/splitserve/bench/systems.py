"""The systems that are measured, one at a time: each starts, is asked, and stops.

Colocated and disaggregated serving are LocalClusters asked through their router, a running server is asked as it is,
and plain transformers is a process that gets `bench main`'s jobs without HTTP. Servers of others that must be installed
and started are in `splitserve.bench.peers`. What the figures mean is not known here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
from rich.console import Console

from splitserve.bench.jobs import Job
from splitserve.bench.load import ask
from splitserve.bench.prompts import Prompt
from splitserve.bench.stats import StreamRecord
from splitserve.bench.stream import Endpoint, LoadError
from splitserve.cluster.deployment import LocalDeployment
from splitserve.core.request import DisaggregationMode
from splitserve.launch.local import LocalCluster, wait_ready
from splitserve.launch.scheduler_link import OPENMP_ENVIRONMENT
from splitserve.launch.streaming import api_key
from splitserve.router.api_keys import key_header

# Seconds for a system to start.
READY_TIMEOUT = 600.0
# Seconds the baseline may take in all.
_BASELINE_TIMEOUT = 3600.0
BASELINE_COMMAND = (sys.executable, "-m", "splitserve.bench.baseline")


class System(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def threads(self) -> str:
        """CPU threads of its models, e.g. "1 + 1" for two workers."""
        ...

    def run(self, warm_up: Sequence[Job], jobs: Sequence[Job], console: Console) -> list[list[StreamRecord]]:
        """The records of each job. Progress goes to the console. Raises SplitserveError."""
        ...


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is ready."""

    endpoint: Endpoint
    # Of ours that hand KV caches over; None: nothing is handed over, or it is not known.
    prefill_url: str | None = None


class Server(Protocol):
    """A system that is asked over HTTP."""

    @property
    def name(self) -> str: ...

    @property
    def threads(self) -> str: ...

    def running(self, console: Console) -> AbstractContextManager[Running]:
        """Ready on entry, gone on exit. Progress goes to the console. Raises SplitserveError."""
        ...


@dataclass(frozen=True, slots=True)
class RunningServer:
    """One that somebody else started."""

    name: str
    endpoint: Endpoint
    threads: str = "not known"

    def running(self, console: Console) -> AbstractContextManager[Running]:
        return nullcontext(Running(self.endpoint))


@dataclass(frozen=True, slots=True)
class ServedSystem:
    """A deployment of ours on this machine: pairs of workers, or one that does both phases."""

    name: str
    model: str
    dtype: str
    num_pairs: int
    num_colocated: int
    threads_each: int
    # Of each worker's KV pool: enough for the largest job.
    pool_tokens: int
    backend: str = "tcp"
    # More options of `splitserve serve`, for each worker.
    worker_args: tuple[str, ...] = ()

    @property
    def threads(self) -> str:
        return " + ".join([str(self.threads_each)] * (2 * self.num_pairs + self.num_colocated))

    def cluster(self) -> LocalCluster:
        """Not started yet."""
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
        """Raises ClusterError."""
        with self.cluster() as cluster:
            wait_ready(cluster, console, READY_TIMEOUT)
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


def first_model(url: str) -> str:
    """The first model that a server offers. Raises LoadError."""
    try:
        request = urllib.request.Request(f"{url}/v1/models", headers=key_header(api_key()))
        with urllib.request.urlopen(request, timeout=10.0) as response:
            model: str = json.load(response)["data"][0]["id"]
    except (OSError, ValueError, LookupError) as error:
        raise LoadError(f"{url}/v1/models names no model ({error}): is an OpenAI-compatible server there?") from error
    return model


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
            raise LoadError(f"{self.name}: {len(results)} of {len(jobs)} jobs were answered")
        return results

    def _lines(self, task: bytes) -> Iterator[bytes]:
        """What the process writes, as it comes. It is killed at the deadline, and when the caller lets go."""
        with tempfile.TemporaryFile() as log:
            # Threads that share cores with others' work fare alike in all systems.
            env = {**OPENMP_ENVIRONMENT, **os.environ}
            process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env)
            assert process.stdin is not None
            assert process.stdout is not None
            deadline = threading.Timer(self.timeout, process.kill)
            deadline.start()
            try:
                # Where it has died already, its exit code says more.
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
                raise LoadError(f"{self.name} ended with code {code} (a kill at {self.timeout:g} s gives -9):\n{tail}")
