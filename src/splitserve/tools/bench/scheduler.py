"""`splitserve bench scheduler`: scheduler overhead per step in the normal and the overlapped loop.

The interpreter is configured as in a worker. Figures are printed as a table or JSON, and optionally appended to a log.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from splitserve.process.interpreter import set_up_interpreter
from splitserve.tools.bench.growth_series import Series
from splitserve.tools.bench.machine import OthersWatch, check_writable, describe_machine
from splitserve.tools.bench.markdown import listed, table_of
from splitserve.tools.bench.publish import publish
from splitserve.tools.bench.scheduler_overhead import STEP_SECONDS, measure_overhead

NUM_RUNNING = (1, 32, 256)
_LEGEND = (
    f"Time of a step beyond the model's {STEP_SECONDS * 1e3:g} ms. Of a round the least disturbed step counts; shown "
    "are the least and, in brackets, the median of the rounds."
)


@dataclass(frozen=True, slots=True)
class SchedulerBenchOptions:
    # Command line that repeats this benchmark.
    command: str
    rounds: int
    # Steps per round, for each loop and size.
    num_steps: int
    append_to: Path | None
    as_json: bool


@dataclass(frozen=True, slots=True)
class OverheadReport:
    command: str
    machine: dict[str, str]
    # Average number of cores that other processes kept busy.
    cores_taken_by_others: float
    # One series for each loop, all over the same sizes.
    series: Sequence[Series]

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values. Times are in seconds."""
        found = asdict(self)
        for form, series in zip(found["series"], self.series, strict=True):
            form["grows_faster_than_work"] = series.outgrows_work
        return found

    def table(self) -> Table:
        verdicts = "\n".join(f"{series.name}: {series.verdict()}" for series in self.series)
        table = Table(*self._header(), title="scheduler overhead, ms a step", caption=f"{verdicts}\n{_LEGEND}")
        for cells in self._rows():
            table.add_row(*cells)
        return table

    def markdown(self, date: datetime.date) -> str:
        """Return a section to append to a log."""
        machine = listed(self.machine)
        return (
            f"\n## {date.isoformat()} · Scheduler overhead per step\n\n`{self.command}`\n\n{machine}. Others kept "
            f"{self.cores_taken_by_others:.1f} cores busy meanwhile.\n\n{_LEGEND}\n\n"
            + table_of(self._header(), self._rows())
            + "\n"
            + "\n".join(f"- {series.name}: {series.verdict()}." for series in self.series)
            + "\n"
        )

    def _header(self) -> list[str]:
        return ["running requests", *(f"{series.name}, ms" for series in self.series)]

    def _rows(self) -> list[list[str]]:
        return [
            [f"{points[0].size:,}", *(f"{min(p.times) * 1e3:.3f} ({p.seconds * 1e3:.3f})" for p in points)]
            for points in zip(*(series.points for series in self.series), strict=True)
        ]


def run_scheduler_bench(options: SchedulerBenchOptions) -> int:
    """Run the benchmark and return the exit code. Raises ConfigError."""
    if options.append_to is not None:
        check_writable(options.append_to)
    console = Console(stderr=True)
    others = OthersWatch()
    with console.status("steps of a scheduler"), set_up_interpreter():
        series = measure_overhead(NUM_RUNNING, options.rounds, options.num_steps)
    report = OverheadReport(options.command, describe_machine(), others.cores_taken(), series)
    publish(report, as_json=options.as_json, append_to=options.append_to, console=console)
    return 0
