"""`splitserve bench compare`: the same load on our servers and on other engines', one after the other, in one run.

1. Each server starts on all cores of this machine and warms up. Our disaggregated workers have half of the cores each.
2. Every scenario runs several times. Figures are medians. If a scenario fails or takes too long, the report has the
   error in its place.
3. The server stops, and the next one starts. If one cannot be installed or does not run here, it is skipped and the
   report has the reason.

The scenario isolation measures the effect of other clients' long prompts on running streams:
1. A few streams start and decode. When each has its first token, the quiet window begins.
2. After it the loaded window begins. A long prompt is sent at once and then at even intervals, whether answered or not.
3. At its end the measurement waits for each stream's next token, so that a current stall counts. It also waits for the
   first answer to a long prompt, so that there is a TTFT. Then all requests are cancelled.
A gap that overlaps the loaded window counts for it. A gap entirely within the quiet window counts for that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from rich.console import Console

from splitserve.core.machine import num_cores
from splitserve.engine.sources import resolve_model
from splitserve.tools.bench.load import Endpoint, running_load
from splitserve.tools.bench.peers import PEERS, find_scripts, peer_server
from splitserve.tools.bench.report import Report, ReportTable, milliseconds
from splitserve.tools.bench.scenarios import (
    PromptBatch,
    Scenario,
    ScenarioRow,
    ServerFigures,
    measure_server,
    scenario_rows,
    server_of,
)
from splitserve.tools.bench.stats import PrefillFigures, StreamRecord, StreamsFigures, median, percentile
from splitserve.tools.bench.systems import encoder_of
from splitserve.tools.bench.workload import LoadRequest, PromptMaker
from splitserve.tools.client import RequestFailedError
from splitserve.tools.options import MODES, SYSTEMS, CompareBenchOptions
from splitserve.worker.checks import check_backend

# Seconds between two checks of the streams.
_POLL_INTERVAL = 0.01
_LEGEND = (
    "Medians of the runs. Decode and prefill: all prompts sent at once, tokens over the time from the first request to "
    "the last token. Isolation: {streams} streams decode for {window:g} s, then for {window:g} s more while a prompt "
    "of {tokens:,} tokens arrives each {interval:g} s, whether the one before is answered or not; in brackets how many "
    "were answered in that time; TTFT is of those answered at the cut, at least one. ITL: gaps between frames with "
    "tokens at the client."
)


@dataclass(frozen=True, slots=True)
class IsolationPlan:
    name: ClassVar[str] = "isolation"
    num_runs: int = 1
    num_streams: int = 4
    stream_prompt_tokens: int = 128
    # More than a stream produces, so that it does not end by itself.
    stream_output_tokens: int = 4096
    # Seconds of each window.
    window: float = 10.0
    long_prompt_tokens: int = 2048
    # Seconds between two long prompts.
    interval: float = 1.0

    @property
    def num_long_prompts(self) -> int:
        return max(1, int(self.window / self.interval))

    @property
    def pool_tokens(self) -> int:
        streams = self.num_streams * (self.stream_prompt_tokens + self.stream_output_tokens)
        return streams + 2 * self.num_long_prompts * self.long_prompt_tokens

    def run(self, endpoint: Endpoint, prompts: PromptMaker, timeout: float) -> IsolationFigures:
        # Wait until the server has finished the work that the last run left.
        endpoint.ask([prompts.make(16)], 1, timeout)
        return asyncio.run(measure_isolation(endpoint, self, prompts, timeout))

    def figures(self, runs: Sequence[IsolationFigures]) -> IsolationFigures:
        """Return the medians of all runs."""
        names = IsolationFigures.__dataclass_fields__
        return IsolationFigures(**{name: median([getattr(run, name) for run in runs]) for name in names})


@dataclass(frozen=True, slots=True)
class IsolationFigures:
    """Figures of one run, or medians over several, in seconds and tokens per second."""

    quiet_itl_p50: float
    quiet_itl_p99: float
    loaded_itl_p50: float
    loaded_itl_p99: float
    quiet_output_tokens_per_second: float
    loaded_output_tokens_per_second: float
    # TTFT of the long prompts that were answered before the end.
    ttft_p50: float
    num_sent: float
    # Number of long prompts answered within the window.
    num_answered: float
    prompt_tokens_per_second: float


async def measure_isolation(
    endpoint: Endpoint, plan: IsolationPlan, prompts: PromptMaker, timeout: float
) -> IsolationFigures:
    """Run the measurement once. `timeout`: seconds for a wait for the streams' tokens. Raises RequestFailedError."""
    # Create the prompts before the streams start, because that takes time.
    long_prompts = [
        LoadRequest(prompts.make(plan.long_prompt_tokens), 1, number * plan.interval)
        for number in range(plan.num_long_prompts)
    ]
    requests = [
        LoadRequest(prompts.make(plan.stream_prompt_tokens), plan.stream_output_tokens) for _ in range(plan.num_streams)
    ]
    answer_timeout = timeout + 2 * plan.window
    async with running_load(endpoint, requests, concurrency=plan.num_streams, timeout=answer_timeout) as load:

        async def until(is_true: Callable[[], bool]) -> None:
            deadline = time.perf_counter() + timeout
            while not is_true():
                if load.complete():
                    raise RequestFailedError(f"{endpoint.url}: a stream ended by itself: give the streams more tokens")
                if time.perf_counter() > deadline:
                    raise RequestFailedError(
                        f"{endpoint.url}: streams or long prompts brought no token for {timeout:g} s"
                    )
                await asyncio.sleep(_POLL_INTERVAL)

        streams = load.streams
        await until(lambda: len(streams) == plan.num_streams and all(s.arrived_at for s in streams))
        began = time.perf_counter()
        await asyncio.sleep(plan.window)
        loaded_from = time.perf_counter()
        async with running_load(endpoint, long_prompts, timeout=answer_timeout) as long_load:
            await asyncio.sleep(loaded_from + plan.window - time.perf_counter())
            loaded_to = time.perf_counter()
            await until(lambda: all(s.arrived_at[-1] > loaded_to for s in streams))
            await until(lambda: any(s.arrived_at for s in long_load.streams))
            return figures_of(streams, long_load.streams, plan, began, loaded_from, loaded_to)


def figures_of(
    streams: Sequence[StreamRecord],
    long_prompts: Sequence[StreamRecord],
    plan: IsolationPlan,
    began: float,
    loaded_from: float,
    loaded_to: float,
) -> IsolationFigures:
    """Return the figures of both windows: quiet [began, loaded_from), loaded [loaded_from, loaded_to).

    Raises RequestFailedError.
    """
    gaps = [(a, b) for s in streams for a, b in zip(s.arrived_at, s.arrived_at[1:], strict=False)]
    quiet = [b - a for a, b in gaps if began <= a and b < loaded_from]
    loaded = [b - a for a, b in gaps if a < loaded_to and b >= loaded_from]
    answered = [s for s in long_prompts if s.arrived_at]
    if not quiet or not loaded or not answered:
        raise RequestFailedError(
            f"too few tokens in windows of {plan.window:g} s to speak of gaps: the server is too slow"
        )
    num_in_time = sum(s.arrived_at[0] < loaded_to for s in answered)
    return IsolationFigures(
        quiet_itl_p50=percentile(quiet, 50),
        quiet_itl_p99=percentile(quiet, 99),
        loaded_itl_p50=percentile(loaded, 50),
        loaded_itl_p99=percentile(loaded, 99),
        quiet_output_tokens_per_second=_tokens(streams, began, loaded_from) / (loaded_from - began),
        loaded_output_tokens_per_second=_tokens(streams, loaded_from, loaded_to) / (loaded_to - loaded_from),
        ttft_p50=median([s.arrived_at[0] - s.sent_at for s in answered]),
        num_sent=len(long_prompts),
        num_answered=num_in_time,
        prompt_tokens_per_second=num_in_time * plan.long_prompt_tokens / (loaded_to - loaded_from),
    )


def _tokens(streams: Sequence[StreamRecord], start: float, end: float) -> int:
    return sum(n for s in streams for at, n in zip(s.arrived_at, s.arrived, strict=True) if start <= at < end)


def batch_of(num_prompts: int, input_tokens: int, output_tokens: int, num_runs: int) -> PromptBatch:
    """Return a scenario of prefill if there is one output token, else one of decode."""
    if output_tokens == 1:
        name = f"prefill {num_prompts} x {input_tokens:,}"
        return PromptBatch(name, num_prompts, input_tokens, 1, num_runs, PrefillFigures.of)
    name = f"decode, {num_prompts} stream{'s' if num_prompts > 1 else ''}"
    return PromptBatch(name, num_prompts, input_tokens, output_tokens, num_runs, StreamsFigures.of)


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
    folder = resolve_model(options.model)
    encode = encoder_of(folder)
    figures = []
    for name in names:
        if name in PEERS:
            server = peer_server(PEERS[name], scripts, options.model, folder, options.dtype, num_cores())
        else:
            server = server_of(name, options, plan, options.transfer_backend)
        figures.append(measure_server(server, plan, encode, options.timeout, console))
    return compare_report(options, plan, figures)


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
