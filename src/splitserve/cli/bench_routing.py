"""`splitserve bench routing`: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from splitserve.cli.bench_serve import make_trace
from splitserve.cli.options import AppendOption, JsonOption, ModelArgument, typed_again
from splitserve.config import DTYPES
from splitserve.errors import ConfigError
from splitserve.router.policies import POLICIES


def bench_routing(
    ctx: typer.Context,
    trace: Annotated[Path, typer.Option(metavar="FILE", help="Times and shared prefixes: Mooncake's JSON Lines.")],
    model: ModelArgument = "smollm2",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "bfloat16",
    policy: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(POLICIES)}; repeatable; default: cache_aware and random.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="The first of the trace.")] = 500,
    trace_length_scale: Annotated[
        float, typer.Option(help="So many times the trace's tokens; 1/32 makes its blocks pages of 16.")
    ] = 1 / 32,
    trace_speed: Annotated[float, typer.Option(help="So many times the trace's requests a second.")] = 1.0,
    prefill: Annotated[int, typer.Option(min=2, help="Prefill workers.")] = 2,
    pool_tokens: Annotated[int, typer.Option(min=1, help="Of each prefill worker's KV pool.")] = 100_000,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens.")] = 16,
    append_to: AppendOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prefix hit rate and TTFT of a trace under routing policies, beside one worker with all of the cache."""
    from splitserve.bench.routing import RoutingBenchOptions, run_routing_bench

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
        append_to=append_to,
        as_json=as_json,
    )
    raise typer.Exit(run_routing_bench(options))
