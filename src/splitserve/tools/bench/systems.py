"""Systems that benchmarks measure.

Colocated and disaggregated serving are LocalClusters behind their router. A running server receives requests as it is.
Plain transformers is a process that answers without HTTP. Servers of other engines are in
`splitserve.tools.bench.peers`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

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
    """Plain `generate` of transformers with its own cache, in a process of its own."""

    name: str
    model_folder: Path
    dtype: str
    num_threads: int

    @property
    def threads(self) -> str:
        return str(self.num_threads)

    @contextmanager
    def running(self, console: Console) -> Iterator[Running]:
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


class _StepClock:
    """Stopping criterion that never stops, and records when each step is done."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        # Reading a token waits for the device.
        input_ids[0, -1].item()
        self.times.append(time.perf_counter())
        # False for each prompt: no token id is below 0.
        return input_ids[:, 0] < 0


def run_batch(model: Any, prompts: Sequence[list[int]], max_tokens: int) -> list[StreamRecord]:
    """Generate greedily with EOS suppressed, so that every prompt gets `max_tokens` tokens.

    Times are those at which `generate` has finished a step's tokens, without HTTP. Prompts of unequal length are padded
    on the left.
    """
    import torch
    from transformers import StoppingCriteriaList

    width = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    clock = _StepClock()
    sent_at = time.perf_counter()
    model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        do_sample=False,
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    return [StreamRecord(sent_at, clock.times, len(p), len(clock.times)) for p in prompts]


def serve_baseline(connection: Connection, folder: str, dtype: str, threads: int) -> None:
    """Answer messages (prompts, max_tokens) with their records until the connection is closed."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    if torch.cuda.is_available():
        model = model.to("cuda")
    with suppress(EOFError):
        while True:
            connection.send(run_batch(model, *connection.recv()))


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
