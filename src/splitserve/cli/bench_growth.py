"""`splitserve bench growth`, `splitserve bench scheduler` and `splitserve bench startup`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from splitserve.cli.options import AppendOption, JsonOption, ModelArgument, QuickOption, typed_again
from splitserve.config import DTYPES

_BenchDtype = Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")]
_PageOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Markdown page whose section between this bench's marks is written anew."),
]


def bench_growth(
    ctx: typer.Context,
    model: ModelArgument = "smollm2",
    dtype: _BenchDtype = "bfloat16",
    threads: Annotated[int | None, typer.Option(min=1, help="Of the model; default: all cores.")] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, max=100, help="Figures are their medians; default: 9, quick: 3.")
    ] = None,
    append_to: AppendOption = None,
    page: _PageOption = None,
    as_json: JsonOption = False,
    quick: QuickOption = False,
) -> None:
    """How step time grows with batch and context, the scheduler's with waiting requests, against the work."""
    from splitserve.launch.scheduler_link import OPENMP_ENVIRONMENT

    # As a worker's model has it. OpenMP reads it when torch is loaded, which the next import does.
    for name, value in OPENMP_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from splitserve.bench.growth import GrowthOptions, options_for, run_growth_bench

    sizes, waiting = options_for(quick=quick, repeats=repeats)
    options = GrowthOptions(
        command=typed_again(ctx),
        model=model,
        dtype=dtype,
        threads=threads,
        sizes=sizes,
        waiting=waiting,
        append_to=append_to,
        page=page,
        as_json=as_json,
    )
    raise typer.Exit(run_growth_bench(options))


def bench_scheduler(
    ctx: typer.Context,
    rounds: Annotated[int, typer.Option(min=1, help="In which all loops and sizes take turns.")] = 9,
    steps: Annotated[int, typer.Option(min=1, help="Of a round, for each loop and size.")] = 40,
    append_to: AppendOption = None,
    as_json: JsonOption = False,
) -> None:
    """What the scheduler costs a step at 1, 32 and 256 running requests, in the normal and the overlapped loop."""
    from splitserve.bench.scheduler import SchedulerBenchOptions, run_scheduler_bench

    command = typed_again(ctx)
    raise typer.Exit(run_scheduler_bench(SchedulerBenchOptions(command, rounds, steps, append_to, as_json)))


def bench_startup(
    ctx: typer.Context,
    model: ModelArgument = "smollm2",
    dtype: _BenchDtype = "bfloat16",
    threads: Annotated[int | None, typer.Option(min=1, help="Of the model; default: all cores.")] = None,
    cold_runs: Annotated[int, typer.Option(min=0, help="With empty caches: smollm2 is downloaded each time.")] = 1,
    warm_runs: Annotated[int, typer.Option(min=0, help="With filled caches.")] = 5,
    append_to: AppendOption = None,
    page: _PageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Seconds from the start of a worker's process to its first token, with empty and with filled caches."""
    from splitserve.bench.startup import StartupOptions, run_startup_bench

    options = StartupOptions(
        command=typed_again(ctx),
        model=model,
        dtype=dtype,
        threads=threads,
        cold_runs=cold_runs,
        warm_runs=warm_runs,
        append_to=append_to,
        page=page,
        as_json=as_json,
    )
    raise typer.Exit(run_startup_bench(options))
