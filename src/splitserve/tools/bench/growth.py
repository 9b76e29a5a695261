"""`splitserve bench growth`: growth of step time with batch and context, and of scheduler time with waiting requests.

1. The engine alone, then the scheduler alone, each in this process.
2. Each series gets a verdict: whether its time grows faster than its work.
3. The table is printed, appended to a log, or written into a page of the documentation with its plot beside it.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from splitserve.core.config import DTYPES, ModelConfig
from splitserve.core.cpus import num_cores
from splitserve.core.errors import ConfigError
from splitserve.tools.bench.growth_report import GrowthReport
from splitserve.tools.bench.growth_scheduler import measure_scheduler
from splitserve.tools.bench.growth_steps import StepSizes, measure_steps
from splitserve.tools.bench.machine import OthersWatch, check_writable, describe_machine
from splitserve.tools.bench.page import check_page, replace_section
from splitserve.tools.bench.publish import publish

SECTION = "bench growth"
PLOT_NAME = "growth.svg"
_WAITING = (10, 100, 1_000, 10_000)


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
    append_to: Path | None
    # Markdown file with a section "bench growth" to replace. The plot is written beside it. None: no page.
    page: Path | None
    as_json: bool


def options_for(*, quick: bool, repeats: int | None) -> tuple[StepSizes, tuple[int, ...]]:
    """Return the sizes of steps and the numbers of waiting requests."""
    if quick:
        return StepSizes(max_batch=64, max_context=2048, repeats=repeats or 3), _WAITING[:-1]
    return StepSizes(repeats=repeats or 9), _WAITING


def run_growth_bench(options: GrowthOptions) -> int:
    """Run the benchmark and return the exit code. Raises ConfigError, ModelLoadError."""
    if options.dtype not in DTYPES:
        raise ConfigError(f"--dtype {options.dtype!r}: choose one of {', '.join(DTYPES)}")
    if options.append_to is not None:
        check_writable(options.append_to)
    if options.page is not None:
        check_page(options.page, SECTION)
    console = Console(stderr=True)
    report = measure_growth(options, console)
    publish(report, as_json=options.as_json, append_to=options.append_to, console=console)
    if options.page is not None:
        write_page(report, options.page)
        console.print(f"wrote {options.page} and {PLOT_NAME} beside it", highlight=False)
    return 0


def measure_growth(options: GrowthOptions, console: Console) -> GrowthReport:
    threads = options.threads or num_cores()
    model = ModelConfig(model=options.model, dtype=options.dtype, device="cpu", threads=threads)
    others = OthersWatch()
    with console.status("steps of the engine") as status:
        series = measure_steps(model, options.sizes)
        status.update("turns of the scheduler")
        series += measure_scheduler(options.waiting, options.sizes.repeats)
    return GrowthReport(
        model=options.model,
        dtype=options.dtype,
        threads=threads,
        command=options.command,
        machine=describe_machine(),
        cores_taken_by_others=others.cores_taken(),
        series=series,
    )


def write_page(report: GrowthReport, page: Path) -> None:
    date = datetime.date.today().isoformat()
    page.with_name(PLOT_NAME).write_text(report.plot(), encoding="utf-8")
    image = f"![Time against size, one panel a series]({PLOT_NAME})"
    replace_section(page, SECTION, f"Measured {date} by {report.section()}\n{image}")
