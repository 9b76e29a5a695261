"""`splitserve bench serve` and `bench routing`: their options, and the loads that follow from them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitserve.cli.options import AppendOption, JsonOption, ModelArgument, named_json, typed_again
from splitserve.core.config import DTYPES
from splitserve.core.errors import ConfigError
from splitserve.router.args import parse_url
from splitserve.router.policies import POLICIES

if TYPE_CHECKING:
    from splitserve.tools.bench.load import Endpoint
    from splitserve.tools.bench.workload import LoadPlan, Trace

_CONCURRENCY = 4
# Default duration of an open loop, seconds.
_OPEN_LOOP_SECONDS = 30.0


_ModeOption = Annotated[
    list[str] | None,
    typer.Option(help="System, repeatable: null (one colocated worker) or disaggregated. Default: both."),
]
_BackendOption = Annotated[
    list[str] | None,
    typer.Option(help="Transport of the KV cache, repeatable. Default: tcp, and shm if it is present."),
]
_UrlOption = Annotated[
    str | None, typer.Option(help="Measure this running OpenAI-compatible server. MODEL is its tokenizer.")
]
_ServedOption = Annotated[
    str | None, typer.Option(help="With --url: model in requests. Default: the first one that the server lists.")
]
_BodyOption = Annotated[
    str | None, typer.Option(metavar="JSON", help="With --url: fields of each request. null removes a field.")
]
_ConcurrencyOption = Annotated[
    int | None, typer.Option(min=1, help=f"Closed loop: requests at once. Default: {_CONCURRENCY}.")
]
_BurstinessOption = Annotated[
    float, typer.Option(help="Open loop: 1 is Poisson arrivals, less gives bursts, more is more regular.")
]
_PromptsOption = Annotated[
    int | None, typer.Option(min=1, help="Requests. Default: 4 per client, 30 s of an open loop, or the trace.")
]
_TraceOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Trace of requests in Mooncake's JSON Lines, for lengths and times."),
]
_SloOption = Annotated[
    list[str] | None,
    typer.Option(metavar="METRIC=MS", help="Objective for goodput, repeatable. METRIC: ttft, itl, tpot or e2e."),
]
_ChunkOption = Annotated[
    list[int] | None, typer.Option(min=1, help="Prompt tokens per step, repeatable. Each is measured.")
]
_WorkerThreadsOption = Annotated[
    int | None, typer.Option(min=1, help="CPU threads per worker. Default: the cores, divided among the workers.")
]
_SideOption = Annotated[
    bool,
    typer.Option(
        "--side-by-side/--apart",
        help="Run our systems at once and send to one at a time, or run one after the other. The latter needs less "
        "memory, but its TTFTs are from different minutes.",
    ),
]


def bench_serve(
    ctx: typer.Context,
    model: ModelArgument = "smollm2",
    dtype: Annotated[str, typer.Option(help=f"Dtype of the model: {', '.join(DTYPES)}.")] = "float32",
    mode: _ModeOption = None,
    transfer_backend: _BackendOption = None,
    url: _UrlOption = None,
    served_model: _ServedOption = None,
    prompt_format: Annotated[str, typer.Option(help="With --url: form of prompts, ids or text.")] = "ids",
    extra_body: _BodyOption = None,
    concurrency: _ConcurrencyOption = None,
    request_rate: Annotated[float | None, typer.Option(help="Open loop: mean requests per second.")] = None,
    burstiness: _BurstinessOption = 1.0,
    input_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt of random words.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer. EOS is ignored.")] = 64,
    num_prompts: _PromptsOption = None,
    duration: Annotated[float | None, typer.Option(help="Seconds after which no request is sent.")] = None,
    trace: _TraceOption = None,
    trace_length_scale: Annotated[float, typer.Option(help="Factor on the tokens of the trace.")] = 1.0,
    trace_speed: Annotated[float, typer.Option(help="Factor on the requests per second of the trace.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrivals.")] = 0,
    warmup_requests: Annotated[int, typer.Option(min=0, help="Requests sent together before the measurement.")] = 2,
    slo: _SloOption = None,
    ttft_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt for the idle TTFT.")] = 2048,
    ttft_runs: Annotated[int, typer.Option(min=0, help="Prompts for the idle TTFT. 0: none.")] = 3,
    chunked_prefill_size: _ChunkOption = None,
    threads: _WorkerThreadsOption = None,
    side_by_side: _SideOption = True,
    append_to: AppendOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a server under load: colocated, over each transport, or a running one. Exit code 1: requests failed."""
    from splitserve.tools.bench.report import ReportOutput
    from splitserve.tools.bench.serve import MODES, ServeBenchOptions, run_serve_bench
    from splitserve.tools.bench.serve_figures import Slo
    from splitserve.tools.bench.workload import LoadPlan

    recorded = make_trace(trace, num_prompts, trace_length_scale, trace_speed)
    plan = LoadPlan(
        concurrency, request_rate, burstiness, input_tokens, output_tokens, num_prompts, duration, seed, recorded
    )
    options = ServeBenchOptions(
        command=typed_again(ctx),
        model=model,
        dtype=dtype,
        modes=tuple(mode or MODES),
        backends=tuple(transfer_backend or ()),
        endpoint=None if url is None else _endpoint(url, served_model, prompt_format, extra_body),
        plan=with_defaults(plan),
        num_warm_ups=warmup_requests,
        slos=tuple(Slo.parse(text) for text in slo or ()),
        ttft_tokens=ttft_tokens,
        ttft_runs=ttft_runs,
        chunks=tuple(chunked_prefill_size or (None,)),
        threads=threads,
        side_by_side=side_by_side,
        output=ReportOutput(as_json, append_to),
    )
    raise typer.Exit(run_serve_bench(options))


def with_defaults(plan: LoadPlan) -> LoadPlan:
    """Return `plan` with its defaults: a closed loop if no option chooses another load. Raises ConfigError."""
    positive = (("--request-rate", plan.request_rate), ("--burstiness", plan.burstiness), ("--duration", plan.duration))
    for option, value in positive:
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{option} {value}: it must be above 0")
    rate, concurrency, num_prompts = plan.request_rate, plan.concurrency, plan.num_prompts
    if concurrency is not None and rate is not None:
        raise ConfigError("--concurrency is a closed loop, --request-rate an open one: give one of them")
    if concurrency is None and rate is None and plan.trace is None:
        concurrency = _CONCURRENCY
    if num_prompts is None and plan.duration is None and plan.trace is None:
        num_prompts = 4 * concurrency if concurrency else math.ceil((rate or 0.0) * _OPEN_LOOP_SECONDS)
    return replace(plan, concurrency=concurrency, num_prompts=num_prompts)


def make_trace(path: Path | None, count: int | None, length_scale: float, speed: float) -> Trace | None:
    """Return the trace in the file `path`. None: no file was given. Raises ConfigError."""
    from splitserve.tools.bench.workload import Trace, read_trace

    for option, value in (("--trace-length-scale", length_scale), ("--trace-speed", speed)):
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{option} {value}: it must be above 0")
    return None if path is None else Trace(read_trace(path, count), length_scale, speed)


def _endpoint(url: str, served_model: str | None, prompt_format: str, extra_body: str | None) -> Endpoint:
    from splitserve.tools.bench.load import Endpoint
    from splitserve.tools.client import first_model

    if prompt_format not in ("ids", "text"):
        raise ConfigError(f"--prompt-format {prompt_format!r}: choose one of ids, text")
    body = {} if extra_body is None else named_json(extra_body, "--extra-body")
    address = parse_url(url).removesuffix("/v1")
    return Endpoint(
        address,
        served_model or first_model(address),
        prompt_as_text=prompt_format == "text",
        extra_body=body,
    )


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
