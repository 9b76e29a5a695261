"""Report of `bench growth`: a table for the terminal, Markdown, JSON, and the panels of the plot."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from splitserve.tools.bench.growth_series import TOLERANCE, Series
from splitserve.tools.bench.markdown import listed, table_of
from splitserve.tools.bench.svg import Panel, draw

LEGEND = (
    "Times: medians (min-max) of the repeats. Growth: time ~ work ^ growth from the size before to this one; 0 costs "
    f"nothing more, 1 grows with the work. Faster than its work: a unit of work costs over {TOLERANCE:g} x what it "
    "cost at a smaller size."
)
# Number of cores busy with other work that makes the figures unreliable, and the note for the report.
_BUSY_CORES = 0.2
_BUSY_NOTE = (
    " **The machine was not idle: long steps suffer more from that than short ones, so no verdict is certain.**"
)
_CAPTION = "Dots: medians. Dashed: a unit of work costs what it costs at the smallest size. Both axes logarithmic."


@dataclass(frozen=True, slots=True)
class GrowthReport:
    model: str
    dtype: str
    # CPU threads of the model.
    threads: int
    # Command line that repeats this benchmark.
    command: str
    machine: dict[str, str]
    # Average number of cores that other processes kept busy.
    cores_taken_by_others: float
    series: Sequence[Series]

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values. Times are in seconds."""
        found = asdict(self)
        for form, series in zip(found["series"], self.series, strict=True):
            form["grows_faster_than_work"] = series.outgrows_work
            form["largest_excess"] = series.worst()[1]
            for point, original, growth in zip(form["points"], series.points, series.growths(), strict=True):
                point |= {"seconds": original.seconds, "growth": growth}
        return found

    def table(self) -> Table:
        title = f"{self.model} in {self.dtype}, {self.threads} threads"
        verdicts = "\n".join(f"{series.name}: {series.verdict()}" for series in self.series)
        table = Table("size", "time", "cost", "growth", title=title, caption=f"{verdicts}\n{LEGEND}")
        for series in self.series:
            unit, style = series.time_unit, "bold red" if series.outgrows_work else "bold"
            table.add_row(series.name, unit, f"{unit} / {series.work_name}", "", style=style)
            for cells in _rows(series):
                table.add_row(*cells)
            table.add_section()
        return table

    def markdown(self, date: datetime.date) -> str:
        """Return a section to append to a log."""
        return f"\n## {date.isoformat()} · How step time grows: {self.model} in {self.dtype}\n\n{self.section()}"

    def section(self) -> str:
        """Return Markdown without a heading."""
        note = _BUSY_NOTE if self.cores_taken_by_others > _BUSY_CORES else ""
        machine = listed(self.machine)
        parts = [
            f"`{self.command}`\n\n{machine}. {self.model} in {self.dtype}, {self.threads} threads; others kept "
            f"{self.cores_taken_by_others:.1f} cores busy meanwhile.{note}\n\n{LEGEND}\n"
        ]
        for series in self.series:
            unit = series.time_unit
            header = [series.size_name, f"{unit}", f"{unit} / {series.work_name}", "growth"]
            mark = "**" if series.outgrows_work else ""
            parts.append(
                f"{series.name[0].upper()}{series.name[1:]} ({series.conditions}): {mark}{series.verdict()}{mark}.\n\n"
                + table_of(header, _rows(series))
            )
        return "\n".join(parts)

    def plot(self) -> str:
        """Return the text of an SVG file."""
        return draw([_panel(series) for series in self.series], _CAPTION)


def _panel(series: Series) -> Panel:
    first = series.points[0]
    return Panel(
        title=series.name,
        subtitle=series.conditions,
        x_name=series.size_name,
        y_name=series.time_unit,
        xs=[p.size for p in series.points],
        ys=[series.shown(p.seconds) for p in series.points],
        reference=[series.shown(first.cost * p.work) for p in series.points],
    )


def _rows(series: Series) -> list[list[str]]:
    return [
        [
            f"{p.size:,}",
            f"{_number(series.shown(p.seconds))} ({_number(series.shown(min(p.times)))}-"
            f"{_number(series.shown(max(p.times)))})",
            _number(series.shown(p.cost)),
            "" if growth is None else f"{growth:.2f}",
        ]
        for p, growth in zip(series.points, series.growths(), strict=True)
    ]


def _number(value: float) -> str:
    """Format with at least three digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"
