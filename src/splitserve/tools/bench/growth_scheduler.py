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

from splitserve.core.batch import RequestResult, StepPlan, StepResult
from splitserve.core.messages import AbortRequest, FromScheduler, GenerateRequest, encode
from splitserve.core.sampling import ResolvedSampling
from splitserve.process.interpreter import collect_rarely
from splitserve.testing.fake_engine import FakeEngine
from splitserve.testing.sim import ColocatedWorld
from splitserve.tools.bench.growth_series import Series, SeriesPoint, measure

_PAGE_SIZE = 16
_PROMPT_TOKENS = 32
# Requests that decode while others wait, and their output tokens: few enough that admission reserves all of them.
_NUM_RUNNING = 32
_RUNNING_TOKENS = 480
# Running requests at a time while a whole queue is served. Less than the shortest queue, so that batches are similar.
_NUM_SERVED = 8


class InstantEngine(FakeEngine):
    """Engine that samples token 0 for every request, and computes nothing."""

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(tuple([RequestResult(None if s.sample is None else 0) for s in plan.requests]))


class SendingWorld(ColocatedWorld):
    """Worker that encodes its messages and keeps none, like a process that sends them."""

    def _collect(self, message: FromScheduler) -> None:
        encode(message)


def measure_scheduler(waiting: Sequence[int], repeats: int) -> list[Series]:
    running = f"{_NUM_RUNNING} requests decode meanwhile"

    def series(name: str, conditions: str, points: list[SeriesPoint]) -> Series:
        return Series(f"scheduler: {name}", conditions, "waiting requests", "waiting request", "µs", points)

    # A single turn is too short for the clock. One extra round warms up, and the running requests must not end.
    turns = max(1, (_RUNNING_TOKENS - 2) // (repeats + 1))
    # Use the garbage collector as a scheduler process does.
    with collect_rarely():
        worlds = {size: _busy_world(size) for size in waiting}
        return [
            series("one turn", running, measure(waiting, float, lambda size: _turn(worlds[size], turns), repeats)),
            series(
                "arrive, wait, run, end",
                f"2 tokens of output each, {_NUM_SERVED} at a time",
                measure(waiting, float, _queue, repeats),
            ),
            series("abort all", running, measure(waiting, float, _abort, repeats)),
        ]


def _turn(world: ColocatedWorld, turns: int) -> float:
    began = time.perf_counter()
    for _ in range(turns):
        world.turn()
    return (time.perf_counter() - began) / turns


def _queue(size: int) -> float:
    """Return the seconds to serve a queue. The prefix cache is full at first, as in a worker after some time."""
    num_pages = 16 * _NUM_SERVED
    world = _world(num_pages, size, _NUM_SERVED)
    for name, count in (("earlier", num_pages), ("waiting", size)):
        for message in _requests(name, count, max_new_tokens=2):
            world.submit(message)
        began = time.perf_counter()
        world.run_until_idle()
    return time.perf_counter() - began


def _abort(size: int) -> float:
    world = _busy_world(size)
    rids = [message.rid for message in _requests("waiting", size, max_new_tokens=1)]
    random.Random(0).shuffle(rids)
    for rid in rids:
        world.submit(AbortRequest(rid=rid))
    began = time.perf_counter()
    world.scheduler.receive()
    return time.perf_counter() - began


def _busy_world(num_waiting: int) -> ColocatedWorld:
    """Return a world in which running requests have reserved all pages and `num_waiting` others wait."""
    pages_each = -(-(_PROMPT_TOKENS + _RUNNING_TOKENS) // _PAGE_SIZE)
    # More rows than ever run, so that the requests wait for pages.
    world = _world(pages_each * _NUM_RUNNING, num_waiting, 2 * _NUM_RUNNING)
    for message in _requests("running", _NUM_RUNNING, _RUNNING_TOKENS):
        world.submit(message)
    world.turn()
    for message in _requests("waiting", num_waiting, _RUNNING_TOKENS):
        world.submit(message)
    world.scheduler.receive()
    return world


def _world(num_pages: int, num_waiting: int, max_running: int) -> ColocatedWorld:
    return SendingWorld(
        num_pages=num_pages,
        page_size=_PAGE_SIZE,
        max_running=max_running,
        # The earlier requests wait, too.
        max_queued=num_waiting + num_pages,
        make_engine=InstantEngine,
        tells=False,
    )


def _requests(name: str, count: int, max_new_tokens: int) -> Iterable[GenerateRequest]:
    """Yield requests. No two prompts share a prefix."""
    params = ResolvedSampling(max_new_tokens=max_new_tokens, temperature=0.0)
    for i in range(count):
        ids = [zlib.crc32(f"{name}-{i}".encode()), *range(1, _PROMPT_TOKENS)]
        yield GenerateRequest(rid=f"{name}-{i}", prompt_ids=ids, params=params)
