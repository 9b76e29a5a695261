"""`splitserve bench main` and `splitserve bench compare`: the same load on one server after the other, in one run.

`main` measures colocated, disaggregated and plain transformers. `compare` measures our servers and other engines'.
1. Each server starts on all cores of this machine and warms up. Our disaggregated workers have half of the cores each.
2. Every scenario runs several times, with equal prompts for all servers. Figures are medians. If a scenario fails or
   takes too long, the report has the error in its place.
3. The server stops, and the next one starts. If one cannot be installed or does not run here, it is skipped and the
   report has the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from splitserve.core.errors import ClusterError
from splitserve.core.machine import num_cores
from splitserve.engine.sources import float_model, resolve_model
from splitserve.tools.bench.isolation import IsolationPlan
from splitserve.tools.bench.load import Endpoint
from splitserve.tools.bench.options import MODES, SYSTEMS, CompareBenchOptions, MainBenchOptions, ModelBenchOptions
from splitserve.tools.bench.report import ABSENT, OthersWatch, Report, ReportTable, milliseconds
from splitserve.tools.bench.stats import Figures, StreamRecord, prefill_figures, streams_figures, ttft_figures
from splitserve.tools.bench.systems import (
    PEERS,
    PeerUnavailableError,
    Server,
    encoder_of,
    find_scripts,
    our_server,
    peer_server,
    transformers_server,
)
from splitserve.tools.bench.workload import WARM_UP_OUTPUT_TOKENS, Encode, PromptMaker
from splitserve.tools.client import RequestFailedError
from splitserve.worker.checks import check_backend

# Prompt tokens of a stream of `bench main`, and seconds for one of its runs.
_PROMPT_TOKENS, _TIMEOUT = 128, 3600.0
_MAIN_LEGEND = (
    "Streams of {shape}, all sent at once, prompts of random words (no prefix hits). Served systems are measured at an "
    "HTTP client of the router; transformers runs `generate` on one batch, without HTTP. One system at a time. "
    "Runs: {runs}; medians of them. ITL: mean / p50 / p99. TPOT: median. TTFT: median (min-max), one prompt at a time "
    "on an idle system."
)
_COMPARE_LEGEND = (
    "Medians of the runs. Decode and prefill: all prompts sent at once, tokens over the time from the first request to "
    "the last token. Isolation: {plan.num_streams} streams decode for {plan.window:g} s, then for {plan.window:g} s "
    "more while a prompt of {plan.long_prompt_tokens:,} tokens arrives each {plan.interval:g} s, whether the one "
    "before is answered or not; in brackets how many were answered in that time; TTFT is of those answered at the cut, "
    "at least one. ITL: gaps between frames with tokens at the client."
)


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Number of prompts sent at once, each answered to its end."""

    name: str
    num_prompts: int
    input_tokens: int
    output_tokens: int
    num_runs: int
    # Returns the figures of all runs.
    figures: Callable[[Sequence[list[StreamRecord]]], Figures]

    @property
    def pool_tokens(self) -> int:
        # Decode keeps a reserve for each running request.
        return 4 * self.num_prompts * (self.input_tokens + self.output_tokens)

    def run(self, endpoint: Endpoint, prompts: PromptMaker, timeout: float) -> list[StreamRecord]:
        made = [prompts.make(self.input_tokens) for _ in range(self.num_prompts)]
        return endpoint.ask(made, self.output_tokens, timeout)


Scenario = PromptBatch | IsolationPlan


@dataclass(frozen=True, slots=True)
class ServerFigures:
    name: str
    threads: str
    # Why nothing was measured. None: the server was measured.
    skipped: str | None
    # Scenario -> its figures, or the reason why there are none. Empty: the server was skipped.
    outcomes: dict[str, Figures | str]
    # Average number of cores that processes other than the server and its client kept busy.
    cores_taken_by_others: float

    def problems(self) -> list[str]:
        """Return why the server or its scenarios have no figures."""
        if self.skipped is not None:
            return [f"{self.name} skipped: {self.skipped}"]
        return [f"{self.name}, {name}: {o}" for name, o in self.outcomes.items() if isinstance(o, str)]

    def having(self, key: str) -> list[Figures]:
        """Return the figures of the scenarios that measure `key`."""
        return [o for o in self.outcomes.values() if isinstance(o, dict) and key in o]


def measure_server(
    server: Server, scenarios: Sequence[Scenario], encode: Encode, timeout: float, console: Console
) -> ServerFigures:
    """Run all scenarios on one server. The figures include failures. `timeout`: seconds for a request."""
    others, outcomes = OthersWatch(), dict[str, Figures | str]()
    try:
        with server.running(console) as running, console.status(f"{server.name}: warming up") as status:
            # Warm-up prompts differ from the measured ones.
            warm_up, batches = PromptMaker(encode, seed=1), [s for s in scenarios if isinstance(s, PromptBatch)]
            for batch in batches[:1] + batches[-1:]:
                tokens = min(batch.output_tokens, WARM_UP_OUTPUT_TOKENS)
                running.endpoint.ask([warm_up.make(batch.input_tokens)], tokens, timeout)
            prompts = PromptMaker(encode)
            for scenario in scenarios:
                runs: list[Any] = []
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


def _server_of(name: str, options: ModelBenchOptions, scenarios: Sequence[Scenario], backend: str = "tcp") -> Server:
    """Return a server of ours on all cores. Two workers have half of them each."""
    is_pair, pool_tokens = name == "disaggregated", max(scenario.pool_tokens for scenario in scenarios)
    threads = max(1, num_cores() // 2) if is_pair else num_cores()
    return our_server(name, options.model, options.dtype, threads, pool_tokens, is_pair=is_pair, backend=backend)


# Name of a figure, the key of the figures that have it, and its text.
ScenarioRow = tuple[str, str, Callable[[Figures], str]]


def _table(scenarios: Sequence[Scenario], rows: Sequence[ScenarioRow], servers: Sequence[ServerFigures]) -> ReportTable:
    """Return a table with one column per server. A cell is ABSENT if the scenario has no such figure, or failed."""

    def cell(scenario: str, key: str, show: Callable[[Figures], str], server: ServerFigures) -> str:
        outcome = server.outcomes.get(scenario)
        return show(outcome) if isinstance(outcome, dict) and key in outcome else ABSENT

    figures: list[tuple[str, Callable[[ServerFigures], str]]] = [
        *((f"{s.name}: {row}", partial(cell, s.name, key, show)) for s in scenarios for row, key, show in rows),
        ("CPU threads", lambda server: server.threads),
        ("cores taken by others", lambda server: f"{server.cores_taken_by_others:.1f}"),
    ]
    return ReportTable.by_column([server.name for server in servers], figures, servers)


def _plan(output_tokens: int, streams: dict[int, int], ttft: dict[int, int]) -> list[PromptBatch]:
    """Return the scenarios. `streams`, `ttft`: number of runs by the number of streams, and by prompt tokens."""
    return [
        *(
            PromptBatch(f"{n} stream{'s' if n > 1 else ''}", n, _PROMPT_TOKENS, output_tokens, runs, streams_figures)
            for n, runs in streams.items()
        ),
        *(PromptBatch(f"{n:,} tokens", 1, n, 1, runs, ttft_figures) for n, runs in ttft.items()),
    ]


# About ten minutes with a model of 135M parameters on two cores.
FULL = _plan(128, streams={1: 3, 8: 2, 32: 1}, ttft={1024: 3, 2048: 3})
# About two minutes.
QUICK = _plan(16, streams={1: 1, 8: 1, 32: 1}, ttft={1024: 1, 2048: 1})


def bench_main(options: MainBenchOptions, console: Console) -> Report:
    """Measure all systems and return the report, which has failed if a system failed. Raises ConfigError."""
    plan = QUICK if options.quick else FULL
    folder = float_model(resolve_model(options.model))
    servers = [
        *(_server_of(name, options, plan) for name in ("colocated", "disaggregated")),
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
                    "streams": system.having("num_streams"),
                    "ttft": system.having("ttft_median"),
                    "cores_taken_by_others": system.cores_taken_by_others,
                }
                for system in systems
            ],
        },
        tables=[_table(plan, _MAIN_ROWS, systems)],
        legend=_MAIN_LEGEND.format(shape=shape, runs=", ".join(runs)),
        remarks=remarks,
        failed=bool(remarks),
    )


def batch_of(num_prompts: int, input_tokens: int, output_tokens: int, num_runs: int) -> PromptBatch:
    """Return a scenario of prefill if there is one output token, else one of decode."""
    if output_tokens == 1:
        name, figures = f"prefill {num_prompts} x {input_tokens:,}", prefill_figures
    else:
        name, figures = f"decode, {num_prompts} stream{'s' if num_prompts > 1 else ''}", streams_figures
    return PromptBatch(name, num_prompts, input_tokens, output_tokens, num_runs, figures)


def compare_plan(options: CompareBenchOptions) -> list[Scenario]:
    """Return the scenarios, isolation last."""
    num_runs = options.runs or (1 if options.quick else 3)
    return [
        *(batch_of(n, 128, 32 if options.quick else 128, num_runs) for n in (1, 8, 32)),
        *(batch_of(n, 1024, 1, num_runs) for n in (1, 8)),
        IsolationPlan(window=5.0 if options.quick else 10.0, num_runs=num_runs),
    ]


def bench_compare(options: CompareBenchOptions, console: Console) -> Report:
    """Measure all systems and return the report, which has failed if one of ours failed. Raises ConfigError."""
    check_backend(options.transfer_backend, "--transfer-backend")
    names, plan = options.system or SYSTEMS, compare_plan(options)
    scripts = find_scripts(options.peers) if set(names) & set(PEERS) else Path()
    folder = float_model(resolve_model(options.model))
    encode = encoder_of(folder)
    figures = []
    for name in names:
        if name in PEERS:
            server = peer_server(PEERS[name], scripts, options.model, folder, options.dtype, num_cores())
        else:
            server = _server_of(name, options, plan, options.transfer_backend)
        figures.append(measure_server(server, plan, encode, options.timeout, console))
    return compare_report(options, plan, figures)


def compare_report(options: CompareBenchOptions, plan: Sequence[Scenario], servers: Sequence[ServerFigures]) -> Report:
    """Return the report. JSON has one object per server, with times in seconds and throughput in tokens/s."""
    return Report(
        title=f"{options.model} in {options.dtype}, one server after the other",
        figures=[
            {
                "system": server.name,
                "threads": server.threads,
                "skipped": server.skipped,
                "cores_taken_by_others": server.cores_taken_by_others,
                "scenarios": {
                    name: {"failed": outcome} if isinstance(outcome, str) else outcome
                    for name, outcome in server.outcomes.items()
                },
            }
            for server in servers
        ],
        tables=[_table(plan, _COMPARE_ROWS, servers)],
        legend=_COMPARE_LEGEND.format(plan=next(s for s in plan if isinstance(s, IsolationPlan))),
        remarks=[problem for server in servers for problem in server.problems()],
        failed=any(server.problems() for server in servers if server.name in MODES),
    )


def _times(*keys: str) -> Callable[[Figures], str]:
    return lambda figures: " / ".join(milliseconds(figures[key]) for key in keys)


def _ttft(f: Figures) -> str:
    return f"{milliseconds(f['ttft_median'])} ({milliseconds(f['ttft_min'])}-{milliseconds(f['ttft_max'])})"


def _answered(f: Figures) -> str:
    return f"{milliseconds(f['ttft_p50'])} ({f['num_answered']:g} of {f['num_sent']:g})"


def _value(key: str, form: str) -> Callable[[Figures], str]:
    return lambda figures: format(figures[key], form)


_MAIN_ROWS: list[ScenarioRow] = [
    ("output tokens/s", "num_streams", _value("output_tokens_per_second", ".1f")),
    ("ITL, ms", "num_streams", _times("itl_mean", "itl_p50", "itl_p99")),
    ("TPOT, ms", "num_streams", _times("tpot_median")),
    ("TTFT, ms", "ttft_median", _ttft),
]
_COMPARE_ROWS: list[ScenarioRow] = [
    ("output tok/s", "num_streams", _value("output_tokens_per_second", ",.1f")),
    ("ITL p50 / p99, ms", "num_streams", _times("itl_p50", "itl_p99")),
    ("prompt tok/s", "num_prompts", _value("prompt_tokens_per_second", ",.0f")),
    ("ITL p50 / p99 alone, ms", "num_sent", _times("quiet_itl_p50", "quiet_itl_p99")),
    ("ITL p50 / p99 beside prompts, ms", "num_sent", _times("loaded_itl_p50", "loaded_itl_p99")),
    ("p99 beside / alone", "num_sent", lambda f: f"{f['loaded_itl_p99'] / f['quiet_itl_p99']:.2f}"),
    ("output tok/s alone", "num_sent", _value("quiet_output_tokens_per_second", ",.1f")),
    ("output tok/s beside prompts", "num_sent", _value("loaded_output_tokens_per_second", ",.1f")),
    ("TTFT of prompts, ms (answered)", "num_sent", _answered),
    ("prompt tok/s", "num_sent", _value("prompt_tokens_per_second", ",.0f")),
]
