"""`splitserve bench routing`: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from splitserve.cli.bench_serve import make_trace
from splitserve.cli.options import AppendOption, JsonOption, ModelArgument, typed_again
from splitserve.core.config import DTYPES
from splitserve.core.errors import ConfigError
from splitserve.router.policies import POLICIES


def bench_routing(
    ctx: typer.Context,
    trace: Annotated[Path, typer.Option(metavar="FILE", help="Trace of requests in Mooncake's JSON Lines.")],
    model: ModelArgument = "smollm2",
    dtype: Annotated[str, typer.Option(help=f"Dtype of the model: {', '.join(DTYPES)}.")] = "bfloat16",
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"Routing policy, repeatable: {', '.join(POLICIES)}. Default: cache_aware and random."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Number of requests from the start of the trace.")] = 500,
    trace_length_scale: Annotated[
        float, typer.Option(help="Factor on the tokens of the trace. 1/32 makes its blocks pages of 16 tokens.")
    ] = 1 / 32,
    trace_speed: Annotated[float, typer.Option(help="Factor on the requests per second.")] = 1.0,
    prefill: Annotated[int, typer.Option(min=2, help="Prefill workers.")] = 2,
    pool_tokens: Annotated[int, typer.Option(min=1, help="Tokens in the KV pool of each prefill worker.")] = 100_000,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens per page of the KV pool.")] = 16,
    append_to: AppendOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare prefix hit rate and TTFT of routing policies with those of one worker that has the whole cache."""
    from splitserve.tools.bench.report import ReportOutput
    from splitserve.tools.bench.routing import RoutingBenchOptions, run_routing_bench

    policies = tuple(policy or ("cache_aware", "random"))
    if unknown := [name for name in policies if name not in POLICIES]:
        raise ConfigError(f"--policy {unknown[0]!r}: choose one of {', '.join(POLICIES)}")
    recorded = make_trace(trace, num_prompts, trace_length_scale, trace_speed)
    assert recorded is not None
    options = RoutingBenchOptions(
        command=typed_again(ctx),
        model=model,
        dtype=dtype,
        trace=recorded,
        policies=policies,
        num_workers=prefill,
        pool_tokens=pool_tokens,
        page_size=page_size,
        output=ReportOutput(as_json, append_to),
    )
    raise typer.Exit(run_routing_bench(options))
