"""`splitserve bench compare`: the same load on our servers and on other engines', one after the other, in one run.

1. Each server starts on all cores of this machine and warms up. Our disaggregated workers have half of the cores each.
2. Every scenario runs several times. Figures are medians. If a scenario fails or takes too long, the report has the
   error in its place.
3. The server stops, and the next one starts. If one cannot be installed or does not run here, it is skipped and the
   report has the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.status import Status

from splitserve.api.tokenizer import Tokenizer
from splitserve.core.config import check_dtype
from splitserve.core.errors import ClusterError, ConfigError
from splitserve.core.machine import num_cores
from splitserve.engine.sources import resolve_model
from splitserve.tools.bench.isolation import IsolationFigures, IsolationPlan, measure_isolation
from splitserve.tools.bench.load import Endpoint, ask
from splitserve.tools.bench.machine import OthersWatch, describe_machine
from splitserve.tools.bench.peers import PEERS, PeerServer, PeerUnavailableError, find_scripts
from splitserve.tools.bench.report import ABSENT, Report, ReportOutput, ReportTable, milliseconds
from splitserve.tools.bench.stats import StreamRecord, StreamsFigures, median, prompt_tokens_per_second
from splitserve.tools.bench.systems import ServedSystem, Server
from splitserve.tools.bench.workload import Encode, PromptMaker
from splitserve.tools.client import RequestFailedError

T = TypeVar("T")
OURS = ("null", "disaggregated")
SYSTEMS = (*OURS, *PEERS)
_LEGEND = (
    "Medians of the runs. Decode and prefill: all prompts sent at once, tokens over the time from the first request to "
    "the last token. Isolation: {streams} streams decode for {window:g} s, then for {window:g} s more while a prompt "
    "of {tokens:,} tokens arrives each {interval:g} s, whether the one before is answered or not; in brackets how many "
    "were answered in that time; TTFT is of those answered at the cut, at least one. ITL: gaps between frames with "
    "tokens at the client."
)


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
    output: ReportOutput


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Number of prompts sent at once, each answered to its end."""

    num_prompts: int
    input_tokens: int
    output_tokens: int

    @property
    def is_prefill(self) -> bool:
        return self.output_tokens == 1

    @property
    def name(self) -> str:
        if self.is_prefill:
            return f"prefill {self.num_prompts} x {self.input_tokens:,}"
        return f"decode, {self.num_prompts} stream{'s' if self.num_prompts > 1 else ''}"


@dataclass(frozen=True, slots=True)
class PrefillFigures:
    num_prompts: int
    num_runs: int
    prompt_tokens_per_second: float

    @classmethod
    def of(cls, runs: Sequence[Sequence[StreamRecord]]) -> PrefillFigures:
        return cls(len(runs[0]), len(runs), median([prompt_tokens_per_second(run) for run in runs]))


# Result of a scenario. A string is the reason why there are no figures.
Outcome = StreamsFigures | PrefillFigures | IsolationFigures | str


@dataclass(frozen=True, slots=True)
class ComparePlan:
    batches: tuple[PromptBatch, ...]
    isolation: IsolationPlan

    @property
    def names(self) -> list[str]:
        """Return the names of the scenarios in order."""
        return [*(batch.name for batch in self.batches), _ISOLATION]

    @property
    def pool_tokens(self) -> int:
        """Return the KV pool tokens of one of our workers. Decode keeps a reserve for each running request."""
        plan = self.isolation
        streams = plan.num_streams * (plan.stream_prompt_tokens + plan.stream_output_tokens)
        long_prompts = int(plan.window / plan.interval) * plan.long_prompt_tokens
        largest = max(b.num_prompts * (b.input_tokens + b.output_tokens) for b in self.batches)
        return max(2 * largest, streams + 2 * long_prompts)


_ISOLATION = "isolation"


def _plan(output_tokens: int, isolation: IsolationPlan) -> ComparePlan:
    decode = (PromptBatch(num_prompts, 128, output_tokens) for num_prompts in (1, 8, 32))
    return ComparePlan((*decode, PromptBatch(1, 1024, 1), PromptBatch(8, 1024, 1)), isolation)


FULL = _plan(128, IsolationPlan())
QUICK = _plan(32, IsolationPlan(window=5.0))


@dataclass(frozen=True, slots=True)
class ServerFigures:
    name: str
    threads: str
    # Why nothing was measured. None: the server was measured.
    skipped: str | None
    # Results in the order of the plan. Empty: the server was skipped.
    outcomes: Sequence[Outcome]
    # Average number of cores that processes other than the server and its client kept busy.
    cores_taken_by_others: float

    def problems(self) -> list[str]:
        """Return why the server or its scenarios have no figures."""
        failed = [outcome for outcome in self.outcomes if isinstance(outcome, str)]
        return [self.skipped] if self.skipped is not None else failed


def run_compare(options: CompareOptions) -> int:
    """Run the benchmark and return the exit code: 1 if one of our servers failed. Raises ConfigError."""
    console = Console(stderr=True)
    check_dtype(options.dtype)
    if unknown := [name for name in options.systems if name not in SYSTEMS]:
        raise ConfigError(f"--system {unknown[0]}: choose of {', '.join(SYSTEMS)}")
    options.output.check()
    scripts = find_scripts(options.peers) if set(options.systems) & set(PEERS) else Path()
    folder = resolve_model(options.model)
    tokenizer = Tokenizer.load(folder)
    plan = QUICK if options.quick else FULL

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    servers = [_server(name, options, plan, scripts, folder) for name in options.systems]
    figures = [measure(server, plan, encode, options.runs, options.timeout, console) for server in servers]
    options.output.publish(compare_report(options, plan, describe_machine(), figures), console)
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
        def run() -> list[StreamRecord]:
            made = [prompts.make(batch.input_tokens) for _ in range(batch.num_prompts)]
            return ask(self.endpoint, made, batch.output_tokens, timeout=self.timeout)

        return self._repeat(batch.name, run, PrefillFigures.of if batch.is_prefill else StreamsFigures.of)

    def _isolation(self, prompts: PromptMaker) -> Outcome:
        def run() -> IsolationFigures:
            # Wait until the server has finished the work that the last run left.
            ask(self.endpoint, [prompts.make(16)], 1, timeout=self.timeout)
            return asyncio.run(measure_isolation(self.endpoint, self.plan.isolation, prompts, self.timeout))

        return self._repeat(_ISOLATION, run, IsolationFigures.median_of)

    def _repeat(self, name: str, run: Callable[[], T], summarize: Callable[[Sequence[T]], Outcome]) -> Outcome:
        """Run a scenario several times and return its figures, or the reason why it failed."""
        results = []
        try:
            for number in range(1, self.runs + 1):
                self.status.update(f"{self.name}: {name}, run {number} of {self.runs}")
                results.append(run())
        except RequestFailedError as error:
            return error.message
        return summarize(results)


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


def compare_report(
    options: CompareOptions, plan: ComparePlan, machine: Mapping[str, str], servers: Sequence[ServerFigures]
) -> Report:
    """Return the report. JSON has one object per server, with times in seconds and throughput in tokens/s."""
    remarks = []
    for server in servers:
        if server.skipped is not None:
            remarks.append(f"{server.name} skipped: {server.skipped}")
        failed = ((name, o) for name, o in zip(plan.names, server.outcomes, strict=False) if isinstance(o, str))
        remarks += [f"{server.name}, {name}: {reason}" for name, reason in failed]
    rows = [
        (f"{scenario}: {row}", _cell(index, kind, show))
        for index, scenario in enumerate(plan.names)
        for row, kind, show in _ROWS
    ]
    rows += [
        ("CPU threads", lambda server: server.threads),
        ("cores taken by others", lambda server: f"{server.cores_taken_by_others:.1f}"),
    ]
    isolation = plan.isolation
    return Report(
        title=f"{options.model} in {options.dtype}, one server after the other",
        command=options.command,
        machine=machine,
        figures=[
            {
                "system": server.name,
                "threads": server.threads,
                "skipped": server.skipped,
                "cores_taken_by_others": server.cores_taken_by_others,
                "scenarios": {
                    name: {"failed": outcome} if isinstance(outcome, str) else asdict(outcome)
                    for name, outcome in zip(plan.names, server.outcomes, strict=False)
                },
            }
            for server in servers
        ],
        tables=[ReportTable.by_column([server.name for server in servers], rows, servers)],
        legend=_LEGEND.format(
            streams=isolation.num_streams,
            window=isolation.window,
            tokens=isolation.long_prompt_tokens,
            interval=isolation.interval,
        ),
        remarks=remarks,
    )


def _cell(index: int, kind: type[Outcome], show: Callable[[Any], str]) -> Callable[[ServerFigures], str]:
    """Return the text of a figure of one scenario. ABSENT if the scenario has none of this kind, or failed."""

    def cell(server: ServerFigures) -> str:
        outcome = server.outcomes[index] if index < len(server.outcomes) else ""
        return show(outcome) if isinstance(outcome, kind) else ABSENT

    return cell


def _ttft(f: IsolationFigures) -> str:
    return f"{milliseconds(f.ttft_p50)} ({f.num_answered:g} of {f.num_sent:g})"


def _both(p50: float, p99: float) -> str:
    return f"{milliseconds(p50)} / {milliseconds(p99)}"


# (row, type of the figures that have it, conversion to text)
_ROWS: list[tuple[str, type[Outcome], Callable[[Any], str]]] = [
    ("output tok/s", StreamsFigures, lambda f: f"{f.output_tokens_per_second:,.1f}"),
    ("ITL p50 / p99, ms", StreamsFigures, lambda f: _both(f.itl_p50, f.itl_p99)),
    ("prompt tok/s", PrefillFigures, lambda f: f"{f.prompt_tokens_per_second:,.0f}"),
    (
        "ITL p50 / p99 alone, ms",
        IsolationFigures,
        lambda f: _both(f.quiet_itl_p50, f.quiet_itl_p99),
    ),
    (
        "ITL p50 / p99 beside prompts, ms",
        IsolationFigures,
        lambda f: _both(f.loaded_itl_p50, f.loaded_itl_p99),
    ),
    ("p99 beside / alone", IsolationFigures, lambda f: f"{f.loaded_itl_p99 / f.quiet_itl_p99:.2f}"),
    ("output tok/s alone", IsolationFigures, lambda f: f"{f.quiet_output_tokens_per_second:,.1f}"),
    ("output tok/s beside prompts", IsolationFigures, lambda f: f"{f.loaded_output_tokens_per_second:,.1f}"),
    ("TTFT of prompts, ms (answered)", IsolationFigures, _ttft),
    ("prompt tok/s", IsolationFigures, lambda f: f"{f.prompt_tokens_per_second:,.0f}"),
]
