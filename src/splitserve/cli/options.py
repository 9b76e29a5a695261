"""Options and arguments that several commands share, with their help texts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from splitserve.core.config import ATTENTION_BACKENDS, DTYPES
from splitserve.core.errors import ConfigError, clause
from splitserve.transfer.transports import USER_BACKENDS

QUANTIZATION_HELP = "Quantize on load: int8 the weights, w8a8 activations, too. On a CPU, in bfloat16."
ModelArgument = Annotated[
    str, typer.Argument(help="A folder of safetensors, a .gguf file, a Hugging Face name, or the alias smollm2.")
]
DtypeOption = Annotated[
    str,
    typer.Option(
        help=f"auto, {', '.join(DTYPES)}. auto: the checkpoint's dtype; on a CPU bfloat16 if our kernels compute it or "
        "--quantization needs it, else float32."
    ),
]
BackendOption = Annotated[str, typer.Option(help=f"Transport of the KV cache: {', '.join(USER_BACKENDS)}.")]
AttentionOption = Annotated[
    str, typer.Option(help=f"{', '.join(ATTENTION_BACKENDS)}. auto: FlashInfer on GPUs, if it is installed.")
]
NoGraphOption = Annotated[
    bool,
    typer.Option(
        "--disable-cuda-graph", help="On GPUs: launch each kernel of a decode step instead of replaying a CUDA graph."
    ),
]
GraphBatchOption = Annotated[
    int,
    typer.Option("--cuda-graph-max-bs", min=1, help="On GPUs: largest decode batch that is replayed as a CUDA graph."),
]
HandOverOption = Annotated[
    bool,
    typer.Option(help="With shm: workers compute in one KV pool, and pages change owner instead of being copied."),
]
RouterKeyOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="File with the key for a router that has --operator-key-file. The first key is sent."
    ),
]
ThreadsOption = Annotated[
    int | None, typer.Option(help="CPU threads per rank. Default: the cores, divided among the ranks.")
]
DpSizeOption = Annotated[
    int, typer.Option(help="Data parallel ranks: schedulers that each have the whole model and a KV pool.")
]
TpSizeOption = Annotated[
    int, typer.Option(help="Tensor parallel ranks: processes that each hold a shard of every matrix.")
]
PpSizeOption = Annotated[int, typer.Option(help="Pipeline stages: processes that each hold some layers.")]
ReadyFileOption = Annotated[Path | None, typer.Option(help="Write a JSON file here when ready.")]
AppendOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Markdown file to append a section to.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="Make fewer and shorter runs.")]
ParentOption = Annotated[bool, typer.Option("--exit-with-parent", help="End when standard input ends.")]


def named_json(text: str, option: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ConfigError."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {clause(error)}; give a JSON object") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option} {text}: give a JSON object")
    return value


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
