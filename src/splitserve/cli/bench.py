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

# Command -> its options, and the function that takes them and returns the exit code.
_BENCHES: dict[str, tuple[type[BenchOptions], str]] = {
    "main": (options.MainBenchOptions, "scenarios.run_main_bench"),
    "transfer": (options.TransferBenchOptions, "transfer.run_transfer_bench"),
    "serve": (options.ServeBenchOptions, "serve.run_serve_bench"),
    "routing": (options.RoutingBenchOptions, "routing.run_routing_bench"),
    "growth": (options.GrowthBenchOptions, "growth.run_growth_bench"),
    "scheduler": (options.SchedulerBenchOptions, "scheduler_overhead.run_scheduler_bench"),
    "startup": (options.StartupBenchOptions, "startup.run_startup_bench"),
    "gpu": (options.GpuBenchOptions, "gpu.run_gpu_bench"),
    "router": (options.RouterBenchOptions, "router.run_router_bench"),
    "abuse": (options.AbuseBenchOptions, "abuse.run_abuse_bench"),
    "compare": (options.CompareBenchOptions, "compare.run_compare"),
}
# Options of all benchmarks, last in the help.
_OUTPUT = ("append_to", "page", "plot", "as_json", "quick")


def _command(options_type: type[BenchOptions], target: str) -> Callable[..., None]:
    """Return a command that fills its options and calls the function `target` of a module in `splitserve.tools`."""

    def command(ctx: typer.Context, **values: Any) -> None:
        from splitserve.ranks.processes import OPENMP_ENVIRONMENT

        # The same settings as in a worker. OpenMP reads them when the import below loads torch.
        for name, value in OPENMP_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        module, _, function = target.rpartition(".")
        run = getattr(import_module(f"splitserve.tools.{module}"), function)
        raise typer.Exit(run(replaced(fill(options_type(), values), {"command": typed_again(ctx)})))

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
for _name, (_options, _target) in _BENCHES.items():
    bench_app.command(_name)(_command(_options, f"bench.{_target}"))
chaos = _command(options.ChaosOptions, "chaos.run.run_chaos")
