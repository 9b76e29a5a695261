"""`splitserve bench gpu`."""

from __future__ import annotations

import typer

from splitserve.cli.options import (
    AppendOption,
    AttentionOption,
    GraphBatchOption,
    JsonOption,
    NoGraphOption,
    typed_again,
)


def bench_gpu(
    ctx: typer.Context,
    attention_backend: AttentionOption = "auto",
    disable_cuda_graph: NoGraphOption = False,
    cuda_graph_max_bs: GraphBatchOption = 64,
    append_to: AppendOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decode, prefill and hand-over on one GPU beside what the card can do, by a random model of Llama 3 8B's shape.

    On the first that CUDA_VISIBLE_DEVICES leaves.
    """
    from splitserve.bench.gpu import GpuBenchOptions, run_gpu_bench

    options = GpuBenchOptions(
        command=typed_again(ctx),
        attention_backend=attention_backend,
        max_graph_batch=0 if disable_cuda_graph else cuda_graph_max_bs,
        append_to=append_to,
        as_json=as_json,
    )
    raise typer.Exit(run_gpu_bench(options))
