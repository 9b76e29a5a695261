"""Options and arguments that several commands have, each with its one help text."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from splitserve.config import ATTENTION_BACKENDS, DTYPES, KERNELS, QUANTIZATIONS, SchedulePolicy, SpeculativeAlgorithm
from splitserve.disaggregation.transports import USER_BACKENDS
from splitserve.errors import ConfigError

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
DeviceOption = Annotated[
    str, typer.Option(help="auto, cpu, cuda or cuda:N. Prefill and decode on GPUs need a transfer backend for that.")
]
BackendOption = Annotated[str, typer.Option(help=f"How the KV cache travels: {', '.join(USER_BACKENDS)}.")]
AttentionOption = Annotated[
    str, typer.Option(help=f"{', '.join(ATTENTION_BACKENDS)}. auto: FlashInfer on GPUs, where it is installed.")
]
NoGraphOption = Annotated[
    bool, typer.Option("--disable-cuda-graph", help="GPU: launch every kernel of a decode step anew.")
]
GraphBatchOption = Annotated[
    int, typer.Option("--cuda-graph-max-bs", min=1, help="GPU: largest decode batch that is replayed as a CUDA graph.")
]
HostOption = Annotated[str, typer.Option(help="Address to listen on.")]
LogLevelOption = Annotated[str, typer.Option(help="debug, info, warning, error or critical.")]
HandOverOption = Annotated[
    bool,
    typer.Option(help="With shm: workers compute in one KV pool, and pages change owner instead of being copied."),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", envvar="SPLITSERVE_CLUSTER_TOKEN_FILE", help="Its content lets prefill and decode workers join."
    ),
]
ApiKeysOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Clients must show a key of it: one a line, then a name. docs/routing.md."),
]
OperatorKeysOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The same for who adds, drains and removes workers, and for workers themselves."),
]
WorkerKeysOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Keys of who may call this worker: its routers (--worker-key-file) and you."),
]
RouterKeyOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Its first key is shown to the router, where that has --operator-key-file."),
]
KernelsOption = Annotated[
    str, typer.Option(help=f"{' or '.join(KERNELS)}: our own kernels where they are faster, or torch's everywhere.")
]
QuantizationOption = Annotated[
    str | None,
    typer.Option(
        help=f"On load: {', '.join(QUANTIZATIONS)}; int8 of the weights only, w8a8 of activations too. On a CPU, in "
        "bfloat16."
    ),
]
CpuAffinityOption = Annotated[
    str | None, typer.Option(metavar="CPUS", help="Cores the worker may use, e.g. 0-3,8. Default: all of this process.")
]
ThreadsOption = Annotated[
    int | None, typer.Option(help="CPU threads of each rank's model; default: the cores, divided among the ranks.")
]
DpSizeOption = Annotated[
    int, typer.Option(help="Schedulers of the worker, each with the model and a pool: data parallel ranks.")
]
TpSizeOption = Annotated[
    int, typer.Option(help="Tensor parallel ranks: processes that each hold a part of every matrix of the model.")
]
ExpertParallelOption = Annotated[
    bool,
    typer.Option(
        "--enable-expert-parallel", help="Tensor parallel ranks each hold some experts whole, not a part of every one."
    ),
]
DpAttentionOption = Annotated[
    bool,
    typer.Option(
        "--enable-dp-attention", help="Data parallel ranks share the experts of a model, and compute together."
    ),
]
PpSizeOption = Annotated[int, typer.Option(help="Pipeline stages: processes that each hold some layers of the model.")]
PpLayersOption = Annotated[
    str | None, typer.Option(metavar="N,N,...", help="Layers of each pipeline stage; default: as even as can be.")
]
NnodesOption = Annotated[
    int,
    typer.Option(help="Hosts that the ranks are dealt out to: `serve` runs on each of them, with equal options."),
]
NodeRankOption = Annotated[int, typer.Option(help="Which of them this is; 0 answers requests.")]
InitAddrOption = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Where node 0 waits for the others: its address, a free port.")
]
ReservedTokensOption = Annotated[
    int, typer.Option(help="Tokens left free for each admitted request to grow by, when another is let in.")
]
HostMemoryOption = Annotated[
    str,
    typer.Option(
        metavar="BYTES", help="For the KV of requests that give way when the pool is full, e.g. 512M or 4G; 0: none."
    ),
]
PrefixHostMemoryOption = Annotated[
    str,
    typer.Option(metavar="BYTES", help="Null, prefill: for prefixes that the pool has no room for, e.g. 4G; 0: none."),
]
PolicyOption = Annotated[
    SchedulePolicy,
    typer.Option(help="First come first served, longest prefix match, or shortest prompt first."),
]
PriorityOption = Annotated[bool, typer.Option("--enable-priority", help="Requests of larger `priority` go first.")]
RequestTimeoutOption = Annotated[
    float | None, typer.Option(help="Seconds a request may take that names no `timeout`; default: any.")
]
AlgorithmOption = Annotated[
    SpeculativeAlgorithm | None,
    typer.Option(help="Guess next tokens and verify several in a step: from the text, or by a draft model."),
]
NumDraftTokensOption = Annotated[int, typer.Option(help="Tokens guessed for a step of a request.")]
MaxMatchOption = Annotated[int, typer.Option(help="ngram: last tokens that are looked up, at most.")]
DraftModelOption = Annotated[
    str | None, typer.Option(metavar="MODEL", help="draft: a smaller model with the same vocabulary; also on prefill.")
]
KVEventsOption = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help='Publish what is cached, e.g. {"publisher": "zmq", "endpoint": "tcp://*:5557"}: docs/events.md.',
    ),
]
ReadyFileOption = Annotated[Path | None, typer.Option(help="Write a JSON file here when it serves.")]
AppendOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Markdown file that gets a section.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="Fewer and shorter runs.")]
ParentOption = Annotated[bool, typer.Option("--exit-with-parent", help="End when standard input ends.")]


def named_json(text: str, option: str) -> dict[str, Any]:
    """A JSON object. Raises ConfigError."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}: give a JSON object") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option} {text}: give a JSON object")
    return value


def typed_again(ctx: typer.Context) -> str:
    """The command with the options that were given, for a report's reader."""
    words = ctx.command_path.split()
    for param in ctx.command.params:
        value, source = ctx.params.get(str(param.name)), ctx.get_parameter_source(str(param.name))
        if source is None or source.name != "COMMANDLINE":
            continue
        if param.param_type_name == "argument":
            words.append(str(value))
        elif isinstance(value, bool):
            words.append((param.opts if value else param.secondary_opts)[0])
        else:
            for one in value if isinstance(value, list | tuple) else [value]:
                words += [param.opts[0], str(one)]
    return shlex.join(words)
