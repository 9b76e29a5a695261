"""`splitserve bench serve`: one load on each system, and the TTFT of a long prompt on it while it is idle.

The systems are a colocated worker, then a pair over each backend, or a server that runs already. Those of one chunk
size run side by side, and one of them is asked at a time:
1. They start, and warm up with prompts of their own.
2. One long prompt after another, to each system by turns, so that what else the machine does hits all: TTFT with
   nothing else under way, set against the colocated worker's.
3. The prefill workers say what those hand-overs took and how much of that came after the last forward pass.
4. The load: the same requests for every system. Requests that fail are counted, and the command's exit code says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from splitserve.bench.backends import choose_backends
from splitserve.bench.load import LoadResult, ask, run_load
from splitserve.bench.load_figures import LoadFigures, Slo
from splitserve.bench.machine import OthersWatch, check_writable, describe_machine
from splitserve.bench.prompts import Encode, PromptMaker
from splitserve.bench.publish import publish
from splitserve.bench.serve_report import Handover, ServeFigures, ServeReport
from splitserve.bench.stats import StreamRecord, TtftFigures, mean
from splitserve.bench.stream import Endpoint, LoadError
from splitserve.bench.systems import Running, RunningServer, ServedSystem, Server
from splitserve.bench.workload import LoadPlan
from splitserve.config import DTYPES
from splitserve.engine.sources import resolve_model
from splitserve.errors import ConfigError
from splitserve.launch.console import progress
from splitserve.launch.local import num_cores
from splitserve.launch.transfers import Transfers, read_transfers
from splitserve.server.tokenizer import Tokenizer

MODES = ("null", "disaggregated")
# Measured where none is named, as far as they are present.
DEFAULT_BACKENDS = ("tcp", "shm")
# Seconds a prefill worker gets to count a hand-over whose first token the client has already.
_COUNT_TIMEOUT = 10.0
# Requests that are under way at once in an open loop, as far as the size of the KV pool goes.
_OPEN_LOOP_REQUESTS = 64
# Tokens of a pool that is made larger only for a single request.
_MAX_POOL_TOKENS = 65536


@dataclass(frozen=True, slots=True)
class ServeBenchOptions:
    # As it can be typed again.
    command: str
    model: str
    dtype: str
    # Of MODES; not looked at with `endpoint`.
    modes: tuple[str, ...]
    # Empty: DEFAULT_BACKENDS.
    backends: tuple[str, ...]
    # A server that runs already; None: ours are started.
    endpoint: Endpoint | None
    plan: LoadPlan
    num_warm_ups: int
    slos: tuple[Slo, ...]
    # Length of the prompts of which TTFT is measured one at a time, and how many.
    ttft_tokens: int
    ttft_runs: int
    # Prompt tokens a step, each measured; None: the worker's default.
    chunks: tuple[int | None, ...]
    # CPU threads of each worker; None: the cores divided fairly.
    threads: int | None
    # Those of one chunk size; else each starts when the one before has ended.
    side_by_side: bool
    # Markdown file that gets a section; None: none does.
    append_to: Path | None
    as_json: bool


@dataclass(frozen=True, slots=True)
class _System:
    mode: str
    # None: nothing is handed over.
    backend: str | None
    chunk: int | None
    server: Server


@dataclass(frozen=True, slots=True)
class _Idle:
    """None: not measured, or nothing was handed over."""

    ttft: TtftFigures | None
    transfers: Transfers | None


def run_serve_bench(options: ServeBenchOptions) -> int:
    """Returns the exit code: 1 where requests failed. Raises ConfigError, ClusterError, LoadError."""
    console = Console(stderr=True)
    systems = _systems(options, console)
    if options.append_to is not None:
        check_writable(options.append_to)
    tokenizer = Tokenizer.load(resolve_model(options.model))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    groups = _groups(systems, side_by_side=options.side_by_side)
    figures = [found for group in groups for found in _measure(group, options, encode, console)]
    report = ServeReport(options.model, options.dtype, options.command, describe_machine(), figures, options.slos)
    publish(report, as_json=options.as_json, append_to=options.append_to, console=console)
    return 1 if report.warn(console) else 0


def _groups(systems: Sequence[_System], *, side_by_side: bool) -> list[list[_System]]:
    """Those that run at once, in the order of the systems."""
    if not side_by_side:
        return [[system] for system in systems]
    return [[s for s in systems if s.chunk == chunk] for chunk in dict.fromkeys(s.chunk for s in systems)]


def _measure(
    systems: Sequence[_System], options: ServeBenchOptions, encode: Encode, console: Console
) -> list[ServeFigures]:
    """Of systems that run side by side. Raises ClusterError, LoadError."""
    plan, others = options.plan, OthersWatch()
    with ExitStack() as closing:
        started = [closing.enter_context(system.server.running(console)) for system in systems]
        show = closing.enter_context(progress(console, "warming up"))
        warm_up = plan.warm_up(encode, options.num_warm_ups)
        for running in started:
            if warm_up:
                asyncio.run(run_load(running.endpoint, warm_up, concurrency=len(warm_up))).complete()
        show("one prompt at a time")
        idles = _measure_idle(started, options, encode)
        results = []
        for system, running in zip(systems, started, strict=True):
            show(f"{system.server.name}: {plan.describe()}")
            requests = plan.requests(encode)
            load = run_load(running.endpoint, requests, concurrency=plan.concurrency, duration=plan.duration)
            results.append(asyncio.run(load))
    # A running server is no child of this process: what it takes cannot be told from what others take.
    taken = None if systems[0].mode == "external" else others.cores_taken()
    return [
        _figures(system, options, result, idle, taken)
        for system, result, idle in zip(systems, results, idles, strict=True)
    ]


def _figures(
    system: _System, options: ServeBenchOptions, result: LoadResult, idle: _Idle, cores_taken: float | None
) -> ServeFigures:
    plan = options.plan
    return ServeFigures(
        mode=system.mode,
        backend=system.backend,
        chunk_tokens=system.chunk,
        threads=system.server.threads,
        load_shape=plan.describe(),
        concurrency=plan.concurrency,
        request_rate=plan.request_rate,
        input_tokens=_typical([r.num_prompt_tokens for r in result.records], plan.input_tokens, plan),
        output_tokens=_typical([r.num_output_tokens for r in result.records], plan.output_tokens, plan),
        load=LoadFigures.of(result.records, result.num_failed, result.elapsed, options.slos),
        errors=result.errors,
        idle=idle.ttft,
        transfer=None if idle.transfers is None else Handover.of(idle.transfers),
        cores_taken_by_others=cores_taken,
    )


def _typical(lengths: Sequence[int], asked: int, plan: LoadPlan) -> int:
    """What was asked for, or what a trace brought on average."""
    return round(mean(lengths)) if plan.trace is not None and lengths else asked


def _measure_idle(systems: Sequence[Running], options: ServeBenchOptions, encode: Encode) -> list[_Idle]:
    """Raises LoadError."""
    if options.ttft_runs == 0:
        return [_Idle(None, None)] * len(systems)
    # Other prompts than the load's, the same for every system.
    prompts = [PromptMaker(encode, options.plan.seed + 2) for _ in systems]

    def one(i: int) -> StreamRecord:
        return ask(systems[i].endpoint, [prompts[i].make(options.ttft_tokens)], max_tokens=1)[0]

    for i in range(len(systems)):
        one(i)
    before = [_settled(system.prefill_url) for system in systems]
    rounds = [[one(i) for i in range(len(systems))] for _ in range(options.ttft_runs)]
    found = []
    for system, counted, records in zip(systems, before, zip(*rounds, strict=True), strict=True):
        transfers = None
        if system.prefill_url is not None and counted is not None:
            transfers = _counted(system.prefill_url, counted.count + options.ttft_runs) - counted
        found.append(_Idle(TtftFigures.of(options.ttft_tokens, records), transfers))
    return found


def _settled(prefill_url: str | None) -> Transfers | None:
    """When hand-overs that have reached their clients have been counted, too. None: no prefill worker."""
    if prefill_url is None:
        return None
    deadline = time.monotonic() + _COUNT_TIMEOUT
    found = read_transfers(prefill_url)
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if (now := read_transfers(prefill_url)) == found:
            break
        found = now
    return found


def _counted(prefill_url: str, count: int) -> Transfers:
    """After `count` hand-overs in all. Raises LoadError where they do not show."""
    deadline = time.monotonic() + _COUNT_TIMEOUT
    while (found := read_transfers(prefill_url)).count < count:
        if time.monotonic() > deadline:
            raise LoadError(f"{prefill_url} counts {found.count} hand-overs, {count} were made: see its log")
        time.sleep(0.05)
    return found


def _systems(options: ServeBenchOptions, console: Console) -> list[_System]:
    """For each chunk size the colocated one first. Raises ConfigError."""
    if options.endpoint is not None:
        return [_System("external", None, None, RunningServer("external", options.endpoint))]
    if options.dtype not in DTYPES:
        raise ConfigError(f"--dtype {options.dtype!r}: choose one of {', '.join(DTYPES)}")
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
