"""Scenarios that `bench main` and `bench compare` run on one system after the other. All systems get equal prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console

from splitserve.core.errors import ClusterError
from splitserve.core.machine import num_cores
from splitserve.tools.bench.load import Endpoint
from splitserve.tools.bench.options import ModelBenchOptions
from splitserve.tools.bench.peers import PeerUnavailableError
from splitserve.tools.bench.report import ABSENT, OthersWatch
from splitserve.tools.bench.stats import StreamRecord
from splitserve.tools.bench.systems import ServedSystem, Server
from splitserve.tools.bench.workload import WARM_UP_OUTPUT_TOKENS, Encode, PromptMaker
from splitserve.tools.client import RequestFailedError


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


def our_system(
    name: str, options: ModelBenchOptions, scenarios: Sequence[Scenario], backend: str = "tcp"
) -> ServedSystem:
    """Return a system of ours on all cores. Two workers have half of them each."""
    is_pair, pool_tokens = name == "disaggregated", max(scenario.pool_tokens for scenario in scenarios)
    threads = max(1, num_cores() // 2) if is_pair else num_cores()
    return ServedSystem(name, options.model, options.dtype, threads, pool_tokens, is_pair, backend)


# Name of a figure, the class of the figures that have it, and its text.
ScenarioRow = tuple[str, type, Callable[[Any], str]]


def scenario_rows(
    scenarios: Sequence[Scenario], rows: Sequence[ScenarioRow]
) -> list[tuple[str, Callable[[ServerFigures], str]]]:
    """Return the rows of a table with one column per server."""
    return [
        *((f"{s.name}: {row}", _cell(s.name, kind, show)) for s in scenarios for row, kind, show in rows),
        ("CPU threads", lambda server: server.threads),
        ("cores taken by others", lambda server: f"{server.cores_taken_by_others:.1f}"),
    ]


def _cell(scenario: str, kind: type, show: Callable[[Any], str]) -> Callable[[ServerFigures], str]:
    """Return the text of a figure of one scenario. ABSENT if the scenario has none of this kind, or failed."""

    def cell(server: ServerFigures) -> str:
        outcome = server.outcomes.get(scenario)
        return show(outcome) if isinstance(outcome, kind) else ABSENT

    return cell
