"""Systems that benchmarks measure.

Colocated and disaggregated serving are LocalClusters behind their router. A running server receives requests as it is.
Plain transformers is a process that answers without HTTP. Servers of other engines are in
`splitserve.tools.bench.peers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from rich.console import Console

from splitserve.api.tokenizer import Tokenizer
from splitserve.core.errors import ConfigError
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.tools.bench.load import Endpoint
from splitserve.tools.bench.second_process import SecondProcess, SecondProcessError
from splitserve.tools.bench.stats import StreamRecord
from splitserve.tools.bench.workload import Encode, Prompt
from splitserve.tools.client import STREAM_TIMEOUT, RequestFailedError
from splitserve.transfer.transports import missing

# Seconds for a system to start.
READY_TIMEOUT = 600.0


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

    @property
    def threads(self) -> str:
        return str(self.num_threads)

    @contextmanager
    def running(self, console: Console) -> Iterator[Running]:
        # Imported late: it loads torch.
        from splitserve.tools.bench.baseline import serve_baseline

        with SecondProcess(serve_baseline, str(self.model_folder), self.dtype, self.num_threads) as process:
            yield Running(BaselineEndpoint("", self.name, process=process))


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineEndpoint(Endpoint):
    """Connection to the process of TransformersSystem. `model`: name in errors."""

    process: SecondProcess

    def ask(self, prompts: Iterable[Prompt], max_tokens: int, timeout: float = STREAM_TIMEOUT) -> list[StreamRecord]:
        """Run all prompts in one batch. Raises RequestFailedError."""
        try:
            self.process.send(([prompt.ids for prompt in prompts], max_tokens))
            records: list[StreamRecord] = self.process.receive(timeout)
        except SecondProcessError as error:
            raise RequestFailedError(f"{self.model}: {error.message}") from error
        return records


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
