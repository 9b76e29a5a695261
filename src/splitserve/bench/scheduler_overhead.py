"""What the scheduler costs a step: the time between two steps that is not the model's, by running requests and loop.

1. A null worker's scheduler decodes for so many requests; every message to the front end is encoded, and not sent.
2. The model is a sleep, in which others can compute, as they can while kernels run. How long a sleep takes without a
   scheduler is measured first; what a step takes beyond that is overhead.
3. Loops and sizes take turns. Of each round the least disturbed step counts: a busy machine is to change little.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from splitserve.bench.growth_scheduler import InstantEngine
from splitserve.bench.growth_series import Point, Series
from splitserve.core.batch import StepPlan, StepResult
from splitserve.core.sampling import SamplingParams
from splitserve.messages import FromScheduler, GenerateRequest, encode
from splitserve.scheduler.loops import NormalLoop, OverlappedLoop, StepUnderWay
from splitserve.testing.sim import ColocatedWorld, ListInbox

LOOPS = ("normal", "overlapped")
# Seconds of a step: longer than what the overlapped loop has to do meanwhile, as with a real model.
STEP_SECONDS = 0.005
_PAGE_SIZE = 16
_PROMPT_TOKENS = 100
# A step takes in so many prompts.
_TOKEN_BUDGET = 64 * _PROMPT_TOKENS


class SleepingEngine(InstantEngine):
    """Computes nothing, for `STEP_SECONDS`. Knows when each step began."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.began: list[float] = []

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        return partial(self._sleep, plan)

    def execute(self, plan: StepPlan) -> StepResult:
        return self._sleep(plan)

    def _sleep(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        self.began.append(began)
        result = super().execute(plan)
        time.sleep(max(0.0, began + STEP_SECONDS - time.perf_counter()))
        return result


class WakingInbox(ListInbox):
    """Its wait is one: until `wake`, from any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._event = threading.Event()
        self.wake = self._event.set

    def wait(self, timeout: float) -> None:
        self._event.wait(timeout)
        self._event.clear()


class Worker(ColocatedWorld):
    """`num_running` requests, none of which ends, in one of the loops."""

    def __init__(self, loop: str, num_running: int, num_steps: int, engine_thread: ThreadPoolExecutor) -> None:
        # As many tokens as are asked for, and those of the steps that take the prompts in.
        num_tokens = num_steps + 2 * (1 + num_running * _PROMPT_TOKENS // _TOKEN_BUDGET)
        inbox = WakingInbox()
        super().__init__(
            num_pages=num_running * -(-(_PROMPT_TOKENS + num_tokens) // _PAGE_SIZE),
            page_size=_PAGE_SIZE,
            token_budget=_TOKEN_BUDGET,
            max_running=num_running,
            num_reserved_decode_tokens=num_tokens,
            make_engine=SleepingEngine,
            tells=False,
            inbox=inbox,
        )
        params = SamplingParams(max_new_tokens=num_tokens, temperature=0.0)
        for i in range(num_running):
            ids = [(i * _PROMPT_TOKENS + j) for j in range(_PROMPT_TOKENS)]
            self.submit(GenerateRequest(rid=f"request-{i:024d}", prompt_ids=ids, params=params))
        normal = NormalLoop(self.scheduler, self.engine)
        overlapped = OverlappedLoop(self.scheduler, self.engine, engine_thread, inbox.wake)
        self._turn = normal.run_once if loop == "normal" else partial(self._turn_beside_a_step, overlapped)
        self._under_way: StepUnderWay | None = None
        self._run_until(lambda: not self.running.waiting and len(self.running.running) == num_running)

    def seconds_a_step(self, num_steps: int) -> float:
        """The least over so many decode steps, from one's beginning to the next one's."""
        assert isinstance(self.engine, SleepingEngine)
        began = self.engine.began
        # The first may have waited for its turn, the next one for the first.
        first = len(began) + 2
        self._run_until(lambda: len(began) > first + num_steps)
        return min(b - a for a, b in itertools.pairwise(began[first:]))

    def _run_until(self, is_done: Callable[[], bool]) -> None:
        while True:
            self._turn()
            if is_done():
                return

    def _turn_beside_a_step(self, loop: OverlappedLoop) -> None:
        self._under_way = loop.turn(self._under_way)

    def _collect(self, message: FromScheduler) -> None:
        encode(message)


def measure_overhead(sizes: Sequence[int], rounds: int, num_steps: int) -> list[Series]:
    """A series for each loop, over the numbers of running requests."""
    times: dict[tuple[str, int], list[float]] = {(loop, size): [] for loop in LOOPS for size in sizes}
    with ThreadPoolExecutor(1, thread_name_prefix="engine") as engine_thread:
        # A round's steps, and a few at its beginning that do not count.
        total = (rounds + 1) * (num_steps + 5)
        workers = {case: Worker(*case, total, engine_thread) for case in times}
        for number in range(rounds + 1):
            for case, worker in workers.items():
                asleep = _seconds_asleep(num_steps)
                seconds = max(0.0, worker.seconds_a_step(num_steps) - asleep)
                # The first round warms up.
                if number:
                    times[case].append(seconds)
    conditions = f"a model of {STEP_SECONDS * 1e3:g} ms a step, {num_steps} steps a round"
    return [
        Series(
            f"{loop} loop",
            conditions,
            "running requests",
            "running request",
            "µs",
            [Point(size, float(size), tuple(times[loop, size])) for size in sizes],
        )
        for loop in LOOPS
    ]


def _seconds_asleep(num_sleeps: int) -> float:
    found = []
    for _ in range(num_sleeps):
        began = time.perf_counter()
        time.sleep(STEP_SECONDS)
        found.append(time.perf_counter() - began)
    return min(found)
