"""The command line. Each command reads its options and builds a config. Heavy imports wait until a command runs.

A new benchmark is a class in `tools/bench/options.py`, a function `bench_NAME` that takes its options and returns a
report, and a line in `_BENCHES`. A new command is a function with `@app.command()`. Errors of Splitserve are one line:
exit code 2 if the options are wrong (supervisors do not retry that), 1 if something failed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Annotated, Any

import typer

from splitserve import __version__
from splitserve.cli.cluster import certs_app, cluster_app
from splitserve.cli.command import Command, CommandGroup, run
from splitserve.cli.options import ModelArgument, typed_again, with_options
from splitserve.cli.serve import router, serve
from splitserve.cli.up import UpCommand, up
from splitserve.core.environment import OPENMP_ENVIRONMENT
from splitserve.core.errors import SplitserveError
from splitserve.core.options import Config, fill, options_of, replaced
from splitserve.process.process_end import exit_code_of, unwinding
from splitserve.tools import options
from splitserve.tools.bench import options as bench_options

# Command -> its options. The function `bench_COMMAND` takes them and returns a report.
_BENCHES: dict[str, type[bench_options.BenchOptions]] = {
    "main": bench_options.MainBenchOptions,
    "transfer": bench_options.TransferBenchOptions,
    "serve": bench_options.ServeBenchOptions,
    "routing": bench_options.RoutingBenchOptions,
    "growth": bench_options.GrowthBenchOptions,
    "context": bench_options.ContextBenchOptions,
    "scheduler": bench_options.SchedulerBenchOptions,
    "startup": bench_options.StartupBenchOptions,
    "speculation": bench_options.SpeculationBenchOptions,
    "quantization": bench_options.QuantizationBenchOptions,
    "gpu": bench_options.GpuBenchOptions,
    "router": bench_options.RouterBenchOptions,
    "abuse": bench_options.AbuseBenchOptions,
    "compare": bench_options.CompareBenchOptions,
    "isolation": bench_options.IsolationBenchOptions,
}
# Options of all benchmarks, last in the help.
_OUTPUT = ("append_to", "page", "plot", "as_json", "quick")


def _command(options_type: type[Config], run: Callable[[Any], int]) -> Callable[..., None]:
    """Return a command that fills its options, calls `run`, and ends with its exit code."""

    def command(ctx: typer.Context, **values: Any) -> None:
        # The same settings as in a worker. OpenMP reads them when `run` loads torch.
        for name, value in OPENMP_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        config = fill(options_type(), values)
        if isinstance(config, bench_options.BenchOptions):
            config = replaced(config, {"command": typed_again(ctx)})
        raise typer.Exit(run(config))

    command.__doc__ = options_type.__doc__
    found = sorted(options_of(options_type()), key=lambda option: option.name in _OUTPUT)
    return with_options(command, found)


def _bench_command(name: str, options_type: type[bench_options.BenchOptions]) -> Callable[..., None]:
    """Return the command that writes the report of `bench_NAME`."""

    def run(config: bench_options.BenchOptions) -> int:
        from splitserve.tools.bench.report import run_bench

        module = import_module(f"splitserve.tools.{'chaos.run' if name == 'chaos' else f'bench.{name}'}")
        return run_bench(config, getattr(module, f"bench_{name}"))

    return _command(options_type, run)


def _tool_command(name: str, options_type: type[Config]) -> Callable[..., None]:
    """Return the command that calls `run_NAME` in `tools/NAME.py` with its options."""

    def run(config: Config) -> int:
        code: int = getattr(import_module(f"splitserve.tools.{name}"), f"run_{name}")(config)
        return code

    return _command(options_type, run)


bench_app = typer.Typer(
    name="bench",
    cls=CommandGroup,
    help="Benchmarks on this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for _name, _options in _BENCHES.items():
    bench_app.command(_name)(_bench_command(_name, _options))

_SERVE, _TRY, _MEASURE = "Serve", "Try and check", "Measure"
app = typer.Typer(
    name="splitserve",
    cls=CommandGroup,
    help="LLM serving with prefill and decode disaggregated.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Tables would truncate option names in a narrow terminal, or if the output is no terminal.
    rich_markup_mode=None,
)
app.command(cls=UpCommand, rich_help_panel=_SERVE)(up)
app.command(cls=Command, rich_help_panel=_SERVE)(serve)
app.command(cls=Command, rich_help_panel=_SERVE)(router)
app.add_typer(cluster_app, rich_help_panel=_SERVE)
app.add_typer(certs_app, rich_help_panel=_SERVE)
app.add_typer(bench_app, rich_help_panel=_MEASURE)
app.command("demo", rich_help_panel=_TRY)(_tool_command("demo", options.DemoOptions))


@app.command(rich_help_panel=_TRY)
def pull(model: ModelArgument = "smollm2") -> None:
    """Fetch a model in advance, so that later starts are fast. Prints its folder."""
    from splitserve.engine.sources import resolve_model

    typer.echo(resolve_model(model))


app.command("chat", rich_help_panel=_TRY)(_tool_command("chat", options.ChatOptions))
app.command("verify", rich_help_panel=_TRY)(_tool_command("verify", options.VerifyOptions))
app.command("trace", rich_help_panel=_TRY)(_tool_command("trace", options.TraceOptions))
app.command("top", rich_help_panel=_TRY)(_tool_command("top", options.TopOptions))
app.command("chaos", rich_help_panel=_MEASURE)(_bench_command("chaos", bench_options.ChaosOptions))


@app.command(rich_help_panel=_TRY)
def doctor() -> None:
    """Show the versions, cores, memory, devices, transports and ports of this machine."""
    from splitserve.tools.doctor import run_doctor

    raise typer.Exit(run_doctor())


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"splitserve {__version__}")
        raise typer.Exit


# All commands with their options. Workers of a template share it.
_PROGRAM = typer.main.get_command(app)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    words = list(sys.argv[1:] if argv is None else argv)
    code = 0
    try:
        # Benchmarks start other processes, and must end them on a signal.
        with unwinding() if words[:1] == ["bench"] else nullcontext():
            code = run(_PROGRAM, words)
            if code == exit_code_of(signal.SIGINT):
                # Typer converts KeyboardInterrupt into this code.
                sys.exit(code)
        _flush_output()
    except SplitserveError as error:
        typer.echo(f"error: {error.message}", err=True)
        code = error.exit_code
    except OSError:
        problem = _output_problem()
        if problem is None:
            raise
        typer.echo(f"error: standard output: {problem}", err=True)
        code = code or 1
    sys.exit(code)


def _flush_output(text: str = "") -> None:
    # A process may have no standard output.
    if sys.stdout is not None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _output_problem() -> str | None:
    """Return why standard output cannot be written, and discard its buffered text. None: it can be written."""
    try:
        # Without a buffer there is nothing to flush, so only a further write fails again.
        _flush_output("\n")
    except OSError as error:
        # The interpreter flushes at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error.strerror or str(error)
    return None
