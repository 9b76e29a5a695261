"""Options and arguments that several commands have, each with its one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from splitserve.config import DTYPES, SchedulePolicy

ModelArgument = Annotated[
    str, typer.Argument(help="A folder of safetensors, a .gguf file, a Hugging Face name, or the alias smollm2.")
]
DtypeOption = Annotated[str, typer.Option(help=f"auto, {', '.join(DTYPES)}.")]
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
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads of a worker's model.")]
ReservedTokensOption = Annotated[
    int, typer.Option(help="Tokens left free for each admitted request to grow by, when another is let in.")
]
HostMemoryOption = Annotated[
    str,
    typer.Option(
        metavar="BYTES", help="For the KV of requests that give way when the pool is full, e.g. 512M or 4G; 0: none."
    ),
]
PolicyOption = Annotated[
    SchedulePolicy,
    typer.Option(help="First come first served, longest prefix match, or shortest prompt first."),
]
PriorityOption = Annotated[bool, typer.Option("--enable-priority", help="Requests of larger `priority` go first.")]
RequestTimeoutOption = Annotated[
    float | None, typer.Option(help="Seconds a request may take that names no `timeout`; default: any.")
]
ReadyFileOption = Annotated[Path | None, typer.Option(help="Write a JSON file here when it serves.")]
AppendOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Markdown file that gets a section.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="Fewer and shorter runs.")]
ParentOption = Annotated[bool, typer.Option("--exit-with-parent", help="End when standard input ends.")]
