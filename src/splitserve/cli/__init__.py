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
from splitserve.cli.bench import bench_app, chaos, verify
from splitserve.cli.cluster import certs_app, cluster_app
from splitserve.cli.command import Command, CommandGroup, run
from splitserve.cli.options import DtypeOption, ModelArgument
from splitserve.cli.serve import router, serve
from splitserve.cli.up import UpCommand, up
from splitserve.core.errors import SplitserveError
from splitserve.process.process_end import exit_code_of, unwinding
from splitserve.router.args import parse_url

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


@app.command(rich_help_panel=_TRY)
def demo(
    model: ModelArgument = "smollm2",
    prompt: Annotated[
        str, typer.Option(help="Question for the model.")
    ] = "What is the capital of France? Tell me about it.",
    max_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens of the answer.")] = 64,
    dtype: DtypeOption = "float32",
) -> None:
    """Answer a question with a prefill and a decode process, show the timings, and compare with a colocated worker."""
    from splitserve.tools.demo import run_demo

    raise typer.Exit(run_demo(model, prompt, max_tokens=max_tokens, dtype=dtype))


@app.command(rich_help_panel=_TRY)
def pull(model: ModelArgument = "smollm2") -> None:
    """Fetch a model in advance, so that later starts are fast. Prints its folder."""
    from splitserve.engine.sources import resolve_model

    typer.echo(resolve_model(model))


@app.command(rich_help_panel=_TRY)
def chat(
    url: Annotated[str, typer.Option(help="URL of a router or worker.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Model in requests. Default: the first one that the server lists.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature. 0: greedy.")] = 0.7,
) -> None:
    """Chat with a served model in the terminal."""
    from splitserve.tools.chat import run_chat

    raise typer.Exit(
        run_chat(parse_url(url), model=model, system=system, max_tokens=max_tokens, temperature=temperature)
    )


app.command("verify", rich_help_panel=_TRY)(verify)
app.command("chaos", rich_help_panel=_MEASURE)(chaos)


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
