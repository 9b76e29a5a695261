"""`splitserve bench ...`, `chaos`, `verify`, `demo` and `chat`: their options are the classes in `tools/options.py`.

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

# Command -> its options. The function `bench_COMMAND` takes them and returns a report.
_BENCHES: dict[str, type[BenchOptions]] = {
    "main": options.MainBenchOptions,
    "transfer": options.TransferBenchOptions,
    "serve": options.ServeBenchOptions,
    "routing": options.RoutingBenchOptions,
    "growth": options.GrowthBenchOptions,
    "scheduler": options.SchedulerBenchOptions,
    "startup": options.StartupBenchOptions,
    "gpu": options.GpuBenchOptions,
    "router": options.RouterBenchOptions,
    "abuse": options.AbuseBenchOptions,
    "compare": options.CompareBenchOptions,
}
# Modules of benchmarks that are not `bench.COMMAND`.
_MODULES = {"main": "bench.compare", "chaos": "chaos.run"}
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
    parameters = [
        # Of `chat`, MODEL is an option: the server has a default.
        keyword("model", ModelArgument, option.default)
        if option.name == "model" and option.default is not None
        else parameter_of(option)
        for option in found
    ]
    return with_parameters(command, [keyword("ctx", typer.Context), *parameters])


def bench_command(name: str, options_type: type[BenchOptions]) -> Callable[..., None]:
    """Return the command that writes the report of `bench_NAME`."""

    def run(config: BenchOptions) -> int:
        from splitserve.tools.bench.report import run_bench

        module = import_module(f"splitserve.tools.{_MODULES.get(name, f'bench.{name}')}")
        return run_bench(config, getattr(module, f"bench_{name}"))

    return _command(options_type, run)


def tool_command(name: str, options_type: type[Config]) -> Callable[..., None]:
    """Return the command that calls `run_NAME` in `tools/NAME.py` with its options."""

    def run(config: Config) -> int:
        code: int = getattr(import_module(f"splitserve.tools.{name}"), f"run_{name}")(config)
        return code

    return _command(options_type, run)


bench_app = typer.Typer(name="bench", help="Benchmarks on this machine.", no_args_is_help=True, rich_markup_mode=None)
for _name, _options in _BENCHES.items():
    bench_app.command(_name)(bench_command(_name, _options))
