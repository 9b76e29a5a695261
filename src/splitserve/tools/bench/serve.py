"""`splitserve bench serve`: one load on each system, and the TTFT of a long prompt on the idle system.

The systems are a colocated worker and a pair over each backend, or a server that runs already. Those of one chunk size
run side by side, and one of them receives requests at a time:
1. They start and warm up with prompts of their own.
2. Long prompts are sent one after another, to the systems in turn, so that a disturbance of the machine affects all.
   The TTFT without other requests is compared with the colocated worker's.
3. The prefill workers report the times of those KV transfers, and the part after the last forward pass.
4. The load: the same requests for every system. Failed requests are counted and set the exit code.
5. With --trace-rounds: loads of the same lengths through two routers in front of the same workers, in alternating
   order. One stores no traces. The median of the ratios counts: both halves of a ratio are from the same moments.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from rich.console import Console

from splitserve.core.errors import ConfigError, OptionError, SplitserveError, clause
from splitserve.core.options import flag_of, named_values
from splitserve.engine.sources import resolve_model
from splitserve.process.console import progress
from splitserve.process.owned_folder import OwnedFolder
from splitserve.router.args import parse_url
from splitserve.tools.bench.load import Endpoint, StreamLoad, run_load
from splitserve.tools.bench.options import MODES, ServeBenchOptions
from splitserve.tools.bench.report import OthersWatch, Report
from splitserve.tools.bench.serve_figures import Slo, SystemRow, load_figures, serve_report, transfer_figures
from splitserve.tools.bench.stats import StreamRecord, mean, median, ttft_figures
from splitserve.tools.bench.systems import (
    Running,
    Server,
    choose_backends,
    encoder_of,
    our_server,
    running_router,
    running_server,
)
from splitserve.tools.bench.workload import Encode, LoadPlan, PromptMaker, Trace
from splitserve.tools.client import RequestFailedError, Transfers, first_model, read_transfers

# Backends measured by default, if they are present.
_DEFAULT_BACKENDS = ("tcp", "shm")
_CONCURRENCY = 4
# Default duration of an open loop, seconds.
_OPEN_LOOP_SECONDS = 30.0
# Seconds for a prefill worker to count a KV transfer after the client has its first token.
_COUNT_TIMEOUT = 10.0
# Requests in flight at once in an open loop, to size the KV pool.
_OPEN_LOOP_REQUESTS = 64
# Maximum tokens of a pool, unless a single request needs more.
_MAX_POOL_TOKENS = 65536
# Seconds until a router has its workers.
_READY_TIMEOUT = 60.0
# Seeds of the warm-up and of the idle TTFT are the two after that of the load.
_FIRST_SEED = 3
# Options of the systems that this command starts, and of the server of --url.
_OWN_SYSTEM_OPTIONS: Sequence[str] = ("mode", "transfer_backend", "chunked_prefill_size", "trace_rounds", "threads")
_URL_OPTIONS: Sequence[str] = ("served_model", "prompt_format", "extra_body", "header")


@dataclass(frozen=True, slots=True)
class _System:
    mode: str
    # None: no KV transfer.
    backend: str | None
    # Prompt tokens per step. None: the worker's default.
    chunk: int | None
    server: Server


def bench_serve(options: ServeBenchOptions, console: Console) -> Report:
    """Measure all systems and return the report, which has failed if requests failed.

    Raises ConfigError, ClusterError, RequestFailedError.
    """
    slos = [Slo.parse(text) for text in options.slo]
    plan = plan_of(options)
    systems = _systems(options, plan, console)
    encode = encoder_of(resolve_model(options.model))
    groups = _groups(systems) if options.side_by_side else [[system] for system in systems]
    rows = [row for group in groups for row in _measure(group, plan, encode, console)]
    return serve_report(options, plan.describe(), rows, slos)


def plan_of(options: ServeBenchOptions) -> LoadPlan:
    """Return the load: a closed loop if no option chooses another one. Raises ConfigError."""
    rate, concurrency, num_prompts = options.request_rate, options.concurrency, options.num_prompts
    if concurrency is not None and rate is not None:
        raise ConfigError("--concurrency is a closed loop, --request-rate an open one: give one of them")
    trace = None
    if options.trace is not None:
        trace = Trace.read(options.trace, num_prompts, options.trace_length_scale, options.trace_speed)
    elif concurrency is None and rate is None:
        concurrency = _CONCURRENCY
    if num_prompts is None and options.duration is None and trace is None:
        num_prompts = 4 * concurrency if concurrency else math.ceil((rate or 0.0) * _OPEN_LOOP_SECONDS)
    default = 0 if options.url is None else secrets.randbelow(1 << 16)
    seed = default if options.seed is None else options.seed
    return LoadPlan(
        msgspec.structs.replace(options, concurrency=concurrency, num_prompts=num_prompts, seed=seed), trace
    )


def _groups(systems: Sequence[_System]) -> list[list[_System]]:
    """Return the groups of systems that run side by side, in the order of the systems."""
    return [[s for s in systems if s.chunk == chunk] for chunk in dict.fromkeys(s.chunk for s in systems)]


def _measure(systems: Sequence[_System], plan: LoadPlan, encode: Encode, console: Console) -> list[SystemRow]:
    """Measure systems that run side by side. Raises ClusterError, RequestFailedError."""
    options, others = plan.options, OthersWatch()
    slos = [Slo.parse(text) for text in options.slo]
    with ExitStack() as closing:
        started = [closing.enter_context(system.server.running(console)) for system in systems]
        show = closing.enter_context(progress(console, "warming up"))
        warm_up = plan.warm_up(encode)
        for running in started:
            if warm_up:
                asyncio.run(run_load(running.endpoint, warm_up, concurrency=len(warm_up))).complete()
        if options.ttft_runs:
            show("one prompt at a time")
        idle = _measure_idle(started, plan, encode, len(warm_up))
        loads = []
        for system, running in zip(systems, started, strict=True):
            show(f"{system.server.name}: {plan.describe()}")
            loads.append(_load(running.endpoint, plan, encode))
        if options.trace_rounds:
            show("the load with and without traces")
        costs = [trace_cost(running, plan, encode) for running in started]
    # A running server is no child of this process, so its CPU time cannot be separated from that of others.
    taken = None if systems[0].mode == "external" else others.cores_taken()
    return [
        {
            "mode": system.mode,
            "transfer_backend": system.backend,
            "concurrency": options.concurrency,
            **_lengths(load.records, plan),
            **load_figures(load.records, load.errors, load.elapsed, slos),
            "request_rate": options.request_rate,
            "seed": plan.seed,
            "chunked_prefill_size": system.chunk,
            "threads": system.server.threads,
            "cores_taken_by_others": taken,
            "trace_cost": cost,
            **figures,
        }
        for system, load, cost, figures in zip(systems, loads, costs, idle, strict=True)
    ]


def _load(endpoint: Endpoint, plan: LoadPlan, encode: Encode) -> StreamLoad:
    limits = {"concurrency": plan.options.concurrency, "duration": plan.options.duration or math.inf}
    return asyncio.run(run_load(endpoint, plan.requests(encode), **limits))


def _lengths(records: Sequence[StreamRecord], plan: LoadPlan) -> dict[str, int]:
    """Return the requested tokens, or for a trace their means."""
    if plan.trace is None or not records:
        return {"input_tokens": plan.options.input_tokens, "output_tokens": plan.options.output_tokens}
    return {
        "input_tokens": round(mean([r.num_prompt_tokens for r in records])),
        "output_tokens": round(mean([r.num_output_tokens for r in records])),
    }


def _measure_idle(
    systems: Sequence[Running], plan: LoadPlan, encode: Encode, num_warm_ups: int
) -> list[dict[str, Any]]:
    """Measure the TTFT of each system, one prompt at a time, and its KV transfers.

    `num_warm_ups`: requests that each system has answered before. Raises RequestFailedError.
    """
    options = plan.options
    if not options.ttft_runs:
        return [{"idle_ttft": None, "transfer": None}] * len(systems)
    # The prompts differ from those of the load, and are the same for every system.
    prompts = [PromptMaker(encode, plan.seed + 2) for _ in systems]

    def one_each() -> list[StreamRecord]:
        return [
            system.endpoint.ask([maker.make(options.ttft_tokens)], max_tokens=1)[0]
            for system, maker in zip(systems, prompts, strict=True)
        ]

    one_each()
    before = [s.prefill_url and _transfers(s.prefill_url, num_warm_ups + 1) for s in systems]
    runs = [one_each() for _ in range(options.ttft_runs)]
    found = []
    for system, earlier, records in zip(systems, before, zip(*runs, strict=True), strict=True):
        transfer = None
        if system.prefill_url and earlier:
            transfer = transfer_figures(_transfers(system.prefill_url, earlier.count + options.ttft_runs) - earlier)
        idle = ttft_figures([[r] for r in records]) | {"num_prompt_tokens": options.ttft_tokens}
        found.append({"idle_ttft": idle, "transfer": transfer})
    return found


def _transfers(prefill_url: str, count: int) -> Transfers:
    """Return the figures after `count` KV transfers in total. A worker counts one shortly after its first token.

    Raises RequestFailedError if they are not counted in time.
    """
    deadline = time.monotonic() + _COUNT_TIMEOUT
    while (found := read_transfers(prefill_url)).count < count:
        if time.monotonic() > deadline:
            raise RequestFailedError(f"{prefill_url} counts {found.count} KV transfers, {count} were made: see its log")
        time.sleep(0.05)
    return found


def _systems(options: ServeBenchOptions, plan: LoadPlan, console: Console) -> list[_System]:
    """Return the systems, for each chunk size the colocated one first. Raises ConfigError."""
    if options.url is None:
        names, problem = _URL_OPTIONS, "is for the server of --url: give --url, or leave it out"
    else:
        names = _OWN_SYSTEM_OPTIONS
        problem = "applies to systems that this command starts: leave it out, or leave out --url"
    for name in names:
        if (getattr(options, name) or None) != (getattr(ServeBenchOptions(), name) or None):
            raise OptionError(flag_of(name), problem)
    if options.url is not None:
        return [_System("external", None, None, running_server("external", _endpoint(options, options.url)))]
    modes = options.mode or MODES
    backends: list[str | None] = [None] if "null" in modes else []
    if "disaggregated" in modes:
        backends += choose_backends(options.transfer_backend, _DEFAULT_BACKENDS, "--transfer-backend", console)
    return [
        _System("disaggregated" if backend else "null", backend, chunk, _server(options, plan, chunk, backend))
        for chunk in options.chunked_prefill_size or (None,)
        for backend in backends
    ]


def _endpoint(options: ServeBenchOptions, url: str) -> Endpoint:
    headers = named_values(options.header, "--header")
    try:
        body = msgspec.json.decode(options.extra_body or "{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise OptionError("--extra-body", f"{options.extra_body}: {clause(error)}; give a JSON object") from error
    address = parse_url(url).removesuffix("/v1")
    model = options.served_model or first_model(address)
    return Endpoint(address, model, options.prompt_format == "text", body, headers)


def _server(options: ServeBenchOptions, plan: LoadPlan, chunk: int | None, backend: str | None) -> Server:
    longest, at_once = plan.longest, plan.options.concurrency or _OPEN_LOOP_REQUESTS
    # Decode keeps a reserve for each running request.
    pool_tokens = max(4 * options.ttft_tokens, 2 * longest, min(2 * at_once * longest, _MAX_POOL_TOKENS))
    return our_server(
        "null" if backend is None else f"disaggregated over {backend}",
        options,
        options.threads,
        pool_tokens,
        is_pair=backend is not None,
        backend=backend or "tcp",
        worker_args=() if chunk is None else ("--chunked-prefill-size", str(chunk)),
    )


def trace_cost(running: Running, plan: LoadPlan, encode: Encode) -> dict[str, Any] | None:
    """Return the ratios of all rounds and their median. None: no rounds are requested.

    Raises ClusterError, RequestFailedError.
    """
    options = plan.options
    if not options.trace_rounds:
        return None

    with ExitStack() as stack:
        folder = stack.enter_context(OwnedFolder())
        endpoints = []
        for name, args in (("traces", ()), ("no-traces", ("--trace-records", "0"))):
            router = stack.enter_context(running_router(name, [*running.router_args, *args], folder))
            endpoints.append(replace(running.endpoint, url=router.url))
            _warm_up(endpoints[-1], plan, encode)
        ratios = []
        for number in range(options.trace_rounds):
            rates = [0.0, 0.0]
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                seed = plan.seed + _FIRST_SEED + 2 * number + which
                part = replace(plan, options=msgspec.structs.replace(options, seed=seed))
                done = _load(endpoints[which], part, encode)
                rates[which] = sum(record.num_output_tokens for record in done.complete()) / done.elapsed
            ratios.append(rates[0] / rates[1])
    return cost_figures(ratios)


def cost_figures(ratios: Sequence[float]) -> dict[str, Any]:
    """Return the ratios, their median, and the quartiles as a measure of their spread."""
    ordered, quarter = sorted(ratios), len(ratios) // 4
    quartiles = {"ratio_low": ordered[quarter], "ratio_high": ordered[-1 - quarter]}
    return {"ratio": median(ratios), **quartiles, "ratios": list(ratios)}


def _warm_up(endpoint: Endpoint, plan: LoadPlan, encode: Encode) -> None:
    """Send warm-up requests until the router has its workers. Raises SplitserveError."""
    deadline = time.monotonic() + _READY_TIMEOUT
    requests = plan.warm_up(encode) or list(plan.requests(encode))[:1]
    while (done := asyncio.run(run_load(endpoint, requests, concurrency=len(requests)))).errors:
        if time.monotonic() > deadline:
            raise SplitserveError(f"{endpoint.url} does not answer: {next(iter(done.errors))}")
        time.sleep(0.25)
