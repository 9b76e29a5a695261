"""`splitserve bench scheduler`: scheduler overhead per step in the normal and the overlapped loop.

The interpreter is configured as in a worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from splitserve.process.settings import set_up_interpreter
from splitserve.tools.bench.machine import OthersWatch, describe_machine
from splitserve.tools.bench.report import Report, ReportOutput, ReportTable
from splitserve.tools.bench.scheduler_overhead import STEP_SECONDS, measure_overhead
from splitserve.tools.bench.series import Series

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
    output: ReportOutput


def run_scheduler_bench(options: SchedulerBenchOptions) -> int:
    """Run the benchmark and return the exit code. Raises ConfigError."""
    options.output.check()
    console = Console(stderr=True)
    others = OthersWatch()
    with console.status("steps of a scheduler"), set_up_interpreter():
        series = measure_overhead(NUM_RUNNING, options.rounds, options.num_steps)
    options.output.publish(overhead_report(options.command, describe_machine(), others.cores_taken(), series), console)
    return 0


def overhead_report(
    command: str, machine: dict[str, str], cores_taken_by_others: float, series: Sequence[Series]
) -> Report:
    """Return the report: one series per loop, all over the same sizes. JSON has times in seconds."""
    rows = [
        [f"{points[0].size:,}", *(f"{min(p.times) * 1e3:.3f} ({p.seconds * 1e3:.3f})" for p in points)]
        for points in zip(*(s.points for s in series), strict=True)
    ]
    return Report(
        title="Scheduler overhead per step",
        command=command,
        machine=machine,
        cores_taken_by_others=cores_taken_by_others,
        legend=_LEGEND,
        figures={
            "command": command,
            "machine": machine,
            "cores_taken_by_others": cores_taken_by_others,
            "series": [s.to_json() for s in series],
        },
        tables=[ReportTable(["running requests", *(f"{s.name}, ms" for s in series)], rows)],
        remarks=[f"{s.name}: {s.verdict()}." for s in series],
    )
