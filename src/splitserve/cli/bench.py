"""`splitserve bench ...` and `splitserve chaos`: their options are the classes in `tools/bench/options.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer

from splitserve.cli.derive import keyword, parameter_of, with_parameters
from splitserve.cli.options import ModelArgument, typed_again
from splitserve.core.options import fill, options_of, replaced
from splitserve.tools.bench import options
from splitserve.tools.bench.options import BenchOptions

# Command -> its options, and the module with the function `bench_COMMAND`, which takes them and returns a report.
_BENCHES: dict[str, tuple[type[BenchOptions], str]] = {
    "main": (options.MainBenchOptions, "bench.scenarios"),
    "transfer": (options.TransferBenchOptions, "bench.transfer"),
    "serve": (options.ServeBenchOptions, "bench.serve"),
    "routing": (options.RoutingBenchOptions, "bench.routing"),
    "growth": (options.GrowthBenchOptions, "bench.growth"),
    "scheduler": (options.SchedulerBenchOptions, "bench.scheduler"),
    "startup": (options.StartupBenchOptions, "bench.startup"),
    "gpu": (options.GpuBenchOptions, "bench.gpu"),
    "router": (options.RouterBenchOptions, "bench.router"),
    "abuse": (options.AbuseBenchOptions, "bench.abuse"),
    "compare": (options.CompareBenchOptions, "bench.compare"),
}
# Options of all benchmarks, last in the help.
_OUTPUT = ("append_to", "page", "plot", "as_json", "quick")


def _command(name: str, options_type: type[BenchOptions], module: str) -> Callable[..., None]:
    """Return a command that fills its options, measures, and ends with the exit code of the report."""

    def command(ctx: typer.Context, **values: Any) -> None:
        from splitserve.ranks.processes import OPENMP_ENVIRONMENT

        # The same settings as in a worker. OpenMP reads them when the import below loads torch.
        for variable, value in OPENMP_ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        from splitserve.tools.bench.report import run_bench

        measure = getattr(import_module(f"splitserve.tools.{module}"), f"bench_{name}")
        config = replaced(fill(options_type(), values), {"command": typed_again(ctx)})
        raise typer.Exit(run_bench(config, measure))

    command.__doc__ = options_type.__doc__
    found = sorted(options_of(options_type()), key=lambda option: option.name in _OUTPUT)
    return with_parameters(
        command,
        [
            keyword("ctx", typer.Context),
            *(
                keyword("model", ModelArgument, option.default) if option.name == "model" else parameter_of(option)
                for option in found
            ),
        ],
    )


bench_app = typer.Typer(name="bench", help="Benchmarks on this machine.", no_args_is_help=True, rich_markup_mode=None)
for _name, (_options, _module) in _BENCHES.items():
    bench_app.command(_name)(_command(_name, _options, _module))
chaos = _command("chaos", options.ChaosOptions, "chaos.run")
