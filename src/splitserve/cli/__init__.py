"""The command line. Each command reads its options and builds a config. Heavy imports wait until a command runs.

A new command is a function with `@app.command()`. Errors of Splitserve are one line: exit code 2 if
the options are wrong (supervisors do not retry that), 1 if something failed.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from splitserve import __version__
from splitserve.cli.bench import bench_app
from splitserve.cli.certs import certs_app
from splitserve.cli.chaos import chaos
from splitserve.cli.cluster import cluster_app
from splitserve.cli.command import Command, Group, run
from splitserve.cli.options import (
    BackendOption,
    DpSizeOption,
    DtypeOption,
    HandOverOption,
    JsonOption,
    ModelArgument,
    PpSizeOption,
    TpSizeOption,
)
from splitserve.cli.router_options import router
from splitserve.cli.serve import serve
from splitserve.cli.up import UpCommand, up
from splitserve.config import DTYPES
from splitserve.core.process_end import exit_code_of, unwinding
from splitserve.errors import SplitserveError
from splitserve.launch.checks import check_dtype
from splitserve.launch.shape import WorkerShape
from splitserve.router.args import parse_url

_SERVE, _TRY, _MEASURE = "Serve", "Try and check", "Measure"
app = typer.Typer(
    name="splitserve",
    cls=Group,
    help="LLM serving with prefill and decode disaggregated.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Tables would cut the names of options where the terminal is narrow, or none.
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
    prompt: Annotated[str, typer.Option(help="What to ask.")] = "What is the capital of France? Tell me about it.",
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the answer at most.")] = 64,
    dtype: DtypeOption = "float32",
) -> None:
    """One question, answered by a prefill and a decode process, measured, and compared with a colocated worker."""
    from splitserve.launch.demo import run_demo

    check_dtype(dtype)
    raise typer.Exit(run_demo(model, prompt, max_tokens=max_tokens, dtype=dtype))


@app.command(rich_help_panel=_TRY)
def pull(model: ModelArgument = "smollm2") -> None:
    """Fetch a model, so that later starts are fast. Prints its folder."""
    from splitserve.engine.sources import resolve_model

    typer.echo(resolve_model(model))


@app.command(rich_help_panel=_TRY)
def chat(
    url: Annotated[str, typer.Option(help="Of a router or worker.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first one served there.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.7,
) -> None:
    """Talk to a served model in the terminal."""
    from splitserve.launch.chat import run_chat

    raise typer.Exit(
        run_chat(parse_url(url), model=model, system=system, max_tokens=max_tokens, temperature=temperature)
    )


@app.command(rich_help_panel=_TRY)
def verify(
    model: ModelArgument = "smollm2",
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"auto, {', '.join(DTYPES)}; default: float32, in which all tokens must be equal, or "
            "bfloat16 with --quantization."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help='Each line {"text": ...}, {"input_ids": [...]} or a string.'),
    ] = None,
    as_json: JsonOption = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 64,
    transfer_backend: BackendOption = "tcp",
    hand_over: HandOverOption = False,
    prefill_tp_size: TpSizeOption = 1,
    prefill_pp_size: PpSizeOption = 1,
    prefill_dp_size: DpSizeOption = 1,
    decode_tp_size: TpSizeOption = 1,
    decode_pp_size: PpSizeOption = 1,
    decode_dp_size: DpSizeOption = 1,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of each rank's model; default: the cores, divided.")
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="Of the pair's weights only, to see what it costs; exit code 0 whatever that is.")
    ] = None,
) -> None:
    """Compare colocated and disaggregated output, token by token. Exit code 0: equal."""
    from splitserve.launch.verify import VerifyOptions, run_verify

    if dtype is None:
        dtype = "float32" if quantization is None else "bfloat16"
    check_dtype(dtype)
    options = VerifyOptions(
        model=model,
        dtype=dtype,
        prompts_file=prompts,
        max_tokens=max_tokens,
        transfer_backend=transfer_backend,
        hand_over=hand_over,
        threads=threads,
        quantization=quantization,
        prefill_shape=WorkerShape.of("prefill", prefill_tp_size, prefill_pp_size, prefill_dp_size),
        decode_shape=WorkerShape.of("decode", decode_tp_size, decode_pp_size, decode_dp_size),
    )
    raise typer.Exit(run_verify(options, as_json=as_json))


app.command(rich_help_panel=_MEASURE)(chaos)


@app.command(rich_help_panel=_TRY)
def doctor() -> None:
    """Show what this machine offers: versions, cores, memory, devices, transports, ports."""
    from splitserve.launch.doctor import run_doctor

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
        # Benchmarks start processes of their own and of others.
        with unwinding() if words[:1] == ["bench"] else nullcontext():
            code = run(app, words)
            if code == exit_code_of(signal.SIGINT):
                # The command line's library has turned KeyboardInterrupt into this code.
                sys.exit(code)
    except SplitserveError as error:
        typer.echo(f"error: {error.message}", err=True)
        code = error.exit_code
    sys.exit(code)
