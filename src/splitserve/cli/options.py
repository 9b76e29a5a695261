"""Options and arguments that several commands share, with their help texts."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from splitserve.cli.derive import described_like, like
from splitserve.core.config import ModelConfig, ServerConfig, WorkerConfig
from splitserve.core.options import option_of
from splitserve.core.parallel import ParallelConfig
from splitserve.tools.options import VerifyOptions

ModelArgument = Annotated[str, typer.Argument(help=option_of(VerifyOptions, "model").help)]
DtypeOption = Annotated[str, like(ModelConfig, "dtype")]
HandOverOption = Annotated[
    bool,
    typer.Option(help="With shm: workers compute in one KV pool, and pages change owner instead of being copied."),
]
RouterKeyOption = Annotated[Path | None, like(ServerConfig, "router_key_file")]
ThreadsOption = Annotated[int | None, like(ModelConfig, "threads")]
# For pools of workers, such as --prefill-tp-size.
DpSizeOption = Annotated[int, described_like(WorkerConfig, "dp_size")]
TpSizeOption = Annotated[int, described_like(ParallelConfig, "tp_size")]
PpSizeOption = Annotated[int, described_like(ParallelConfig, "pp_size")]
ReadyFileOption = Annotated[Path | None, typer.Option(help="Write a JSON file here when ready.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")]
ParentOption = Annotated[bool, typer.Option("--exit-with-parent", help="End when standard input ends.")]


def typed_again(ctx: typer.Context) -> str:
    """Return the command line with the given options, to repeat a run."""
    words = ctx.command_path.split()
    for param in ctx.command.params:
        value, source = ctx.params.get(str(param.name)), ctx.get_parameter_source(str(param.name))
        if source is None or source.name != "COMMANDLINE":
            continue
        words += words_of(param, value)
    return shlex.join(words)


def words_of(param: Any, value: Any) -> list[str]:
    """Return a parameter and its value as words of a command line."""
    if param.param_type_name == "argument":
        return [str(value)]
    if isinstance(value, bool):
        return [(param.opts if value else param.secondary_opts)[0]]
    values = value if isinstance(value, list | tuple) else [value]
    return [word for one in values for word in (param.opts[0], str(one))]
