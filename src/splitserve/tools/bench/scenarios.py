"""Scenarios that run on one server after the other, their figures, and the table of them.

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
from typing import Any, TypeVar

from rich.console import Console

from splitserve.core.errors import ClusterError
from splitserve.core.machine import num_cores
from splitserve.tools.bench.isolation import IsolationPlan
from splitserve.tools.bench.load import Endpoint
from splitserve.tools.bench.options import ModelBenchOptions
from splitserve.tools.bench.report import ABSENT, Cells, OthersWatch, ReportTable, text_of
from splitserve.tools.bench.stats import Figures, StreamRecord
from splitserve.tools.bench.systems import PeerUnavailableError, Server, our_server
from splitserve.tools.bench.workload import WARM_UP_OUTPUT_TOKENS, Encode, PromptMaker
from splitserve.tools.client import RequestFailedError


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


def server_of(name: str, options: ModelBenchOptions, scenarios: Sequence[Scenario], backend: str = "tcp") -> Server:
    """Return a server of ours on all cores. Two workers have half of them each."""
    is_pair, pool_tokens = name == "disaggregated", max(scenario.pool_tokens for scenario in scenarios)
    threads = max(1, num_cores() // 2) if is_pair else num_cores()
    return our_server(name, options.model, options.dtype, threads, pool_tokens, is_pair=is_pair, backend=backend)


# Name of a figure, the key of the figures that have it, and its text as in `Cells`.
ScenarioRow = tuple[str, str, Callable[[Figures], str] | str]
Compared = TypeVar("Compared", bound=ServerFigures)


def scenario_table(
    scenarios: Sequence[Scenario],
    rows: Sequence[ScenarioRow],
    servers: Sequence[Compared],
    last_rows: Cells[Compared] = (),
) -> ReportTable:
    """Return a table with one column per server. A cell is ABSENT if the scenario has no such figure, or failed."""

    def cell(scenario: str, key: str, show: Callable[[Figures], str] | str, server: Compared) -> str:
        outcome = server.outcomes.get(scenario)
        return text_of(show, outcome) if isinstance(outcome, dict) and key in outcome else ABSENT

    figures: list[tuple[str, Callable[[Compared], str] | str]] = [
        *((f"{s.name}: {row}", partial(cell, s.name, key, show)) for s in scenarios for row, key, show in rows),
        ("CPU threads", "{threads}"),
        ("cores taken by others", "{cores_taken_by_others:.1f}"),
        *last_rows,
    ]
    return ReportTable.by_column([server.name for server in servers], figures, servers)
