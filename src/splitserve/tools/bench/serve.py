"""`splitserve bench serve`: one load on each system, and the TTFT of a long prompt on the idle system.

The systems are a colocated worker and a pair over each backend, or a server that runs already. Those of one chunk size
run side by side, and one of them receives requests at a time:
1. They start and warm up with prompts of their own.
2. Long prompts are sent one after another, to the systems in turn, so that a disturbance of the machine affects all.
   The TTFT without other requests is compared with the colocated worker's.
3. The prefill workers report the times of those KV transfers, and the part after the last forward pass.
4. The load: the same requests for every system. Failed requests are counted and set the exit code.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from rich.console import Console

from splitserve.api.tokenizer import Tokenizer
from splitserve.core.config import check_dtype
from splitserve.core.errors import ConfigError
from splitserve.core.machine import num_cores
from splitserve.engine.sources import resolve_model
from splitserve.process.console import progress
from splitserve.tools.bench.load import Endpoint, ask, run_load
from splitserve.tools.bench.machine import OthersWatch, describe_machine
from splitserve.tools.bench.report import ReportOutput
from splitserve.tools.bench.serve_figures import Handover, LoadFigures, ServeFigures, Slo, serve_report
from splitserve.tools.bench.stats import StreamRecord, TtftFigures, mean
from splitserve.tools.bench.systems import Running, RunningServer, ServedSystem, Server, choose_backends
from splitserve.tools.bench.workload import Encode, LoadPlan, PromptMaker
from splitserve.tools.client import RequestFailedError
from splitserve.tools.metrics import Transfers, read_transfers

MODES = ("null", "disaggregated")
# Backends measured by default, if they are present.
DEFAULT_BACKENDS = ("tcp", "shm")
# Seconds for a prefill worker to count a KV transfer after the client has its first token.
_COUNT_TIMEOUT = 10.0
# Requests in flight at once in an open loop, to size the KV pool.
_OPEN_LOOP_REQUESTS = 64
# Maximum tokens of a pool, unless a single request needs more.
_MAX_POOL_TOKENS = 65536


@dataclass(frozen=True, slots=True)
class ServeBenchOptions:
    # Command line that repeats this benchmark.
    command: str
    model: str
    dtype: str
    # Names from MODES. Ignored with `endpoint`.
    modes: tuple[str, ...]
    # Empty: DEFAULT_BACKENDS.
    backends: tuple[str, ...]
    # Server that runs already. None: start our own.
    endpoint: Endpoint | None
    plan: LoadPlan
    num_warm_ups: int
    slos: tuple[Slo, ...]
    # Length and number of the prompts for the TTFT of an idle system.
    ttft_tokens: int
    ttft_runs: int
    # Prompt tokens per step, each measured. None: the worker's default.
    chunks: tuple[int | None, ...]
    # CPU threads of each worker. None: the cores divided evenly.
    threads: int | None
    # Whether systems of one chunk size run side by side. False: each starts after the end of the one before.
    side_by_side: bool
    output: ReportOutput


@dataclass(frozen=True, slots=True)
class _System:
    mode: str
    # None: no KV transfer.
    backend: str | None
    chunk: int | None
    server: Server


def run_serve_bench(options: ServeBenchOptions) -> int:
    """Run the benchmark and return the exit code: 1 if requests failed.

    Raises ConfigError, ClusterError, RequestFailedError.
    """
    console = Console(stderr=True)
    systems = _systems(options, console)
    options.output.check()
    tokenizer = Tokenizer.load(resolve_model(options.model))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    groups = _groups(systems, side_by_side=options.side_by_side)
    figures = [found for group in groups for found in _measure(group, options, encode, console)]
    report = serve_report(options.model, options.dtype, options.command, describe_machine(), figures, options.slos)
    options.output.publish(report, console)
    for message in report.remarks:
        console.print(message, style="bold red", markup=False, highlight=False, soft_wrap=True)
    return 1 if report.remarks else 0


def _groups(systems: Sequence[_System], *, side_by_side: bool) -> list[list[_System]]:
    """Return the groups of systems that run at once, in the order of the systems."""
    if not side_by_side:
        return [[system] for system in systems]
    return [[s for s in systems if s.chunk == chunk] for chunk in dict.fromkeys(s.chunk for s in systems)]


def _measure(
    systems: Sequence[_System], options: ServeBenchOptions, encode: Encode, console: Console
) -> list[ServeFigures]:
    """Measure systems that run side by side. Raises ClusterError, RequestFailedError."""
    plan, others = options.plan, OthersWatch()
    with ExitStack() as closing:
        started = [closing.enter_context(system.server.running(console)) for system in systems]
        show = closing.enter_context(progress(console, "warming up"))
        warm_up = plan.warm_up(encode, options.num_warm_ups)
        for running in started:
            if warm_up:
                asyncio.run(run_load(running.endpoint, warm_up, concurrency=len(warm_up))).complete()
        show("one prompt at a time")
        idle = _measure_idle(started, options, encode) if options.ttft_runs else [(None, None)] * len(systems)
        loads = []
        for system, running in zip(systems, started, strict=True):
            show(f"{system.server.name}: {plan.describe()}")
            requests, duration = plan.requests(encode), plan.duration or math.inf
            load = run_load(running.endpoint, requests, concurrency=plan.concurrency, duration=duration)
            loads.append(asyncio.run(load))
    # A running server is no child of this process, so its CPU time cannot be separated from that of others.
    taken = None if systems[0].mode == "external" else others.cores_taken()
    return [
        ServeFigures(
            mode=system.mode,
            backend=system.backend,
            chunk_tokens=system.chunk,
            threads=system.server.threads,
            load_shape=plan.describe(),
            concurrency=plan.concurrency,
            request_rate=plan.request_rate,
            input_tokens=_typical([r.num_prompt_tokens for r in load.records], plan.input_tokens, plan),
            output_tokens=_typical([r.num_output_tokens for r in load.records], plan.output_tokens, plan),
            load=LoadFigures.of(load.records, load.num_failed, load.elapsed, options.slos),
            errors=load.errors,
            idle=ttft,
            transfer=transfers,
            cores_taken_by_others=taken,
        )
        for system, load, (ttft, transfers) in zip(systems, loads, idle, strict=True)
    ]


def _typical(lengths: Sequence[int], asked: int, plan: LoadPlan) -> int:
    """Return the requested length, or for a trace the mean length."""
    return round(mean(lengths)) if plan.trace is not None and lengths else asked


def _measure_idle(
    systems: Sequence[Running], options: ServeBenchOptions, encode: Encode
) -> list[tuple[TtftFigures, Handover | None]]:
    """Measure the TTFT of each system, one prompt at a time, and its KV transfers. Raises RequestFailedError."""
    # The prompts differ from those of the load, and are the same for every system.
    prompts = [PromptMaker(encode, options.plan.seed + 2) for _ in systems]

    def one(i: int) -> StreamRecord:
        return ask(systems[i].endpoint, [prompts[i].make(options.ttft_tokens)], max_tokens=1)[0]

    for i in range(len(systems)):
        one(i)
    before = [None if system.prefill_url is None else _settled(system.prefill_url) for system in systems]
    rounds = [[one(i) for i in range(len(systems))] for _ in range(options.ttft_runs)]
    found = []
    for system, earlier, records in zip(systems, before, zip(*rounds, strict=True), strict=True):
        transfer = None
        if system.prefill_url is not None and earlier is not None:
            transfer = Handover.of(_counted(system.prefill_url, earlier.count + options.ttft_runs) - earlier)
        found.append((TtftFigures.of(options.ttft_tokens, records), transfer))
    return found


def _settled(prefill_url: str) -> Transfers:
    """Return the figures when all KV transfers of answered requests are counted."""
    deadline = time.monotonic() + _COUNT_TIMEOUT
    found = read_transfers(prefill_url)
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if (now := read_transfers(prefill_url)) == found:
            break
        found = now
    return found


def _counted(prefill_url: str, count: int) -> Transfers:
    """Return the figures after `count` KV transfers in total.

    Raises RequestFailedError if they are not counted in time.
    """
    deadline = time.monotonic() + _COUNT_TIMEOUT
    while (found := read_transfers(prefill_url)).count < count:
        if time.monotonic() > deadline:
            raise RequestFailedError(f"{prefill_url} counts {found.count} hand-overs, {count} were made: see its log")
        time.sleep(0.05)
    return found


def _systems(options: ServeBenchOptions, console: Console) -> list[_System]:
    """Return the systems, for each chunk size the colocated one first. Raises ConfigError."""
    if options.endpoint is not None:
        return [_System("external", None, None, RunningServer("external", options.endpoint))]
    check_dtype(options.dtype)
    if unknown := set(options.modes) - set(MODES):
        raise ConfigError(f"--mode {', '.join(sorted(unknown))}: choose of {', '.join(MODES)}")
    backends: list[str | None] = [None] if "null" in options.modes else []
    if "disaggregated" in options.modes:
        backends += choose_backends(options.backends, DEFAULT_BACKENDS, "--transfer-backend", console)
    return [
        _System("disaggregated" if backend else "null", backend, chunk, _server(options, chunk, backend))
        for chunk in options.chunks
        for backend in backends
    ]


def _server(options: ServeBenchOptions, chunk: int | None, backend: str | None) -> ServedSystem:
    longest, at_once = options.plan.longest, options.plan.concurrency or _OPEN_LOOP_REQUESTS
    # Decode keeps a reserve for each running request.
    pool_tokens = max(4 * options.ttft_tokens, 2 * longest, min(2 * at_once * longest, _MAX_POOL_TOKENS))
    num_pairs = 0 if backend is None else 1
    return ServedSystem(
        "null" if backend is None else f"disaggregated over {backend}",
        options.model,
        options.dtype,
        num_pairs=num_pairs,
        num_colocated=1 - num_pairs,
        threads_each=options.threads or max(1, num_cores() // (1 + num_pairs)),
        pool_tokens=pool_tokens,
        backend=backend or "tcp",
        worker_args=() if chunk is None else ("--chunked-prefill-size", str(chunk)),
    )
