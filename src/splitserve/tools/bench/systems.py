"""Systems that benchmarks measure.

Colocated and disaggregated serving are LocalClusters behind their router. A running server receives requests as it is.
Plain transformers is a process that answers without HTTP. Servers of other engines are in
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
from functools import partial
from pathlib import Path
from typing import IO, Protocol

import msgspec
from rich.console import Console

from splitserve.api.tokenizer import Tokenizer
from splitserve.core.errors import ConfigError
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.tools.bench.load import Endpoint
from splitserve.tools.bench.stats import StreamRecord
from splitserve.tools.bench.workload import Encode, Prompt
from splitserve.tools.client import STREAM_TIMEOUT, RequestFailedError
from splitserve.transfer.transports import missing
from splitserve.worker.scheduler_link import OPENMP_ENVIRONMENT

# Seconds for a system to start.
READY_TIMEOUT = 600.0
BASELINE_COMMAND = (sys.executable, "-m", "splitserve.tools.bench.baseline")


@dataclass(frozen=True, slots=True)
class Running:
    """Server that is ready."""

    endpoint: Endpoint
    # Prefill worker of ours, if there are KV transfers. None: no transfers, or unknown.
    prefill_url: str | None = None


class Server(Protocol):
    """System that receives requests."""

    @property
    def name(self) -> str: ...

    @property
    def threads(self) -> str:
        """Return the CPU threads of its models, e.g. "1 + 1" for two workers."""
        ...

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
    """Deployment of ours on this machine: one colocated worker, or a pair of workers."""

    name: str
    model: str
    dtype: str
    threads_each: int
    # Tokens of each worker's KV pool: enough for the largest scenario.
    pool_tokens: int
    is_pair: bool = False
    backend: str = "tcp"
    # More options of `splitserve serve` for each worker.
    worker_args: tuple[str, ...] = ()

    @property
    def threads(self) -> str:
        return " + ".join([str(self.threads_each)] * (2 if self.is_pair else 1))

    def cluster(self) -> LocalCluster:
        """Return the cluster, which is not started yet."""
        own = ("--served-model-name", self.model, "--max-total-tokens", str(self.pool_tokens))
        return LocalCluster(
            LocalDeployment(
                model=self.model,
                prefill=int(self.is_pair),
                decode=int(self.is_pair),
                null=int(not self.is_pair),
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


@dataclass(frozen=True, slots=True)
class TransformersSystem:
    """Plain `generate` in a process of its own."""

    name: str
    model_folder: Path
    dtype: str
    num_threads: int
    command: Sequence[str] = BASELINE_COMMAND

    @property
    def threads(self) -> str:
        return str(self.num_threads)

    @contextmanager
    def running(self, console: Console) -> Iterator[Running]:
        model = {"folder": str(self.model_folder), "dtype": self.dtype, "threads": self.num_threads}
        # The same OpenMP settings as in our workers, so that sharing cores affects all systems alike.
        env = {**OPENMP_ENVIRONMENT, **os.environ}
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env)
            try:
                endpoint = BaselineEndpoint("", self.name, process=process, log=log)
                endpoint.write(model)
                yield Running(endpoint)
            finally:
                process.kill()
                with suppress(BrokenPipeError):
                    process.communicate()


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineEndpoint(Endpoint):
    """Pipes of the process of TransformersSystem. `model`: name in errors."""

    process: subprocess.Popen[bytes]
    # Standard error of the process.
    log: IO[bytes]

    def write(self, message: object) -> None:
        assert self.process.stdin is not None
        # If the process has ended already, its exit code is more useful than this error.
        with suppress(BrokenPipeError):
            self.process.stdin.write(msgspec.json.encode(message) + b"\n")
            self.process.stdin.flush()

    def ask(self, prompts: Iterable[Prompt], max_tokens: int, timeout: float = STREAM_TIMEOUT) -> list[StreamRecord]:
        """Run all prompts in one batch. Kills the process at the timeout. Raises RequestFailedError."""
        assert self.process.stdout is not None
        deadline = threading.Timer(timeout, self.process.kill)
        deadline.start()
        try:
            self.write({"prompts": [prompt.ids for prompt in prompts], "max_tokens": max_tokens})
            if line := self.process.stdout.readline():
                return msgspec.json.decode(line, type=list[StreamRecord])
            code = self.process.wait()
        finally:
            deadline.cancel()
        self.log.seek(0)
        tail = "\n".join(self.log.read().decode(errors="replace").splitlines()[-10:])
        raise RequestFailedError(f"{self.model} ended with code {code} (a kill at {timeout:g} s gives -9):\n{tail}")


def encoder_of(model_folder: Path) -> Encode:
    """Return the function that turns text into the token ids of a model."""
    return partial(Tokenizer.load(model_folder).encode, add_special_tokens=False)


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
