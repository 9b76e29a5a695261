"""Scheduler time against the number of waiting requests: the real scheduler with a model that takes no time.

turn    One decode step of a full running batch while the requests wait for pages: receive, plan, commit, send.
queue   The requests arrive at once, wait, run and end. The total time.
abort   All waiting requests are aborted at once, in random order.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Iterable, Sequence

from splitserve.core.config import SchedulerConfig
from splitserve.core.messages import AbortRequest, GenerateRequest
from splitserve.core.sampling import ResolvedSampling
from splitserve.process.settings import collect_rarely
from splitserve.tools.bench.instant_worker import PAGE_SIZE, InstantEngine, InstantWorker, ListInbox
from splitserve.tools.bench.series import Series, SeriesPoint, measure

_PROMPT_TOKENS = 32
# Requests that decode while others wait, and their output tokens: few enough that admission reserves all of them.
_NUM_RUNNING = 32
_RUNNING_TOKENS = 480
# Running requests at a time while a whole queue is served. Less than the shortest queue, so that batches are similar.
_NUM_SERVED = 8


def measure_scheduler(waiting: Sequence[int], repeats: int) -> list[Series]:
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
        for message in _requests(name, count, max_new_tokens=2):
            worker.submit(message)
        began = time.perf_counter()
        worker.run_until(lambda: not worker.inbox.messages and worker.scheduler.role.is_idle())
    return time.perf_counter() - began


def _abort(size: int) -> float:
    worker = _busy_worker(size)
    rids = [message.rid for message in _requests("waiting", size, max_new_tokens=1)]
    random.Random(0).shuffle(rids)
    for rid in rids:
        worker.submit(AbortRequest(rid=rid))
    began = time.perf_counter()
    worker.scheduler.receive()
    return time.perf_counter() - began


def _busy_worker(num_waiting: int) -> InstantWorker:
    """Return a worker in which running requests have reserved all pages and `num_waiting` others wait."""
    pages_each = -(-(_PROMPT_TOKENS + _RUNNING_TOKENS) // PAGE_SIZE)
    # More rows than ever run, so that the requests wait for pages.
    worker = _worker(pages_each * _NUM_RUNNING, num_waiting, 2 * _NUM_RUNNING)
    for message in _requests("running", _NUM_RUNNING, _RUNNING_TOKENS):
        worker.submit(message)
    worker.turn()
    for message in _requests("waiting", num_waiting, _RUNNING_TOKENS):
        worker.submit(message)
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
    return InstantWorker(settings, num_pages, InstantEngine(), ListInbox())


def _requests(name: str, count: int, max_new_tokens: int) -> Iterable[GenerateRequest]:
    """Yield requests. No two prompts share a prefix."""
    params = ResolvedSampling(max_new_tokens=max_new_tokens, temperature=0.0)
    for i in range(count):
        ids = [zlib.crc32(f"{name}-{i}".encode()), *range(1, _PROMPT_TOKENS)]
        yield GenerateRequest(rid=f"{name}-{i}", prompt_ids=ids, params=params)
