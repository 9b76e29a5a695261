"""`splitserve bench serve`: its options, and what they mean together."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitserve.cli.options import AppendOption, JsonOption, ModelArgument, named_json, typed_again
from splitserve.config import DTYPES
from splitserve.errors import ConfigError
from splitserve.router.args import parse_url

if TYPE_CHECKING:
    from splitserve.bench.stream import Endpoint
    from splitserve.bench.trace import Trace
    from splitserve.bench.workload import LoadPlan

_CONCURRENCY = 4
# Seconds that an open loop lasts where nothing says how long.
_OPEN_LOOP_SECONDS = 30.0


def bench_serve(
    ctx: typer.Context,
    model: ModelArgument = "smollm2",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "float32",
    mode: Annotated[
        list[str] | None, typer.Option(help="null (one colocated worker) or disaggregated; repeatable; default: both.")
    ] = None,
    transfer_backend: Annotated[
        list[str] | None, typer.Option(help="Repeatable; default: tcp, and shm where it is present.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Measure a running OpenAI-compatible server; MODEL is its tokenizer.")
    ] = None,
    served_model: Annotated[str | None, typer.Option(help="With --url; default: the first one served there.")] = None,
    prompt_format: Annotated[str, typer.Option(help="With --url: ids or text.")] = "ids",
    extra_body: Annotated[
        str | None, typer.Option(metavar="JSON", help="With --url: fields of each request; null leaves one out.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help=f"Closed loop: requests at once; default: {_CONCURRENCY}.")
    ] = None,
    request_rate: Annotated[float | None, typer.Option(help="Open loop: requests a second, Poisson arrivals.")] = None,
    burstiness: Annotated[
        float, typer.Option(help="Of the arrivals: 1 is Poisson, less comes in bursts, more is more regular.")
    ] = 1.0,
    input_tokens: Annotated[int, typer.Option(min=1, help="Of each prompt, random words.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of each answer; the end-of-text token ends none.")] = 64,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Default: 4 for each client, 30 s of an open loop, all of a trace.")
    ] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds after which no more requests are sent.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Lengths, times and shared prefixes: Mooncake's JSON Lines.")
    ] = None,
    trace_length_scale: Annotated[float, typer.Option(help="So many times the trace's tokens.")] = 1.0,
    trace_speed: Annotated[float, typer.Option(help="So many times the trace's requests a second.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    warmup_requests: Annotated[int, typer.Option(min=0, help="Sent together before anything is measured.")] = 2,
    slo: Annotated[
        list[str] | None, typer.Option(metavar="METRIC=MS", help="For goodput: ttft, itl, tpot or e2e; repeatable.")
    ] = None,
    ttft_tokens: Annotated[int, typer.Option(min=1, help="Prompts of the idle TTFT: their length.")] = 2048,
    ttft_runs: Annotated[int, typer.Option(min=0, help="And how many; 0: none.")] = 3,
    chunked_prefill_size: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompt tokens a step, each measured; repeatable.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of each worker; default: cores divided fairly.")] = None,
    side_by_side: Annotated[
        bool,
        typer.Option(
            "--side-by-side/--apart",
            help="Our own systems run all at once, one is asked at a time; or one after the other: less memory, but "
            "TTFTs of different minutes.",
        ),
    ] = True,
    append_to: AppendOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load on a server: colocated, over each transport, or one that runs already. Exit code 1: requests failed."""
    from splitserve.bench.load_figures import Slo
    from splitserve.bench.serve import MODES, ServeBenchOptions, run_serve_bench

    plan = make_plan(
        concurrency=concurrency,
        request_rate=request_rate,
        burstiness=burstiness,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        num_prompts=num_prompts,
        duration=duration,
        trace=make_trace(trace, num_prompts, trace_length_scale, trace_speed),
        seed=seed,
    )
    options = ServeBenchOptions(
        command=typed_again(ctx),
        model=model,
        dtype=dtype,
        modes=tuple(mode or MODES),
        backends=tuple(transfer_backend or ()),
        endpoint=None if url is None else _endpoint(url, served_model, prompt_format, extra_body),
        plan=plan,
        num_warm_ups=warmup_requests,
        slos=tuple(Slo.parse(text) for text in slo or ()),
        ttft_tokens=ttft_tokens,
        ttft_runs=ttft_runs,
        chunks=tuple(chunked_prefill_size or (None,)),
        threads=threads,
        side_by_side=side_by_side,
        append_to=append_to,
        as_json=as_json,
    )
    raise typer.Exit(run_serve_bench(options))


def make_plan(
    *,
    concurrency: int | None,
    request_rate: float | None,
    burstiness: float,
    input_tokens: int,
    output_tokens: int,
    num_prompts: int | None,
    duration: float | None,
    trace: Trace | None,
    seed: int,
) -> LoadPlan:
    """A closed loop where nothing says otherwise. Raises ConfigError."""
    from splitserve.bench.workload import LoadPlan

    positive = (("--request-rate", request_rate), ("--burstiness", burstiness), ("--duration", duration))
    for option, value in positive:
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{option} {value}: it must be above 0")
    if concurrency is not None and request_rate is not None:
        raise ConfigError("--concurrency is a closed loop, --request-rate an open one: give one of them")
    if concurrency is None and request_rate is None and trace is None:
        concurrency = _CONCURRENCY
    if num_prompts is None and duration is None and trace is None:
        num_prompts = 4 * concurrency if concurrency else math.ceil((request_rate or 0.0) * _OPEN_LOOP_SECONDS)
    return LoadPlan(
        concurrency, request_rate, burstiness, input_tokens, output_tokens, num_prompts, duration, seed, trace
    )


def make_trace(path: Path | None, count: int | None, length_scale: float, speed: float) -> Trace | None:
    """None without a file. Raises ConfigError."""
    from splitserve.bench.trace import Trace, read_trace

    for option, value in (("--trace-length-scale", length_scale), ("--trace-speed", speed)):
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{option} {value}: it must be above 0")
    return None if path is None else Trace(read_trace(path, count), length_scale, speed)


def _endpoint(url: str, served_model: str | None, prompt_format: str, extra_body: str | None) -> Endpoint:
    from splitserve.bench.stream import Endpoint
    from splitserve.bench.systems import first_model

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
