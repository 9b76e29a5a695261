"""`splitserve bench growth`, `splitserve bench scheduler` and `splitserve bench startup`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from splitserve.cli.options import AppendOption, JsonOption, ModelArgument, QuickOption, typed_again
from splitserve.core.config import DTYPES

_BenchDtype = Annotated[str, typer.Option(help=f"Dtype of the model: {', '.join(DTYPES)}.")]
_PageOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Markdown page. Its section between the marks of this benchmark is replaced."),
]
_PlotOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Image of the curves, e.g. curves.svg or curves.png. Needs the extra 'bench'. "
        "Default with --page: growth.svg beside the page.",
    ),
]


def bench_growth(
    ctx: typer.Context,
    model: ModelArgument = "smollm2",
    dtype: _BenchDtype = "bfloat16",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the model. Default: all cores.")] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, max=100, help="Runs per size. Figures are medians. Default: 9, with --quick 3.")
    ] = None,
    append_to: AppendOption = None,
    page: _PageOption = None,
    plot: _PlotOption = None,
    as_json: JsonOption = False,
    quick: QuickOption = False,
) -> None:
    """Measure the growth of step time with batch and context, and of scheduler time with waiting requests."""
    from splitserve.worker.scheduler_link import OPENMP_ENVIRONMENT

    # The same settings as in a worker. OpenMP reads them when the next import loads torch.
    for name, value in OPENMP_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from splitserve.tools.bench.growth import options_for, run_growth_bench
    from splitserve.tools.bench.report import ReportOutput

    if page is not None and plot is None:
        plot = page.with_name("growth.svg")
    sizes, waiting = options_for(quick=quick, repeats=repeats)
    output = ReportOutput(as_json, append_to, page, "bench growth", plot)
    raise typer.Exit(run_growth_bench(typed_again(ctx), model, dtype, threads, sizes, waiting, output))


def bench_scheduler(
    ctx: typer.Context,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds. In each, all loops and sizes take turns.")] = 9,
    steps: Annotated[int, typer.Option(min=1, help="Steps per round, for each loop and size.")] = 40,
    append_to: AppendOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure scheduler overhead per step at 1, 32 and 256 running requests, in the normal and the overlapped loop."""
    from splitserve.tools.bench.report import ReportOutput
    from splitserve.tools.bench.scheduler import run_scheduler_bench

    raise typer.Exit(run_scheduler_bench(typed_again(ctx), rounds, steps, ReportOutput(as_json, append_to)))


def bench_startup(
    ctx: typer.Context,
    model: ModelArgument = "smollm2",
    dtype: _BenchDtype = "bfloat16",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the model. Default: all cores.")] = None,
    cold_runs: Annotated[
        int, typer.Option(min=0, help="Starts with empty caches: smollm2 is downloaded for each.")
    ] = 1,
    warm_runs: Annotated[int, typer.Option(min=0, help="Starts with filled caches.")] = 5,
    append_to: AppendOption = None,
    page: _PageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the time from the start of a worker to its first token, with empty and with filled caches."""
    from splitserve.tools.bench.report import ReportOutput
    from splitserve.tools.bench.startup import StartupBench

    output = ReportOutput(as_json, append_to, page, "bench startup")
    raise typer.Exit(StartupBench(model, dtype, threads).run(typed_again(ctx), cold_runs, warm_runs, output))
