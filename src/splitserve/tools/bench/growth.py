"""`splitserve bench growth`: growth of step time with batch and context, and of scheduler time with waiting requests.

1. The engine alone, then the scheduler alone, each in this process.
2. Each series gets a verdict: whether its time grows faster than its work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from splitserve.core.config import ModelConfig, check_dtype
from splitserve.core.cpus import num_cores
from splitserve.tools.bench.growth_scheduler import measure_scheduler
from splitserve.tools.bench.growth_steps import StepSizes, measure_steps
from splitserve.tools.bench.machine import OthersWatch, describe_machine
from splitserve.tools.bench.report import Report, ReportOutput
from splitserve.tools.bench.series import TOLERANCE, Series

_WAITING = (10, 100, 1_000, 10_000)
_LEGEND = (
    "Times: medians (min-max) of the repeats. Growth: time ~ work ^ growth from the size before to this one; 0 costs "
    f"nothing more, 1 grows with the work. Faster than its work: a unit of work costs over {TOLERANCE:g} x what it "
    "cost at a smaller size."
)
# Number of cores busy with other work that makes the figures unreliable, and the note for the report.
_BUSY_CORES = 0.2
_BUSY_NOTE = (
    "**The machine was not idle: long steps suffer more from that than short ones, so no verdict is certain.** "
)


@dataclass(frozen=True, slots=True)
class GrowthOptions:
    # Command line that repeats this benchmark.
    command: str
    model: str
    dtype: str
    # None: all cores of this process.
    threads: int | None
    sizes: StepSizes
    waiting: tuple[int, ...]
    output: ReportOutput


def options_for(*, quick: bool, repeats: int | None) -> tuple[StepSizes, tuple[int, ...]]:
    """Return the sizes of steps and the numbers of waiting requests."""
    if quick:
        return StepSizes(max_batch=64, max_context=2048, repeats=repeats or 3), _WAITING[:-1]
    return StepSizes(repeats=repeats or 9), _WAITING


def run_growth_bench(options: GrowthOptions) -> int:
    """Run the benchmark and return the exit code. Raises ConfigError, ModelLoadError."""
    check_dtype(options.dtype)
    options.output.check()
    console = Console(stderr=True)
    others = OthersWatch()
    series = measure_growth(options, console)
    options.output.publish(growth_report(options, describe_machine(), others.cores_taken(), series), console)
    return 0


def measure_growth(options: GrowthOptions, console: Console) -> list[Series]:
    model = ModelConfig(model=options.model, dtype=options.dtype, device="cpu", threads=_threads(options))
    with console.status("steps of the engine") as status:
        series = measure_steps(model, options.sizes)
        status.update("turns of the scheduler")
        return series + measure_scheduler(options.waiting, options.sizes.repeats)


def growth_report(
    options: GrowthOptions, machine: dict[str, str], cores_taken_by_others: float, series: Sequence[Series]
) -> Report:
    """Return the report. JSON has times in seconds."""
    threads = _threads(options)
    return Report(
        title=f"How step time grows: {options.model} in {options.dtype}",
        command=options.command,
        machine=machine,
        setting=f"{options.model} in {options.dtype}, {threads} threads",
        cores_taken_by_others=cores_taken_by_others,
        legend=(_BUSY_NOTE if cores_taken_by_others > _BUSY_CORES else "") + _LEGEND,
        figures={
            "model": options.model,
            "dtype": options.dtype,
            "threads": threads,
            "command": options.command,
            "machine": machine,
            "cores_taken_by_others": cores_taken_by_others,
            "series": [s.to_json() for s in series],
        },
        tables=[s.table() for s in series],
        panels=[s.panel() for s in series],
    )


def _threads(options: GrowthOptions) -> int:
    return options.threads or num_cores()
