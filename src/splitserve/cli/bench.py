"""The commands of `splitserve bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from splitserve.cli.bench_growth import bench_growth, bench_scheduler, bench_startup
from splitserve.cli.bench_serve import bench_routing, bench_serve
from splitserve.cli.options import (
    AppendOption,
    AttentionOption,
    GraphBatchOption,
    JsonOption,
    ModelArgument,
    NoGraphOption,
    QuickOption,
    typed_again,
)
from splitserve.core.config import DTYPES
from splitserve.worker.checks import check_backend

bench_app = typer.Typer(name="bench", help="Benchmarks on this machine.", no_args_is_help=True, rich_markup_mode=None)


@bench_app.command("main")
def bench_main(
    ctx: typer.Context,
    model: ModelArgument = "smollm2",
    dtype: Annotated[str, typer.Option(help=f"Dtype of the model: {', '.join(DTYPES)}.")] = "float32",
    append_to: AppendOption = None,
    as_json: JsonOption = False,
    quick: QuickOption = False,
) -> None:
    """Measure throughput and TTFT: colocated, disaggregated and plain transformers. Takes minutes."""
    from splitserve.tools.bench.report import ReportOutput
    from splitserve.tools.bench.throughput import run_main_bench
    from splitserve.tools.bench.workload import FULL, QUICK

    output = ReportOutput(as_json, append_to)
    raise typer.Exit(run_main_bench(typed_again(ctx), model, dtype, QUICK if quick else FULL, output))


@bench_app.command("transfer")
def bench_transfer(
    ctx: typer.Context,
    backend: Annotated[
        list[str] | None, typer.Option(help="Transfer backend, repeatable. Default: all that are present.")
    ] = None,
    append_to: AppendOption = None,
    as_json: JsonOption = False,
    quick: QuickOption = False,
) -> None:
    """Measure each transport between two processes and compare it with its limit on this machine. Takes minutes.

    The limit is raw sockets (tcp, gloo) or memcpy (shm) with one piece, else the bare library with the same pieces.
    """
    from splitserve.tools.bench.report import ReportOutput
    from splitserve.tools.bench.transfer import run_transfer_bench
    from splitserve.tools.bench.transfer_plan import FULL, QUICK

    output = ReportOutput(as_json, append_to)
    raise typer.Exit(run_transfer_bench(typed_again(ctx), backend or [], QUICK if quick else FULL, output))


bench_app.command("serve")(bench_serve)
bench_app.command("routing")(bench_routing)
bench_app.command("growth")(bench_growth)
bench_app.command("scheduler")(bench_scheduler)
bench_app.command("startup")(bench_startup)


@bench_app.command("gpu")
def bench_gpu(
    ctx: typer.Context,
    attention_backend: AttentionOption = "auto",
    disable_cuda_graph: NoGraphOption = False,
    cuda_graph_max_bs: GraphBatchOption = 64,
    append_to: AppendOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure decode, prefill and KV transfer on one GPU and compare them with the limits of the card.

    The model is a random one of Llama 3 8B's shape. The GPU is the first one in CUDA_VISIBLE_DEVICES.
    """
    from splitserve.core.config import ModelConfig
    from splitserve.tools.bench.gpu import run_gpu_bench
    from splitserve.tools.bench.report import ReportOutput

    model = ModelConfig(
        attention_backend=attention_backend, cuda_graph_max_batch=0 if disable_cuda_graph else cuda_graph_max_bs
    )
    raise typer.Exit(run_gpu_bench(typed_again(ctx), model, ReportOutput(as_json, append_to)))


@bench_app.command("router")
def bench_router(
    ctx: typer.Context,
    connections: Annotated[int, typer.Option(min=1, help="Connections at once, for requests/s and chunks/s.")] = 32,
    requests: Annotated[int, typer.Option(min=1, help="Requests one after another per round, for the latency.")] = 500,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of each load on all connections.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds. In each, all routers take turns.")] = 5,
    peers: Annotated[bool, typer.Option(help="Measure mini_lb and sglang-router, too, if they are installed.")] = True,
    peers_python: Annotated[
        Path | None, typer.Option(metavar="PYTHON", help="Python interpreter with sglang-router. Default: this one.")
    ] = None,
    append_to: AppendOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare requests/s, added latency and streamed chunks/s of our router and of others before mock workers.

    Our router runs as `splitserve router --prefill URL PORT --decode URL` with default options. Figures are medians.
    """
    from splitserve.tools.bench.report import ReportOutput
    from splitserve.tools.bench.router import RouterBenchOptions, run_router_bench

    options = RouterBenchOptions(
        command=typed_again(ctx),
        connections=connections,
        num_requests=requests,
        seconds=seconds,
        rounds=rounds,
        with_peers=peers,
        peers_python=peers_python,
        output=ReportOutput(as_json, append_to),
    )
    raise typer.Exit(run_router_bench(options))


@bench_app.command("abuse")
def bench_abuse(
    ctx: typer.Context,
    model: ModelArgument = "smollm2",
    dtype: Annotated[str, typer.Option(help=f"Dtype of the model: {', '.join(DTYPES)}.")] = "bfloat16",
    attack: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run only this attack, repeatable. Default: all.")
    ] = None,
    duration: Annotated[
        float, typer.Option(min=1.0, help="Seconds that an attack continues without an answer.")
    ] = 15.0,
    append_to: AppendOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure streams of eight clients under hostile requests and connections. Exit code 1: an attack did harm.

    Harm is a gap of 1 s between two tokens, 300 MB more memory, a failed stream or an ended process. Takes minutes.
    """
    from splitserve.tools.bench.abuse import AbuseOptions, run_abuse_bench
    from splitserve.tools.bench.abuse_attacks import ATTACKS
    from splitserve.tools.bench.report import ReportOutput

    options = AbuseOptions(
        command=typed_again(ctx),
        model=model,
        dtype=dtype,
        attacks=tuple(attack or ATTACKS),
        duration=duration,
        output=ReportOutput(as_json, append_to),
    )
    raise typer.Exit(run_abuse_bench(options))


@bench_app.command("compare")
def bench_compare(
    ctx: typer.Context,
    model: ModelArgument = "smollm2",
    dtype: Annotated[str, typer.Option(help=f"Dtype of the model: {', '.join(DTYPES)}.")] = "bfloat16",
    system: Annotated[
        list[str] | None,
        typer.Option(
            help="System, repeatable: null, disaggregated, vllm-cpu, llama-cpp, transformers-serve. Default: all."
        ),
    ] = None,
    transfer_backend: Annotated[str, typer.Option(help="Transport of the KV cache in our system.")] = "tcp",
    runs: Annotated[
        int | None, typer.Option(min=1, help="Runs of each scenario. Figures are medians. Default: 3, with --quick 1.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds per request.")] = 300.0,
    peers: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Scripts of the other engines. Default: bench/peers of the checkout."),
    ] = None,
    append_to: AppendOption = None,
    as_json: JsonOption = False,
    quick: QuickOption = False,
) -> None:
    """Compare our servers with other engines, which are installed first. Takes half an hour or more."""
    from splitserve.tools.bench.compare import SYSTEMS, CompareOptions, run_compare
    from splitserve.tools.bench.report import ReportOutput

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
        output=ReportOutput(as_json, append_to),
    )
    raise typer.Exit(run_compare(options))
