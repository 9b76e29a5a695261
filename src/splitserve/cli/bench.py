"""The commands of `splitserve bench`."""

from __future__ import annotations

from typing import Annotated

import typer

from splitserve.cli.options import AppendOption, JsonOption, ModelArgument, QuickOption
from splitserve.config import DTYPES

bench_app = typer.Typer(name="bench", help="Measure this machine.", no_args_is_help=True)


@bench_app.command("main")
def bench_main(
    model: ModelArgument = "smollm2",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "float32",
    append_to: AppendOption = None,
    as_json: JsonOption = False,
    quick: QuickOption = False,
) -> None:
    """Throughput and time to first token: colocated, disaggregated and plain transformers. Takes minutes."""
    from splitserve.bench.figures import BenchOptions, run_bench

    options = BenchOptions(model=model, dtype=dtype, append_to=append_to, as_json=as_json, quick=quick)
    raise typer.Exit(run_bench(options))


@bench_app.command("transfer")
def bench_transfer(
    backend: Annotated[list[str] | None, typer.Option(help="Repeatable; default: all that are present.")] = None,
    append_to: AppendOption = None,
    as_json: JsonOption = False,
    quick: QuickOption = False,
) -> None:
    """Speed of each transport between two processes, beside its limit on this machine. Takes minutes.

    Limits: raw sockets (tcp, gloo) and memcpy (shm) in one piece, the bare library in the same pieces (the others).
    """
    from splitserve.bench.transfer import TransferBenchOptions, run_transfer_bench

    options = TransferBenchOptions(tuple(backend or ()), append_to=append_to, as_json=as_json, quick=quick)
    raise typer.Exit(run_transfer_bench(options))


@bench_app.command("serve")
def bench_serve(
    model: ModelArgument = "smollm2",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "float32",
    transfer_backend: Annotated[
        list[str] | None, typer.Option(help="Repeatable; default: tcp, and shm where it is present.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of each prompt.")] = 2048,
    runs: Annotated[int, typer.Option(min=1, help="Prompts measured on each system.")] = 5,
    append_to: AppendOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time to first token of a long prompt: colocated, and over each transport. Takes minutes."""
    from splitserve.bench.serve import ServeBenchOptions, run_serve_bench

    options = ServeBenchOptions(
        model=model,
        dtype=dtype,
        backends=tuple(transfer_backend or ()),
        prompt_tokens=prompt_tokens,
        runs=runs,
        append_to=append_to,
        as_json=as_json,
    )
    raise typer.Exit(run_serve_bench(options))
