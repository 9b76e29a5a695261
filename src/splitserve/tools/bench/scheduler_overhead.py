"""`splitserve bench scheduler`: scheduler overhead per step, by running requests and loop.

1. A null worker's scheduler decodes for the running requests. Messages to the front end are encoded but not sent.
2. The model is a sleep, during which other threads can compute, as during kernels. The overhead is the time of a step
   beyond a sleep without a scheduler, which is measured first.
3. The interpreter is configured as in a worker. Loops and sizes take turns. The fastest step of each round counts,
   because it is disturbed least by a busy machine.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console

from splitserve.core.batch import StepPlan, StepResult
from splitserve.core.config import SchedulerConfig
from splitserve.process.settings import set_up_interpreter
from splitserve.tools.bench.instant_worker import PAGE_SIZE, InstantEngine, InstantWorker, ListInbox, requests
from splitserve.tools.bench.options import SchedulerBenchOptions
from splitserve.tools.bench.report import OthersWatch, Report, ReportTable
from splitserve.tools.bench.series import Series, SeriesPoint

LOOPS = ("normal", "overlapped")
# Seconds of a step: longer than the overlapped loop's work during a step, as with a real model.
STEP_SECONDS = 0.005
NUM_RUNNING = (1, 32, 256)
_PROMPT_TOKENS = 100
# Prompt tokens that one step admits.
_TOKEN_BUDGET = 64 * _PROMPT_TOKENS
_LEGEND = (
    f"Time of a step beyond the model's {STEP_SECONDS * 1e3:g} ms. Of a round the least disturbed step counts; shown "
    "are the least and, in brackets, the median of the rounds."
)


def bench_scheduler(options: SchedulerBenchOptions, console: Console) -> Report:
    """Measure both loops and return the report."""
    others = OthersWatch()
    with console.status("steps of a scheduler"), set_up_interpreter():
        series = measure_overhead(NUM_RUNNING, options.rounds, options.steps)
    return overhead_report(others.cores_taken(), series)


def overhead_report(cores_taken: float, series: Sequence[Series]) -> Report:
    """Return the report: one series per loop, all over the same sizes. JSON has times in seconds."""
    rows = [
        [f"{points[0].size:,}", *(f"{min(p.times) * 1e3:.3f} ({p.seconds * 1e3:.3f})" for p in points)]
        for points in zip(*(s.points for s in series), strict=True)
    ]
    return Report(
        title="Scheduler overhead per step",
        cores_taken_by_others=cores_taken,
        legend=_LEGEND,
        figures={"series": [s.to_json() for s in series]},
        tables=[ReportTable(["running requests", *(f"{s.name}, ms" for s in series)], rows)],
        remarks=[f"{s.name}: {s.verdict()}." for s in series],
    )


class SleepingEngine(InstantEngine):
    """Engine that sleeps for `STEP_SECONDS` and records when each step began."""

    def __init__(self) -> None:
        self.began: list[float] = []

    def execute(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        self.began.append(began)
        result = super().execute(plan)
        time.sleep(max(0.0, began + STEP_SECONDS - time.perf_counter()))
        return result


class WakingInbox(ListInbox):
    """Inbox with a real wait, until any thread calls `wake`."""

    def __init__(self) -> None:
        super().__init__()
        self._event = threading.Event()

    def wake(self) -> None:
        self._event.set()

    def wait(self, timeout: float) -> None:
        self._event.wait(timeout)
        self._event.clear()


class BusyWorker(InstantWorker):
    """Worker with `num_running` requests that do not end, in one of the loops."""

    def __init__(self, loop: str, num_running: int, num_steps: int, engine_thread: ThreadPoolExecutor) -> None:
        # Tokens for the requested steps, and for the steps that admit the prompts.
        num_tokens = num_steps + 2 * (1 + num_running * _PROMPT_TOKENS // _TOKEN_BUDGET)
        self._engine, inbox = SleepingEngine(), WakingInbox()
        settings = SchedulerConfig(
            overlap_schedule=loop == "overlapped",
            chunked_prefill_size=_TOKEN_BUDGET,
            max_running_requests=num_running,
            num_preallocated_rows=0,
            num_reserved_decode_tokens=num_tokens,
        )
        num_pages = num_running * -(-(_PROMPT_TOKENS + num_tokens) // PAGE_SIZE)
        super().__init__(settings, num_pages, self._engine, inbox, engine_thread)
        self.submit(requests("request", num_running, _PROMPT_TOKENS, num_tokens))
        running = self.scheduler.role.running
        self.run_until(lambda: not running.waiting and len(running.running) == num_running)

    def seconds_a_step(self, num_steps: int) -> float:
        """Return the shortest time between the starts of two decode steps, over `num_steps` of them."""
        began = self._engine.began
        # The first step may have waited for its turn, and the next one for the first.
        first = len(began) + 2
        self.run_until(lambda: len(began) > first + num_steps)
        return min(b - a for a, b in itertools.pairwise(began[first:]))


def measure_overhead(sizes: Sequence[int], rounds: int, num_steps: int) -> list[Series]:
    """Return one series per loop over the numbers of running requests."""
    times: dict[tuple[str, int], list[float]] = {(loop, size): [] for loop in LOOPS for size in sizes}
    with ThreadPoolExecutor(1, thread_name_prefix="engine") as engine_thread:
        # Steps of all rounds, with a few at the start of each that do not count.
        total = (rounds + 1) * (num_steps + 5)
        workers = {case: BusyWorker(*case, total, engine_thread) for case in times}
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
            [SeriesPoint(size, float(size), tuple(times[loop, size])) for size in sizes],
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
