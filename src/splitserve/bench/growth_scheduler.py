"""The scheduler's time against the number of waiting requests: the real scheduler, a model that takes no time.

turn    a full running set decodes one step while so many requests wait for pages: receive, plan, commit, send.
queue   so many requests arrive at once, wait, run and end; the time of all of it.
abort   so many waiting requests are given up at once, in random order.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Iterable, Sequence

from splitserve.bench.growth_series import Point, Series, measure
from splitserve.core.batch import RequestResult, StepPlan, StepResult
from splitserve.core.sampling import SamplingParams
from splitserve.launch.interpreter import collect_rarely
from splitserve.messages import AbortRequest, FromScheduler, GenerateRequest, encode
from splitserve.testing.fake_engine import FakeEngine
from splitserve.testing.sim import ColocatedWorld

_PAGE_SIZE = 16
_PROMPT_TOKENS = 32
# Requests that decode while others wait, and output tokens of each: few enough that admission reserves all of them.
_NUM_RUNNING = 32
_RUNNING_TOKENS = 480
# Those that run at a time while a whole queue is served: fewer than the shortest queue, so that batches are alike.
_NUM_SERVED = 8


class InstantEngine(FakeEngine):
    """Draws token 0 for whoever wants one, and computes nothing."""

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(tuple([RequestResult(None if s.sample is None else 0) for s in plan.requests]))


class SendingWorld(ColocatedWorld):
    """A worker whose messages leave it, as they do a process: they are somebody else's to keep."""

    def _collect(self, message: FromScheduler) -> None:
        encode(message)


def measure_scheduler(waiting: Sequence[int], repeats: int) -> list[Series]:
    running = f"{_NUM_RUNNING} requests decode meanwhile"

    def series(name: str, conditions: str, points: list[Point]) -> Series:
        return Series(f"scheduler: {name}", conditions, "waiting requests", "waiting request", "µs", points)

    # A single turn is too short for a clock. One round more warms up, and the running requests must not end.
    turns = max(1, (_RUNNING_TOKENS - 2) // (repeats + 1))
    # As in a scheduler's process.
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
    """The prefix cache is full before, as it is in a worker that has served for a while."""
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
    """All pages are promised to requests that decode; behind them the others wait."""
    pages_each = -(-(_PROMPT_TOKENS + _RUNNING_TOKENS) // _PAGE_SIZE)
    # More rows than ever run: it is for pages that the others wait.
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
        # Those that came earlier waited, too.
        max_queued=num_waiting + num_pages,
        make_engine=InstantEngine,
        tells=False,
    )


def _requests(name: str, count: int, max_new_tokens: int) -> Iterable[GenerateRequest]:
    """No two prompts begin alike."""
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
    for i in range(count):
        ids = [zlib.crc32(f"{name}-{i}".encode()), *range(1, _PROMPT_TOKENS)]
        yield GenerateRequest(rid=f"{name}-{i}", prompt_ids=ids, params=params)
