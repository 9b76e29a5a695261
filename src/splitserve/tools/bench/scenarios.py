"""Scenarios that run on one server after the other, their figures, and the table of them.

1. Each server starts on all cores of this machine and warms up. Our disaggregated workers have half of the cores each.
   Our KV pools are filled first: the system provides their memory on first use, and vLLM uses all of its own at start.
2. Every scenario runs several times, with equal prompts for all servers. Figures are medians. If a scenario fails or
   takes too long, the report has the error in its place.
3. The server stops, and the next one starts. If one cannot be installed or does not run here, it is skipped and the
   report has the reason.

Isolation, the effect of other clients' long prompts on running streams, is a scenario:

1. A few streams start and decode. When each has its first token, the quiet window begins.
2. After it the loaded window begins. A long prompt is sent at once and then at even intervals, whether answered or not.
   It lasts until every long prompt is answered, so the TTFTs of different servers are those of equal prompts.
3. Then the measurement waits for each stream's next token, so that a current stall counts, and cancels all requests.
A gap that overlaps the loaded window counts for it. A gap entirely within the quiet window counts for that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console

from splitserve.core.errors import ClusterError
from splitserve.tools.bench.load import Endpoint, running_load
from splitserve.tools.bench.options import ModelBenchOptions
from splitserve.tools.bench.report import ABSENT, Cells, OthersWatch, ReportTable, text_of
from splitserve.tools.bench.stats import Figures, StreamRecord, median, percentile, together_remarks
from splitserve.tools.bench.systems import PeerUnavailableError, Server, fill_pools, our_server
from splitserve.tools.bench.workload import WARM_UP_OUTPUT_TOKENS, Encode, LoadRequest, PromptMaker
from splitserve.tools.client import RequestFailedError

if TYPE_CHECKING:
    from splitserve.tools.bench.machine_limits import MachineLimits

# Seconds between two checks of the streams.
_POLL_INTERVAL = 0.01


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Number of prompts, each answered to its end."""

    name: str
    num_prompts: int
    input_tokens: int
    output_tokens: int
    num_runs: int
    # Returns the figures of all runs.
    figures: Callable[[Sequence[list[StreamRecord]]], Figures]
    # Prompts sent at once. None: all.
    concurrency: int | None = None

    @property
    def pool_tokens(self) -> int:
        # Decode keeps a reserve for each running request.
        return 4 * (self.concurrency or self.num_prompts) * (self.input_tokens + self.output_tokens)

    def run(self, endpoint: Endpoint, prompts: PromptMaker, timeout: float) -> list[StreamRecord]:
        made = [prompts.make(self.input_tokens) for _ in range(self.num_prompts)]
        at_once = self.concurrency or self.num_prompts
        return endpoint.ask(made, self.output_tokens, timeout=timeout, concurrency=at_once)


@dataclass(frozen=True, slots=True)
class IsolationPlan:
    name: ClassVar[str] = "isolation"
    num_runs: int = 1
    num_streams: int = 4
    stream_prompt_tokens: int = 128
    # More than a stream produces, so that it does not end by itself.
    stream_output_tokens: int = 6000
    # Seconds of the window without long prompts; the other one lasts until all are answered, and at least as long.
    window: float = 8.0
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

    def run(self, endpoint: Endpoint, prompts: PromptMaker, timeout: float) -> Figures:
        # Wait until the server has finished the work that the last run left.
        endpoint.ask([prompts.make(16)], 1, timeout=timeout)
        return asyncio.run(measure_isolation(endpoint, self, prompts, timeout))

    def figures(self, runs: Sequence[Figures]) -> Figures:
        """Return the medians of all runs."""
        return {name: median([run[name] for run in runs]) for name in runs[0]}


async def measure_isolation(endpoint: Endpoint, plan: IsolationPlan, prompts: PromptMaker, timeout: float) -> Figures:
    """Run the measurement once. `timeout`: seconds for a wait for a token. Raises RequestFailedError."""
    # Create the prompts before the streams start, because that takes time.
    long_prompts = [
        LoadRequest(prompts.make(plan.long_prompt_tokens), 1, number * plan.interval)
        for number in range(plan.num_long_prompts)
    ]
    requests = [
        LoadRequest(prompts.make(plan.stream_prompt_tokens), plan.stream_output_tokens) for _ in range(plan.num_streams)
    ]
    answer_timeout = 2 * plan.window + timeout * (1 + plan.num_long_prompts)
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

            def has_answered(number: int) -> bool:
                return len(long_load.records) >= number or long_load.num_failed > 0

            for number in range(1, len(long_prompts) + 1):
                await until(partial(has_answered, number))
            loaded_to = time.perf_counter()
            # A prompt that failed was no load for the streams.
            answered = long_load.complete()
            await until(lambda: all(s.arrived_at[-1] > loaded_to for s in streams))
            return figures_of(streams, answered, plan, began, loaded_from, loaded_to)


def figures_of(
    streams: Sequence[StreamRecord],
    long_prompts: Sequence[StreamRecord],
    plan: IsolationPlan,
    began: float,
    loaded_from: float,
    loaded_to: float,
) -> Figures:
    """Return the figures of both windows: quiet [began, loaded_from), loaded [loaded_from, loaded_to).

    Raises RequestFailedError.
    """
    gaps = [pair for s in streams for pair in pairwise(s.arrived_at)]
    quiet = [b - a for a, b in gaps if began <= a and b < loaded_from]
    loaded = [b - a for a, b in gaps if a < loaded_to and b >= loaded_from]
    if not quiet or not loaded:
        raise RequestFailedError(
            f"too few tokens in windows of {plan.window:g} s to speak of gaps: the server is too slow"
        )
    return {
        "quiet_itl_p50": percentile(quiet, 50),
        "quiet_itl_p99": percentile(quiet, 99),
        "loaded_itl_p50": percentile(loaded, 50),
        "loaded_itl_p99": percentile(loaded, 99),
        "quiet_output_tokens_per_second": _rate(streams, began, loaded_from),
        "loaded_output_tokens_per_second": _rate(streams, loaded_from, loaded_to),
        "ttft_p50": median([s.ttft for s in long_prompts]),
        "num_long_prompts": len(long_prompts),
        "prompt_tokens_per_second": len(long_prompts) * plan.long_prompt_tokens / (loaded_to - loaded_from),
    }


def _rate(streams: Sequence[StreamRecord], start: float, end: float) -> float:
    arrivals = (pair for s in streams for pair in zip(s.arrived_at, s.arrived, strict=True))
    return sum(count for at, count in arrivals if start <= at < end) / (end - start)


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
    # Limits of this machine, for the figures that are shares of them. None: not measured.
    limits: MachineLimits | None = None

    def problems(self) -> list[str]:
        """Return why the server or its scenarios have no figures."""
        if self.skipped is not None:
            return [f"{self.name} skipped: {self.skipped}"]
        return [f"{self.name}, {name}: {o}" for name, o in self.outcomes.items() if isinstance(o, str)]

    def remarks(self) -> list[str]:
        """Return the problems, and which scenarios have a misleading ITL."""
        found = {name: o for name, o in self.outcomes.items() if isinstance(o, dict)}
        shares = {f"{self.name}, {name}": figures.get("tokens_together") for name, figures in found.items()}
        return [*self.problems(), *together_remarks(shares)]

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
                running.endpoint.ask([warm_up.make(batch.input_tokens)], tokens, timeout=timeout)
            fill_pools(running, warm_up.make, timeout)
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


def server_of(
    name: str,
    options: ModelBenchOptions,
    scenarios: Sequence[Scenario],
    backend: str = "tcp",
    pair_args: Sequence[str] = (),
) -> Server:
    """Return a server of ours on all cores. `pair_args`: options of `splitserve serve` for the workers of a pair."""
    is_pair, pool_tokens = name == "disaggregated", max(scenario.pool_tokens for scenario in scenarios)
    worker_args = pair_args if is_pair else ()
    return our_server(name, options, None, pool_tokens, is_pair=is_pair, backend=backend, worker_args=worker_args)


# Name of a figure, the key of the figures that have it, and its text as in `Cells`.
ScenarioRow = tuple[str, str, Callable[[Figures], str] | str]


def scenario_table(
    scenarios: Sequence[Scenario],
    rows: Sequence[ScenarioRow],
    servers: Sequence[ServerFigures],
    last_rows: Cells[ServerFigures] = (),
) -> ReportTable:
    """Return a table with one column per server. A cell is ABSENT if the scenario has no such figure, or failed."""

    def cell(scenario: str, key: str, show: Callable[[Figures], str] | str, server: ServerFigures) -> str:
        outcome = server.outcomes.get(scenario)
        return text_of(show, outcome) if isinstance(outcome, dict) and key in outcome else ABSENT

    figures: list[tuple[str, Callable[[ServerFigures], str] | str]] = [
        *((f"{s.name}: {row}", partial(cell, s.name, key, show)) for s in scenarios for row, key, show in rows),
        ("CPU threads", "{threads}"),
        ("cores taken by others", "{cores_taken_by_others:.1f}"),
        *last_rows,
    ]
    return ReportTable.by_column([server.name for server in servers], figures, servers)
