"""Figures of `bench router` as a table, Markdown and JSON."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from splitserve.tools.bench.markdown import listed, table_of
from splitserve.tools.bench.router_figures import RouterFigures

LEGEND = (
    "Times in ms. Added latency: one connection, minus direct. Chunks: events of streams, of which no two travel "
    "together. CPU: of the router's process. Medians of the rounds, in which all take turns. direct: the mock worker "
    "without a router."
)
_HEADER = ("", "requests/s", "added p50", "added p99", "CPU a request", "chunks/s", "CPU a chunk")


@dataclass(frozen=True, slots=True)
class RouterReport:
    command: str
    machine: dict[str, str]
    connections: int
    num_rounds: int
    # Packages of the peers' interpreter -> version.
    peer_versions: Mapping[str, str]
    # Direct first, then our router, then others.
    figures: Sequence[RouterFigures]
    # Router -> why it was not measured.
    skipped: Mapping[str, str]
    # Wrong answers of all routers. Empty: every answer was as the worker sent it.
    wrong: Sequence[str]
    cores_taken_by_others: float

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values. Times are in seconds."""
        return asdict(self)

    def table(self) -> Table:
        remarks = "\n".join([*self._remarks(), LEGEND])
        table = Table(title=f"routers, {self.connections} connections", caption=remarks)
        for name in _HEADER:
            table.add_column(name, no_wrap=not name)
        for figures in self.figures:
            table.add_row(*_row(figures))
        return table

    def markdown(self, date: datetime.date) -> str:
        """Return a section to append to a log."""
        remarks = "".join(f"- {remark}\n" for remark in self._remarks())
        return (
            f"\n## {date.isoformat()} · Routers before mock workers\n\n`{self.command}`\n\n{listed(self.machine)}. "
            f"Others kept {self.cores_taken_by_others:.1f} cores busy meanwhile.\n\n{self.connections} connections, "
            f"{self.num_rounds} rounds. {LEGEND}\n\n"
            + table_of(_HEADER, map(_row, self.figures))
            + (f"\n{remarks}" if remarks else "")
        )

    def _remarks(self) -> list[str]:
        found = [f"{name} was not measured: {reason}" for name, reason in self.skipped.items()]
        found += [f"WRONG: {what}" for what in self.wrong]
        if self.peer_versions:
            found.append(f"the others' environment: {listed(dict(self.peer_versions))}")
        return found


def _row(figures: RouterFigures) -> list[str]:
    return [
        figures.name,
        f"{figures.requests_per_second:,.0f}",
        _ms(figures.added_latency_p50),
        _ms(figures.added_latency_p99),
        _ms(figures.cpu_per_request),
        f"{figures.chunks_per_second:,.0f}",
        _ms(figures.cpu_per_chunk),
    ]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3f}"
