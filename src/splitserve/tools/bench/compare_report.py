"""Figures of `bench compare` as JSON, a table and Markdown. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from splitserve.tools.bench.compare_plan import ComparePlan, Outcome, PrefillFigures
from splitserve.tools.bench.isolation import IsolationFigures
from splitserve.tools.bench.markdown import listed, table_of
from splitserve.tools.bench.stats import StreamsFigures

_LEGEND = (
    "Medians of the runs. Decode and prefill: all prompts sent at once, tokens over the time from the first request to "
    "the last token. Isolation: {streams} streams decode for {window:g} s, then for {window:g} s more while a prompt "
    "of {tokens:,} tokens arrives each {interval:g} s, whether the one before is answered or not; in brackets how many "
    "were answered in that time; TTFT is of those answered at the cut, at least one. ITL: gaps between frames with "
    "tokens at the client."
)


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


@dataclass(frozen=True, slots=True)
class CompareReport:
    model: str
    dtype: str
    # Command line that repeats this benchmark.
    command: str
    machine: Mapping[str, str]
    plan: ComparePlan
    # Servers in the order of measurement.
    servers: Sequence[ServerFigures]

    def to_json(self) -> list[dict[str, Any]]:
        """Return one object per server. Times are in seconds, throughput in tokens/s."""
        return [
            {
                "system": server.name,
                "threads": server.threads,
                "skipped": server.skipped,
                "cores_taken_by_others": server.cores_taken_by_others,
                "scenarios": {
                    name: {"failed": outcome} if isinstance(outcome, str) else asdict(outcome)
                    for name, outcome in zip(self.plan.names, server.outcomes, strict=False)
                },
            }
            for server in self.servers
        ]

    def rows(self) -> list[list[str]]:
        """Return one row per figure: its name, then its value for each server."""
        rows = []
        for index, scenario in enumerate(self.plan.names):
            for row, kind, show in _ROWS:
                cells = [_cell(server, index, kind, show) for server in self.servers]
                if any(cell is not None for cell in cells):
                    rows.append([f"{scenario}: {row}", *(cell or "-" for cell in cells)])
        rows.append(["CPU threads", *(server.threads for server in self.servers)])
        rows.append(["cores taken by others", *(f"{server.cores_taken_by_others:.1f}" for server in self.servers)])
        return rows

    def problems(self) -> list[str]:
        """Return a line for each server or scenario that was skipped or failed."""
        lines = []
        for server in self.servers:
            if server.skipped is not None:
                lines.append(f"{server.name} skipped: {server.skipped}")
            for name, outcome in zip(self.plan.names, server.outcomes, strict=False):
                if isinstance(outcome, str):
                    lines.append(f"{server.name}, {name}: {outcome}")
        return lines

    def table(self) -> Table:
        caption = "\n".join([self._legend(), *self.problems()])
        table = Table("", *(server.name for server in self.servers), title=self._title(), caption=caption)
        for row in self.rows():
            table.add_row(*row)
        return table

    def markdown(self, date: datetime.date) -> str:
        """Return a section to append to a log."""
        header = ["", *(server.name for server in self.servers)]
        problems = "".join(f"\n- {problem}" for problem in self.problems())
        machine = listed(self.machine)
        return (
            f"\n## {date.isoformat()} · {self._title()}\n\n`{self.command}`\n\n{machine}.\n\n{self._legend()}\n\n"
            + table_of(header, self.rows())
            + problems
            + ("\n" if problems else "")
        )

    def _title(self) -> str:
        return f"{self.model} in {self.dtype}, one server after the other"

    def _legend(self) -> str:
        plan = self.plan.isolation
        return _LEGEND.format(
            streams=plan.num_streams, window=plan.window, tokens=plan.long_prompt_tokens, interval=plan.interval
        )


def _cell(server: ServerFigures, index: int, kind: type[Outcome], show: Callable[[Any], str]) -> str | None:
    """Return the value as text. None: the scenario has no such row."""
    if server.skipped is not None:
        return None
    outcome = server.outcomes[index]
    if isinstance(outcome, str):
        return None
    return show(outcome) if isinstance(outcome, kind) else None


def _ttft(f: IsolationFigures) -> str:
    return f"{_ms(f.ttft_p50)} ({f.num_answered:g} of {f.num_sent:g})"


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


# (row, type of the figures that have it, conversion to text)
_ROWS: list[tuple[str, type[Outcome], Callable[[Any], str]]] = [
    ("output tok/s", StreamsFigures, lambda f: f"{f.output_tokens_per_second:,.1f}"),
    ("ITL p50 / p99, ms", StreamsFigures, lambda f: f"{_ms(f.itl_p50)} / {_ms(f.itl_p99)}"),
    ("prompt tok/s", PrefillFigures, lambda f: f"{f.prompt_tokens_per_second:,.0f}"),
    ("ITL p50 / p99 alone, ms", IsolationFigures, lambda f: f"{_ms(f.quiet_itl_p50)} / {_ms(f.quiet_itl_p99)}"),
    (
        "ITL p50 / p99 beside prompts, ms",
        IsolationFigures,
        lambda f: f"{_ms(f.loaded_itl_p50)} / {_ms(f.loaded_itl_p99)}",
    ),
    ("p99 beside / alone", IsolationFigures, lambda f: f"{f.loaded_itl_p99 / f.quiet_itl_p99:.2f}"),
    ("output tok/s alone", IsolationFigures, lambda f: f"{f.quiet_output_tokens_per_second:,.1f}"),
    ("output tok/s beside prompts", IsolationFigures, lambda f: f"{f.loaded_output_tokens_per_second:,.1f}"),
    ("TTFT of prompts, ms (answered)", IsolationFigures, _ttft),
    ("prompt tok/s", IsolationFigures, lambda f: f"{f.prompt_tokens_per_second:,.0f}"),
]
