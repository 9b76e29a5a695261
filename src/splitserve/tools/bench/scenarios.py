"""Scenarios that `bench main` and `bench compare` run on one system after the other, and `bench main` itself.

All systems get equal prompts. `splitserve bench main` measures throughput and TTFT of colocated, disaggregated and
plain transformers on this machine, in one run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

from rich.console import Console

from splitserve.core.errors import ClusterError
from splitserve.core.machine import num_cores
from splitserve.engine.sources import resolve_model
from splitserve.tools.bench.load import Endpoint
from splitserve.tools.bench.peers import PeerUnavailableError
from splitserve.tools.bench.report import ABSENT, OthersWatch, Report, ReportTable, milliseconds
from splitserve.tools.bench.stats import StreamRecord, StreamsFigures, TtftFigures
from splitserve.tools.bench.systems import Server, encoder_of, our_server, transformers_server
from splitserve.tools.bench.workload import WARM_UP_OUTPUT_TOKENS, Encode, PromptMaker
from splitserve.tools.client import RequestFailedError
from splitserve.tools.options import MainBenchOptions, ModelBenchOptions

_PROMPT_TOKENS = 128
# Seconds for one run of a scenario.
_TIMEOUT = 3600.0
_LEGEND = (
    "Streams of {shape}, all sent at once, prompts of random words (no prefix hits). Served systems are measured at an "
    "HTTP client of the router; transformers runs `generate` on one batch, without HTTP. One system at a time. "
    "Runs: {runs}; medians of them. ITL: mean / p50 / p99. TPOT: median. TTFT: median (min-max), one prompt at a time "
    "on an idle system."
)


class Scenario(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def num_runs(self) -> int: ...

    @property
    def pool_tokens(self) -> int:
        """Return the KV pool tokens of a worker. Decode keeps a reserve for each running request."""
        ...

    def run(self, endpoint: Endpoint, prompts: PromptMaker, timeout: float) -> Any:
        """Run once. `timeout`: seconds for a request, or for a wait for a token. Raises RequestFailedError."""
        ...

    def figures(self, runs: Sequence[Any]) -> Any:
        """Return the figures of all runs: a dataclass."""
        ...


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Number of prompts sent at once, each answered to its end."""

    name: str
    num_prompts: int
    input_tokens: int
    output_tokens: int
    num_runs: int
    summarize: Callable[[Sequence[list[StreamRecord]]], Any]

    @property
    def pool_tokens(self) -> int:
        return 4 * self.num_prompts * (self.input_tokens + self.output_tokens)

    def run(self, endpoint: Endpoint, prompts: PromptMaker, timeout: float) -> list[StreamRecord]:
        made = [prompts.make(self.input_tokens) for _ in range(self.num_prompts)]
        return endpoint.ask(made, self.output_tokens, timeout)

    def figures(self, runs: Sequence[list[StreamRecord]]) -> Any:
        return self.summarize(runs)


@dataclass(frozen=True, slots=True)
class ServerFigures:
    name: str
    threads: str
    # Why nothing was measured. None: the server was measured.
    skipped: str | None
    # Scenario -> its figures, or the reason why there are none. Empty: the server was skipped.
    outcomes: dict[str, Any]
    # Average number of cores that processes other than the server and its client kept busy.
    cores_taken_by_others: float

    def problems(self) -> list[str]:
        """Return why the server or its scenarios have no figures."""
        if self.skipped is not None:
            return [f"{self.name} skipped: {self.skipped}"]
        return [f"{self.name}, {name}: {o}" for name, o in self.outcomes.items() if isinstance(o, str)]


def measure_server(
    server: Server, scenarios: Sequence[Scenario], encode: Encode, timeout: float, console: Console
) -> ServerFigures:
    """Run all scenarios on one server. The figures include failures."""
    others, outcomes = OthersWatch(), {}
    try:
        with server.running(console) as running, console.status(f"{server.name}: warming up") as status:
            # Warm-up prompts differ from the measured ones.
            warm_up, batches = PromptMaker(encode, seed=1), [s for s in scenarios if isinstance(s, PromptBatch)]
            for batch in batches[:1] + batches[-1:]:
                tokens = min(batch.output_tokens, WARM_UP_OUTPUT_TOKENS)
                running.endpoint.ask([warm_up.make(batch.input_tokens)], tokens, timeout)
            prompts = PromptMaker(encode)
            for scenario in scenarios:
                runs = []
                try:
                    for number in range(1, scenario.num_runs + 1):
                        status.update(f"{server.name}: {scenario.name}, run {number} of {scenario.num_runs}")
                        runs.append(scenario.run(running.endpoint, prompts, timeout))
                    outcomes[scenario.name] = scenario.figures(runs)
                except RequestFailedError as error:
                    outcomes[scenario.name] = error.message
    except (PeerUnavailableError, ClusterError, RequestFailedError) as error:
        return ServerFigures(server.name, server.threads, error.message, {}, 0.0)
    return ServerFigures(server.name, server.threads, None, outcomes, others.cores_taken())


def server_of(name: str, options: ModelBenchOptions, scenarios: Sequence[Scenario], backend: str = "tcp") -> Server:
    """Return a server of ours on all cores. Two workers have half of them each."""
    is_pair, pool_tokens = name == "disaggregated", max(scenario.pool_tokens for scenario in scenarios)
    threads = max(1, num_cores() // 2) if is_pair else num_cores()
    return our_server(name, options.model, options.dtype, threads, pool_tokens, is_pair=is_pair, backend=backend)


# Name of a figure, the class of the figures that have it, and its text.
ScenarioRow = tuple[str, type, Callable[[Any], str]]


def scenario_rows(
    scenarios: Sequence[Scenario], rows: Sequence[ScenarioRow]
) -> list[tuple[str, Callable[[ServerFigures], str]]]:
    """Return the rows of a table with one column per server.

    The text of a scenario is ABSENT if it has no such figures, or failed.
    """

    def cell(scenario: str, kind: type, show: Callable[[Any], str], server: ServerFigures) -> str:
        outcome = server.outcomes.get(scenario)
        return show(outcome) if isinstance(outcome, kind) else ABSENT

    return [
        *((f"{s.name}: {row}", partial(cell, s.name, kind, show)) for s in scenarios for row, kind, show in rows),
        ("CPU threads", lambda server: server.threads),
        ("cores taken by others", lambda server: f"{server.cores_taken_by_others:.1f}"),
    ]


def _plan(output_tokens: int, streams: dict[int, int], ttft: dict[int, int]) -> list[PromptBatch]:
    """Return the scenarios. `streams`, `ttft`: number of runs by the number of streams, and by prompt tokens."""
    return [
        *(
            PromptBatch(f"{n} stream{'s' if n > 1 else ''}", n, _PROMPT_TOKENS, output_tokens, runs, StreamsFigures.of)
            for n, runs in streams.items()
        ),
        *(PromptBatch(f"{n:,} tokens", 1, n, 1, runs, TtftFigures.of) for n, runs in ttft.items()),
    ]


# About ten minutes with a model of 135M parameters on two cores.
FULL = _plan(128, streams={1: 3, 8: 2, 32: 1}, ttft={1024: 3, 2048: 3})
# About two minutes.
QUICK = _plan(16, streams={1: 1, 8: 1, 32: 1}, ttft={1024: 1, 2048: 1})


def bench_main(options: MainBenchOptions, console: Console) -> Report:
    """Measure all systems and return the report, which has failed if a system failed. Raises ConfigError."""
    plan = QUICK if options.quick else FULL
    folder = resolve_model(options.model)
    servers = [
        *(server_of(name, options, plan) for name in ("colocated", "disaggregated")),
        transformers_server("transformers", folder, options.dtype, num_cores()),
    ]
    encode = encoder_of(folder)
    return main_report(options, plan, [measure_server(s, plan, encode, _TIMEOUT, console) for s in servers])


def main_report(options: MainBenchOptions, plan: Sequence[PromptBatch], systems: Sequence[ServerFigures]) -> Report:
    """Return the report. JSON has times in seconds and throughput in tokens/s."""
    shape = f"{plan[0].input_tokens} prompt and {plan[0].output_tokens} output tokens"
    runs = [
        f"{b.num_runs} for TTFT at {b.input_tokens}"
        if b.output_tokens == 1
        else f"{b.num_runs} at {b.num_prompts} stream(s)"
        for b in plan
    ]
    remarks = [problem for system in systems for problem in system.problems()]
    return Report(
        title=f"Throughput and TTFT of {options.model} in {options.dtype}",
        figures={
            "model": options.model,
            "dtype": options.dtype,
            "stream_shape": shape,
            "systems": [
                {
                    "name": system.name,
                    "threads": system.threads,
                    "streams": [asdict(o) for o in system.outcomes.values() if isinstance(o, StreamsFigures)],
                    "ttft": [asdict(o) for o in system.outcomes.values() if isinstance(o, TtftFigures)],
                    "cores_taken_by_others": system.cores_taken_by_others,
                }
                for system in systems
            ],
        },
        tables=[ReportTable.by_column([system.name for system in systems], scenario_rows(plan, _ROWS), systems)],
        legend=_LEGEND.format(shape=shape, runs=", ".join(runs)),
        remarks=remarks,
        failed=bool(remarks),
    )


def _ttft(f: TtftFigures) -> str:
    return f"{milliseconds(f.ttft_median)} ({milliseconds(f.ttft_min)}-{milliseconds(f.ttft_max)})"


_ROWS: list[ScenarioRow] = [
    ("output tokens/s", StreamsFigures, lambda f: f"{f.output_tokens_per_second:.1f}"),
    ("ITL, ms", StreamsFigures, lambda f: " / ".join(map(milliseconds, (f.itl_mean, f.itl_p50, f.itl_p99)))),
    ("TPOT, ms", StreamsFigures, lambda f: milliseconds(f.tpot_median)),
    ("TTFT, ms", TtftFigures, _ttft),
]
