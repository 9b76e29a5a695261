"""`splitserve bench ...`, `chaos` and `verify`: their options are the classes in `tools/options.py`.

A new benchmark is a class there, a function `bench_NAME` that takes its options and returns a report, and a line here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer

from splitserve.cli.options import ModelArgument, keyword, parameter_of, typed_again, with_parameters
from splitserve.core.options import Config, fill, options_of, replaced
from splitserve.tools import options
from splitserve.tools.options import BenchOptions

# Command -> its options, and the module with the function `bench_COMMAND`, which takes them and returns a report.
_BENCHES: dict[str, tuple[type[BenchOptions], str]] = {
    "main": (options.MainBenchOptions, "bench.compare"),
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


def _command(options_type: type[Config], run: Callable[[Any], int]) -> Callable[..., None]:
    """Return a command that fills its options, calls `run`, and ends with its exit code."""

    def command(ctx: typer.Context, **values: Any) -> None:
        from splitserve.ranks.processes import OPENMP_ENVIRONMENT

        # The same settings as in a worker. OpenMP reads them when `run` loads torch.
        for name, value in OPENMP_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        config = fill(options_type(), values)
        if isinstance(config, BenchOptions):
            config = replaced(config, {"command": typed_again(ctx)})
        raise typer.Exit(run(config))

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


def _bench(name: str, module: str) -> Callable[[BenchOptions], int]:
    def run(config: BenchOptions) -> int:
        from splitserve.tools.bench.report import run_bench

        return run_bench(config, getattr(import_module(f"splitserve.tools.{module}"), f"bench_{name}"))

    return run


def _run_verify(config: options.VerifyOptions) -> int:
    from splitserve.tools.verify import run_verify

    return run_verify(config)


bench_app = typer.Typer(name="bench", help="Benchmarks on this machine.", no_args_is_help=True, rich_markup_mode=None)
for _name, (_options, _module) in _BENCHES.items():
    bench_app.command(_name)(_command(_options, _bench(_name, _module)))
chaos = _command(options.ChaosOptions, _bench("chaos", "chaos.run"))
verify = _command(options.VerifyOptions, _run_verify)
