"""`splitserve bench scheduler`: what the scheduler costs a step, in the normal and the overlapped loop.

The interpreter is set up as in a worker. Figures go to a table or JSON, and to a section of a log where asked.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from splitserve.bench.growth_series import Series
from splitserve.bench.machine import OthersWatch, check_writable, describe_machine
from splitserve.bench.publish import publish
from splitserve.bench.scheduler_overhead import STEP_SECONDS, measure_overhead
from splitserve.launch.interpreter import set_up_interpreter

NUM_RUNNING = (1, 32, 256)
_LEGEND = (
    f"Time of a step beyond the model's {STEP_SECONDS * 1e3:g} ms. Of a round the least disturbed step counts; shown "
    "are the least and, in brackets, the median of the rounds."
)


@dataclass(frozen=True, slots=True)
class SchedulerBenchOptions:
    # As it can be typed again.
    command: str
    rounds: int
    # Of a round, for each loop and size.
    num_steps: int
    append_to: Path | None
    as_json: bool


@dataclass(frozen=True, slots=True)
class OverheadReport:
    command: str
    machine: dict[str, str]
    # Cores that other processes kept busy meanwhile, on average.
    cores_taken_by_others: float
    # One for each loop, all over the same sizes.
    series: Sequence[Series]

    def to_json(self) -> dict[str, Any]:
        """Seconds."""
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
        """A section to append to a log."""
        machine = "; ".join(f"{name}: {value}" for name, value in self.machine.items())
        lines = [self._header(), ["---"] * len(self._header()), *self._rows()]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return (
            f"\n## {date.isoformat()} · Scheduler overhead per step\n\n`{self.command}`\n\n{machine}. Others kept "
            f"{self.cores_taken_by_others:.1f} cores busy meanwhile.\n\n{_LEGEND}\n\n{table}\n\n"
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
    """Returns the exit code. Raises ConfigError."""
    if options.append_to is not None:
        check_writable(options.append_to)
    console = Console(stderr=True)
    others = OthersWatch()
    with console.status("steps of a scheduler"), set_up_interpreter():
        series = measure_overhead(NUM_RUNNING, options.rounds, options.num_steps)
    report = OverheadReport(options.command, describe_machine(), others.cores_taken(), series)
    publish(report, as_json=options.as_json, append_to=options.append_to, console=console)
    return 0
