"""`splitserve bench compare`: the same load on our servers and on other engines', one after the other, in one run.

1. Each server starts on all cores of this machine and warms up. Our disaggregated workers have half of the cores each.
2. Every scenario runs several times. Figures are medians. If a scenario fails or takes too long, the report has the
   error in its place.
3. The server stops, and the next one starts. If one cannot be installed or does not run here, it is skipped and the
   report has the reason.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.status import Status

from splitserve.api.tokenizer import Tokenizer
from splitserve.core.config import DTYPES
from splitserve.core.cpus import num_cores
from splitserve.core.errors import ClusterError, ConfigError
from splitserve.engine.sources import resolve_model
from splitserve.tools.bench.compare_plan import FULL, QUICK, ComparePlan, Outcome, PrefillFigures, PromptBatch
from splitserve.tools.bench.compare_report import CompareReport, ServerFigures
from splitserve.tools.bench.isolation import IsolationFigures, measure_isolation
from splitserve.tools.bench.load import Endpoint, ask
from splitserve.tools.bench.machine import OthersWatch, check_writable, describe_machine
from splitserve.tools.bench.peers import PEERS, PeerServer, PeerUnavailableError, find_scripts
from splitserve.tools.bench.publish import publish
from splitserve.tools.bench.stats import StreamsFigures
from splitserve.tools.bench.systems import ServedSystem, Server
from splitserve.tools.bench.workload import Encode, PromptMaker
from splitserve.tools.client import RequestFailedError

OURS = ("null", "disaggregated")
SYSTEMS = (*OURS, *PEERS)


@dataclass(frozen=True, slots=True)
class CompareOptions:
    # Command line that repeats this benchmark.
    command: str
    model: str
    dtype: str
    # Names from SYSTEMS, in the order of measurement.
    systems: tuple[str, ...]
    # Transfer backend of our disaggregated system.
    backend: str
    runs: int
    # Seconds for a request, or for a wait for a token.
    timeout: float
    # Folder of the peers' scripts. None: that of the repository.
    peers: Path | None
    quick: bool
    # Markdown file to append a section to. None: no file.
    append_to: Path | None
    as_json: bool


def run_compare(options: CompareOptions) -> int:
    """Run the benchmark and return the exit code: 1 if one of our servers failed. Raises ConfigError."""
    console = Console(stderr=True)
    if options.dtype not in DTYPES:
        raise ConfigError(f"--dtype {options.dtype!r}: choose one of {', '.join(DTYPES)}")
    if unknown := [name for name in options.systems if name not in SYSTEMS]:
        raise ConfigError(f"--system {unknown[0]}: choose of {', '.join(SYSTEMS)}")
    if options.append_to is not None:
        check_writable(options.append_to)
    scripts = find_scripts(options.peers) if set(options.systems) & set(PEERS) else Path()
    folder = resolve_model(options.model)
    tokenizer = Tokenizer.load(folder)
    plan = QUICK if options.quick else FULL

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    servers = [_server(name, options, plan, scripts, folder) for name in options.systems]
    figures = [measure(server, plan, encode, options.runs, options.timeout, console) for server in servers]
    report = CompareReport(options.model, options.dtype, options.command, describe_machine(), plan, figures)
    publish(report, as_json=options.as_json, append_to=options.append_to, console=console)
    return 1 if any(f.problems() for f in figures if f.name in OURS) else 0


def measure(
    server: Server, plan: ComparePlan, encode: Encode, runs: int, timeout: float, console: Console
) -> ServerFigures:
    """Run all scenarios on one server. The figures include failures."""
    others = OthersWatch()
    try:
        with server.running(console) as running, console.status(f"{server.name}: warming up") as status:
            outcomes = _Measuring(running.endpoint, plan, encode, runs, timeout, status, server.name).all()
    except (PeerUnavailableError, ClusterError, RequestFailedError) as error:
        return ServerFigures(server.name, server.threads, error.message, [], 0.0)
    return ServerFigures(server.name, server.threads, None, outcomes, others.cores_taken())


@dataclass(frozen=True, slots=True)
class _Measuring:
    """Scenarios on a server that is ready."""

    endpoint: Endpoint
    plan: ComparePlan
    encode: Encode
    runs: int
    timeout: float
    status: Status
    name: str

    def all(self) -> list[Outcome]:
        """Run the scenarios in the order of the plan. Raises RequestFailedError if the warm-up fails."""
        # Warm-up prompts differ from the measured ones. They are the same for every server, and unique.
        warm_up = PromptMaker(self.encode, seed=1)
        for batch in self.plan.batches[:1] + self.plan.batches[-1:]:
            ask(self.endpoint, [warm_up.make(batch.input_tokens)], min(batch.output_tokens, 8), timeout=self.timeout)
        prompts = PromptMaker(self.encode)
        outcomes = [self._batch(batch, prompts) for batch in self.plan.batches]
        return [*outcomes, self._isolation(prompts)]

    def _batch(self, batch: PromptBatch, prompts: PromptMaker) -> Outcome:
        results = []
        try:
            for run in range(1, self.runs + 1):
                self.status.update(f"{self.name}: {batch.name}, run {run} of {self.runs}")
                made = [prompts.make(batch.input_tokens) for _ in range(batch.num_prompts)]
                results.append(ask(self.endpoint, made, batch.output_tokens, timeout=self.timeout))
        except RequestFailedError as error:
            return error.message
        return PrefillFigures.of(results) if batch.is_prefill else StreamsFigures.of(results)

    def _isolation(self, prompts: PromptMaker) -> Outcome:
        results = []
        try:
            for run in range(1, self.runs + 1):
                self.status.update(f"{self.name}: isolation, run {run} of {self.runs}")
                # Wait until the server has finished the work that the last run left.
                ask(self.endpoint, [prompts.make(16)], 1, timeout=self.timeout)
                results.append(
                    asyncio.run(measure_isolation(self.endpoint, self.plan.isolation, prompts, self.timeout))
                )
        except RequestFailedError as error:
            return error.message
        return IsolationFigures.median_of(results)


def _server(name: str, options: CompareOptions, plan: ComparePlan, scripts: Path, folder: Path) -> Server:
    cores = num_cores()
    if name in PEERS:
        return PeerServer(PEERS[name], scripts, options.model, folder, options.dtype, cores)
    is_apart = name == "disaggregated"
    return ServedSystem(
        name,
        options.model,
        options.dtype,
        num_pairs=1 if is_apart else 0,
        num_colocated=0 if is_apart else 1,
        threads_each=max(1, cores // 2) if is_apart else cores,
        pool_tokens=plan.pool_tokens,
        backend=options.backend,
    )
