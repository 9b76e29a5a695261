"""`splitserve bench scheduler`: scheduler overhead per step in the normal and the overlapped loop.

The interpreter is configured as in a worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from splitserve.process.settings import set_up_interpreter
from splitserve.tools.bench.machine import OthersWatch
from splitserve.tools.bench.report import Report, ReportOutput, ReportTable
from splitserve.tools.bench.scheduler_overhead import STEP_SECONDS, measure_overhead
from splitserve.tools.bench.series import Series

NUM_RUNNING = (1, 32, 256)
_LEGEND = (
    f"Time of a step beyond the model's {STEP_SECONDS * 1e3:g} ms. Of a round the least disturbed step counts; shown "
    "are the least and, in brackets, the median of the rounds."
)


def run_scheduler_bench(command: str, rounds: int, num_steps: int, output: ReportOutput) -> int:
    """Run the benchmark and return the exit code. `num_steps`: per round, loop and size. Raises ConfigError."""
    others = OthersWatch()

    def measure(console: Console) -> Report:
        with console.status("steps of a scheduler"), set_up_interpreter():
            series = measure_overhead(NUM_RUNNING, rounds, num_steps)
        return overhead_report(command, others.cores_taken(), series)

    return output.run(measure)


def overhead_report(command: str, cores_taken: float, series: Sequence[Series]) -> Report:
    """Return the report: one series per loop, all over the same sizes. JSON has times in seconds."""
    rows = [
        [f"{points[0].size:,}", *(f"{min(p.times) * 1e3:.3f} ({p.seconds * 1e3:.3f})" for p in points)]
        for points in zip(*(s.points for s in series), strict=True)
    ]
    return Report(
        title="Scheduler overhead per step",
        command=command,
        cores_taken_by_others=cores_taken,
        legend=_LEGEND,
        figures={"series": [s.to_json() for s in series]},
        tables=[ReportTable(["running requests", *(f"{s.name}, ms" for s in series)], rows)],
        remarks=[f"{s.name}: {s.verdict()}." for s in series],
    )
