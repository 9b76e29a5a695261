"""`splitserve bench compare`: the same load on our servers and on other engines', one after the other, in one run.

1. Each server starts on all cores of this machine and warms up. Our disaggregated workers have half of the cores each.
2. Every scenario runs several times. Figures are medians. If a scenario fails or takes too long, the report has the
   error in its place.
3. The server stops, and the next one starts. If one cannot be installed or does not run here, it is skipped and the
   report has the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from splitserve.core.machine import num_cores
from splitserve.engine.sources import resolve_model
from splitserve.tools.bench.isolation import IsolationFigures, IsolationPlan
from splitserve.tools.bench.options import MODES, SYSTEMS, CompareBenchOptions
from splitserve.tools.bench.peers import PEERS, PeerServer, find_scripts
from splitserve.tools.bench.report import Report, ReportTable, milliseconds, run_bench
from splitserve.tools.bench.scenarios import (
    PromptBatch,
    Scenario,
    ScenarioRow,
    ServerFigures,
    measure_server,
    our_system,
    scenario_rows,
)
from splitserve.tools.bench.stats import PrefillFigures, StreamsFigures
from splitserve.tools.bench.systems import Server, encoder_of
from splitserve.worker.checks import check_backend

_LEGEND = (
    "Medians of the runs. Decode and prefill: all prompts sent at once, tokens over the time from the first request to "
    "the last token. Isolation: {streams} streams decode for {window:g} s, then for {window:g} s more while a prompt "
    "of {tokens:,} tokens arrives each {interval:g} s, whether the one before is answered or not; in brackets how many "
    "were answered in that time; TTFT is of those answered at the cut, at least one. ITL: gaps between frames with "
    "tokens at the client."
)


def decode_batch(num_prompts: int, input_tokens: int, output_tokens: int, num_runs: int) -> PromptBatch:
    name = f"decode, {num_prompts} stream{'s' if num_prompts > 1 else ''}"
    return PromptBatch(name, num_prompts, input_tokens, output_tokens, num_runs, StreamsFigures.of)


def prefill_batch(num_prompts: int, input_tokens: int, num_runs: int) -> PromptBatch:
    name = f"prefill {num_prompts} x {input_tokens:,}"
    return PromptBatch(name, num_prompts, input_tokens, 1, num_runs, PrefillFigures.of)


def compare_plan(options: CompareBenchOptions) -> list[Scenario]:
    """Return the scenarios, isolation last."""
    num_runs = options.runs or (1 if options.quick else 3)
    return [
        *(decode_batch(n, 128, 32 if options.quick else 128, num_runs) for n in (1, 8, 32)),
        *(prefill_batch(n, 1024, num_runs) for n in (1, 8)),
        IsolationPlan(window=5.0 if options.quick else 10.0, num_runs=num_runs),
    ]


def run_compare(options: CompareBenchOptions) -> int:
    """Run the benchmark and return the exit code: 1 if one of our servers failed. Raises ConfigError."""

    def measure(console: Console) -> Report:
        check_backend(options.transfer_backend, "--transfer-backend")
        names, plan = options.system or SYSTEMS, compare_plan(options)
        scripts = find_scripts(options.peers) if set(names) & set(PEERS) else Path()
        folder = resolve_model(options.model)
        encode = encoder_of(folder)
        figures = []
        for name in names:
            server: Server
            if name in PEERS:
                server = PeerServer(PEERS[name], scripts, options.model, folder, options.dtype, num_cores())
            else:
                server = our_system(name, options, plan, options.transfer_backend)
            figures.append(measure_server(server, plan, encode, options.timeout, console))
        return compare_report(options, plan, figures)

    return run_bench(options, measure)


def compare_report(options: CompareBenchOptions, plan: Sequence[Scenario], servers: Sequence[ServerFigures]) -> Report:
    """Return the report. JSON has one object per server, with times in seconds and throughput in tokens/s."""
    isolation = next(scenario for scenario in plan if isinstance(scenario, IsolationPlan))
    return Report(
        title=f"{options.model} in {options.dtype}, one server after the other",
        figures=[
            {
                "system": server.name,
                "threads": server.threads,
                "skipped": server.skipped,
                "cores_taken_by_others": server.cores_taken_by_others,
                "scenarios": {
                    name: {"failed": outcome} if isinstance(outcome, str) else asdict(outcome)
                    for name, outcome in server.outcomes.items()
                },
            }
            for server in servers
        ],
        tables=[ReportTable.by_column([server.name for server in servers], scenario_rows(plan, _ROWS), servers)],
        legend=_LEGEND.format(
            streams=isolation.num_streams,
            window=isolation.window,
            tokens=isolation.long_prompt_tokens,
            interval=isolation.interval,
        ),
        remarks=[problem for server in servers for problem in server.problems()],
        failed=any(server.problems() for server in servers if server.name in MODES),
    )


def _both(p50: float, p99: float) -> str:
    return f"{milliseconds(p50)} / {milliseconds(p99)}"


_ROWS: list[ScenarioRow] = [
    ("output tok/s", StreamsFigures, lambda f: f"{f.output_tokens_per_second:,.1f}"),
    ("ITL p50 / p99, ms", StreamsFigures, lambda f: _both(f.itl_p50, f.itl_p99)),
    ("prompt tok/s", PrefillFigures, lambda f: f"{f.prompt_tokens_per_second:,.0f}"),
    ("ITL p50 / p99 alone, ms", IsolationFigures, lambda f: _both(f.quiet_itl_p50, f.quiet_itl_p99)),
    ("ITL p50 / p99 beside prompts, ms", IsolationFigures, lambda f: _both(f.loaded_itl_p50, f.loaded_itl_p99)),
    ("p99 beside / alone", IsolationFigures, lambda f: f"{f.loaded_itl_p99 / f.quiet_itl_p99:.2f}"),
    ("output tok/s alone", IsolationFigures, lambda f: f"{f.quiet_output_tokens_per_second:,.1f}"),
    ("output tok/s beside prompts", IsolationFigures, lambda f: f"{f.loaded_output_tokens_per_second:,.1f}"),
    (
        "TTFT of prompts, ms (answered)",
        IsolationFigures,
        lambda f: f"{milliseconds(f.ttft_p50)} ({f.num_answered:g} of {f.num_sent:g})",
    ),
    ("prompt tok/s", IsolationFigures, lambda f: f"{f.prompt_tokens_per_second:,.0f}"),
]
