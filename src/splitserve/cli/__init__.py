"""The command line. Each command reads its options and builds a config. Heavy imports wait until a command runs.

A new command is a function with `@app.command()`. Errors of Splitserve are one line: exit code 2 if
the options are wrong (supervisors do not retry that), 1 if something failed.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated

import typer

from splitserve import __version__
from splitserve.cli.cluster import certs_app, cluster_app
from splitserve.cli.command import Command, CommandGroup, run
from splitserve.cli.options import ModelArgument
from splitserve.cli.serve import router, serve
from splitserve.cli.tools import bench_app, bench_command, tool_command
from splitserve.cli.up import UpCommand, up
from splitserve.core.errors import SplitserveError
from splitserve.process.process_end import exit_code_of, unwinding
from splitserve.tools.options import ChaosOptions, ChatOptions, DemoOptions, VerifyOptions

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
app.command("demo", rich_help_panel=_TRY)(tool_command("demo", DemoOptions))


@app.command(rich_help_panel=_TRY)
def pull(model: ModelArgument = "smollm2") -> None:
    """Fetch a model in advance, so that later starts are fast. Prints its folder."""
    from splitserve.engine.sources import resolve_model

    typer.echo(resolve_model(model))


app.command("chat", rich_help_panel=_TRY)(tool_command("chat", ChatOptions))
app.command("verify", rich_help_panel=_TRY)(tool_command("verify", VerifyOptions))
app.command("chaos", rich_help_panel=_MEASURE)(bench_command("chaos", ChaosOptions))


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


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        # Benchmarks start other processes, and must end them on a signal.
        with unwinding() if words[:1] == ["bench"] else nullcontext():
            code = run(app, words)
            if code == exit_code_of(signal.SIGINT):
                # Typer converts KeyboardInterrupt into this code.
                sys.exit(code)
    except SplitserveError as error:
        typer.echo(f"error: {error.message}", err=True)
        code = error.exit_code
    sys.exit(code)
