"""`splitserve bench growth`: growth of step time with batch and context, and of scheduler time with waiting requests.

1. The engine alone, in this process. Its pool holds `max_batch` short contexts, or one long one. A decode step computes
   the last token of each request, and samples the next. A prompt is computed in chunks, as by the scheduler.
2. The scheduler alone, in this process, with a model that takes no time.
   turn: one decode step of a full running batch while the requests wait for pages: receive, plan, commit, send.
   queue: the requests arrive at once, wait, run and end. The total time.
   abort: all waiting requests are aborted at once, in random order.
3. Each series gets a verdict: whether its time grows faster than its work.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from rich.console import Console

from splitserve.core.config import CacheConfig, ModelConfig, SchedulerConfig
from splitserve.core.errors import ConfigError
from splitserve.core.machine import num_cores
from splitserve.core.messages import AbortRequest
from splitserve.engine.build import build_engine
from splitserve.process.settings import collect_rarely
from splitserve.tools.bench.engine_steps import PAGE_SIZE, EngineSteps, prompt_flops
from splitserve.tools.bench.options import GrowthBenchOptions
from splitserve.tools.bench.report import OthersWatch, Report
from splitserve.tools.bench.scheduler import InstantEngine, InstantWorker, requests
from splitserve.tools.bench.series import TOLERANCE, Series, SeriesPoint, doublings, measure
from splitserve.tools.bench.stats import seconds_of

# Prompts take long: one run of a prompt per this many runs of a step.
_STEPS_A_PROMPT = 3
_WAITING = (10, 100, 1_000, 10_000)
_LEGEND = (
    "Times: medians (min-max) of the repeats. Growth: time ~ work ^ growth from the size before to this one; 0 costs "
    f"nothing more, 1 grows with the work. Faster than its work: a unit of work costs over {TOLERANCE:g} x what it "
    "cost at a smaller size."
)
# Number of cores busy with other work that makes the figures unreliable, and the note for the report.
_BUSY_CORES = 0.2
_BUSY_NOTE = (
    "**The machine was not idle: long steps suffer more from that than short ones, so no verdict is certain.** "
)
_PROMPT_TOKENS = 32
# Requests that decode while others wait, and their output tokens: few enough that admission reserves all of them.
_NUM_RUNNING = 32
_RUNNING_TOKENS = 480
# Running requests at a time while a whole queue is served. Less than the shortest queue, so that batches are similar.
_NUM_SERVED = 8


@dataclass(frozen=True, slots=True)
class StepSizes:
    repeats: int
    max_batch: int = 256
    # Context tokens of each request while the batch grows, and the first context length of the other series.
    short_context: int = 128
    # Limited to the model's context.
    max_context: int = 8192
    chunk_tokens: int = 2048


def bench_growth(options: GrowthBenchOptions, console: Console) -> Report:
    """Measure engine and scheduler and return the report. Raises ConfigError, ModelLoadError."""
    model = ModelConfig(model=options.model, dtype=options.dtype, device="cpu", threads=options.threads or num_cores())
    sizes, waiting = sizes_for(options)
    others = OthersWatch()
    series = measure_growth(model, sizes, waiting, console)
    return growth_report(model, others.cores_taken(), series)


def sizes_for(options: GrowthBenchOptions) -> tuple[StepSizes, tuple[int, ...]]:
    """Return the sizes of steps and the numbers of waiting requests."""
    if options.quick:
        return StepSizes(max_batch=64, max_context=2048, repeats=options.repeats or 3), _WAITING[:-1]
    return StepSizes(repeats=options.repeats or 9), _WAITING


def measure_growth(model: ModelConfig, sizes: StepSizes, waiting: Sequence[int], console: Console) -> list[Series]:
    with console.status("steps of the engine") as status:
        series = measure_steps(model, sizes)
        status.update("turns of the scheduler")
        return series + measure_scheduler(waiting, sizes.repeats)


def growth_report(model: ModelConfig, cores_taken: float, series: Sequence[Series]) -> Report:
    """Return the report. JSON has times in seconds."""
    return Report(
        title=f"How step time grows: {model.model} in {model.dtype}",
        setting=f"{model.model} in {model.dtype}, {model.threads} threads",
        cores_taken_by_others=cores_taken,
        legend=(_BUSY_NOTE if cores_taken > _BUSY_CORES else "") + _LEGEND,
        figures={
            "model": model.model,
            "dtype": model.dtype,
            "threads": model.threads,
            "series": [s.to_json() for s in series],
        },
        tables=[s.table() for s in series],
        series=series,
    )


def measure_steps(model: ModelConfig, sizes: StepSizes) -> list[Series]:
    """Measure all series of a model. Raises ModelLoadError or ConfigError."""
    most_tokens, chunk = max(sizes.max_batch * sizes.short_context, sizes.max_context), sizes.chunk_tokens
    with closing(build_engine(model, CacheConfig(page_size=PAGE_SIZE, max_total_tokens=most_tokens))) as built:
        longest = min(sizes.max_context, built.max_total_tokens_per_request)
        if longest < 2 * sizes.short_context:
            raise ConfigError(f"contexts of {longest} tokens are too short to see anything grow: take another model")
        steps = EngineSteps(built, long_tokens=longest, num_short=sizes.max_batch, short_tokens=sizes.short_context)
        batches = doublings(1, sizes.max_batch)
        contexts = doublings(sizes.short_context, longest)
        return [
            Series(
                "decode step by batch size",
                f"each with {sizes.short_context:,} tokens of context",
                "sequences",
                "sequence",
                "ms",
                measure(batches, float, lambda size: steps.seconds(steps.decode(size)), sizes.repeats),
            ),
            Series(
                "decode step by context length",
                "one sequence",
                "tokens",
                "1,000 tokens of context",
                "ms",
                measure(
                    contexts,
                    lambda size: size / 1000,
                    lambda size: steps.seconds(steps.part(size - 1, size, size)),
                    sizes.repeats,
                ),
            ),
            Series(
                "prefill by prompt length",
                f"one sequence, steps of up to {chunk:,} tokens",
                "tokens",
                "GFLOP",
                "ms",
                measure(
                    contexts,
                    lambda size: prompt_flops(steps.loaded, size) / 1e9,
                    lambda size: steps.seconds(*steps.prompt(size, chunk)),
                    max(1, sizes.repeats // _STEPS_A_PROMPT),
                    warm_ups=1,
                ),
            ),
        ]


def measure_scheduler(waiting: Sequence[int], repeats: int) -> list[Series]:
    """Measure the real scheduler with a model that takes no time."""
    running = f"{_NUM_RUNNING} requests decode meanwhile"

    def series(name: str, conditions: str, points: list[SeriesPoint]) -> Series:
        return Series(f"scheduler: {name}", conditions, "waiting requests", "waiting request", "µs", points)

    # A single turn is too short for the clock. One extra round warms up, and the running requests must not end.
    turns = max(1, (_RUNNING_TOKENS - 2) // (repeats + 1))
    # Use the garbage collector as a scheduler process does.
    with collect_rarely():
        workers = {size: _busy_worker(size) for size in waiting}
        return [
            series("one turn", running, measure(waiting, float, lambda size: _turn(workers[size], turns), repeats)),
            series(
                "arrive, wait, run, end",
                f"2 tokens of output each, {_NUM_SERVED} at a time",
                measure(waiting, float, _queue, repeats),
            ),
            series("abort all", running, measure(waiting, float, _abort, repeats)),
        ]


def _turn(worker: InstantWorker, turns: int) -> float:
    began = time.perf_counter()
    for _ in range(turns):
        worker.turn()
    return (time.perf_counter() - began) / turns


def _queue(size: int) -> float:
    """Return the seconds to serve a queue. The prefix cache is full at first, as in a worker after some time."""
    num_pages = 16 * _NUM_SERVED
    worker = _worker(num_pages, size, _NUM_SERVED)
    for name, count in (("earlier", num_pages), ("waiting", size)):
        worker.submit(requests(name, count, _PROMPT_TOKENS, 2))
        began = time.perf_counter()
        worker.run_until(lambda: not worker.inbox.messages and worker.scheduler.role.is_idle())
    return time.perf_counter() - began


def _abort(size: int) -> float:
    worker = _busy_worker(size)
    rids = [message.rid for message in requests("waiting", size, 1, 1)]
    random.Random(0).shuffle(rids)
    worker.submit(AbortRequest(rid=rid) for rid in rids)
    return seconds_of(worker.scheduler.receive)


def _busy_worker(num_waiting: int) -> InstantWorker:
    """Return a worker in which running requests have reserved all pages and `num_waiting` others wait."""
    pages_each = -(-(_PROMPT_TOKENS + _RUNNING_TOKENS) // PAGE_SIZE)
    # More rows than ever run, so that the requests wait for pages.
    worker = _worker(pages_each * _NUM_RUNNING, num_waiting, 2 * _NUM_RUNNING)
    worker.submit(requests("running", _NUM_RUNNING, _PROMPT_TOKENS, _RUNNING_TOKENS))
    worker.turn()
    worker.submit(requests("waiting", num_waiting, _PROMPT_TOKENS, _RUNNING_TOKENS))
    worker.scheduler.receive()
    return worker


def _worker(num_pages: int, num_waiting: int, max_running: int) -> InstantWorker:
    settings = SchedulerConfig(
        overlap_schedule=False,
        max_running_requests=max_running,
        num_preallocated_rows=0,
        # The earlier requests wait, too.
        max_queued_requests=num_waiting + num_pages,
    )
    return InstantWorker(settings, num_pages, InstantEngine())
