"""`splitserve bench scheduler`: scheduler overhead per step. And the null worker with which the scheduler is measured.

The worker has the real scheduler and caches, and a model that computes nothing.
1. The scheduler decodes for the running requests. Messages to the front end are encoded but not sent.
2. The model is a sleep, during which other threads can compute, as during kernels. The overhead is the time of a step
   beyond a sleep without a scheduler, which is measured first.
3. The interpreter is configured as in a worker. Loops and sizes take turns. The fastest step of each round counts,
   because it is disturbed least by a busy machine.
"""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

from rich.console import Console

from splitserve.core.batch import RequestResult, StepPlan, StepResult
from splitserve.core.clock import ManualClock
from splitserve.core.config import SchedulerConfig, WorkerConfig
from splitserve.core.grammar import CompiledGrammar, GrammarSpec
from splitserve.core.layout import KVComponent, KVLayout
from splitserve.core.messages import FromScheduler, GenerateRequest, ToScheduler, encode
from splitserve.core.sampling import ResolvedSampling
from splitserve.observe.events.publisher import NullEventPublisher
from splitserve.process.settings import set_up_interpreter
from splitserve.scheduler.assembly import assemble_scheduler
from splitserve.scheduler.loops import NormalLoop, OverlappedLoop, StepInFlight
from splitserve.scheduler.parts import EnginePort, WorkerPorts
from splitserve.tools.bench.options import SchedulerBenchOptions
from splitserve.tools.bench.report import Report, ReportTable
from splitserve.tools.bench.series import Series, SeriesPoint, alternate
from splitserve.tools.bench.stats import seconds_of

PAGE_SIZE = 16
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


class InstantEngine:
    """Engine that samples token 0 for every request, and computes nothing. Its pages hold nothing to copy."""

    bytes_per_page = 1

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(tuple([RequestResult(None if s.sample is None else 0) for s in plan.requests]))

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        return partial(self.execute, plan)

    def bytes_of(self, pages: Sequence[int]) -> int:
        return len(pages)

    def save(self, pages: Sequence[int]) -> Any:
        return None

    def restore(self, copy: Any, first: int, pages: Sequence[int]) -> None:
        """Do nothing: there is nothing to copy."""

    def drop(self, copy: Any) -> None:
        """Do nothing: there is no copy."""


class ListInbox:
    """Inbox in a list. A wait ends when any thread calls `wake`."""

    def __init__(self) -> None:
        self.messages: list[ToScheduler] = []
        self._event = threading.Event()

    def wake(self) -> None:
        self._event.set()

    def drain(self) -> list[ToScheduler]:
        drained, self.messages = self.messages, []
        return drained

    def wait(self, timeout: float) -> None:
        self._event.wait(timeout)
        self._event.clear()


class InstantWorker:
    """Null worker in the caller's thread. It encodes its messages, like a process that sends them, and keeps none."""

    def __init__(
        self,
        settings: SchedulerConfig,
        num_pages: int,
        engine: InstantEngine,
        step_thread: Executor | None = None,
    ) -> None:
        """Assemble the worker. `step_thread`: for the overlapped loop."""
        self.inbox = ListInbox()
        # The threads of these pools start with the first grammar or change of the role: there are none.
        idle = ThreadPoolExecutor(1)
        ports = WorkerPorts(
            inbox=self.inbox,
            send=_encode,
            wake=self.inbox.wake,
            clock=ManualClock(),
            publisher=NullEventPublisher(),
            open_transfer=lambda mode, bootstrap_url, closing: None,
            compiler=_NoGrammars(),
            step_thread=step_thread or idle,
            grammar_pool=idle,
            role_thread=idle,
        )
        port = EnginePort(
            layout=KVLayout(PAGE_SIZE, num_pages, (KVComponent("k", 0, "float32", 1, 0, 1, 1),)),
            memory=engine,
            max_tokens_per_request=num_pages * PAGE_SIZE,
            start=lambda page_table, window_table: (engine, None),
        )
        config = WorkerConfig(scheduler=settings)
        self.scheduler, self._loop = assemble_scheduler(config, port, ports, None, ExitStack())
        self._in_flight: StepInFlight | None = None

    def turn(self) -> None:
        """Run one turn of the loop."""
        if isinstance(self._loop, OverlappedLoop):
            self._in_flight = self._loop.turn(self._in_flight)
        elif isinstance(self._loop, NormalLoop):
            self._loop.run_once()

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Run at least one turn, until `is_done`."""
        self.turn()
        while not is_done():
            self.turn()

    def submit(self, messages: Iterable[ToScheduler]) -> None:
        self.inbox.messages += messages


def requests(name: str, count: int, num_prompt_tokens: int, max_new_tokens: int) -> Iterator[GenerateRequest]:
    """Yield requests. No two prompts share a prefix."""
    params = ResolvedSampling(max_new_tokens=max_new_tokens, temperature=0.0)
    for i in range(count):
        ids = [zlib.crc32(f"{name}-{i}".encode()), *range(1, num_prompt_tokens)]
        yield GenerateRequest(rid=f"{name}-{i}", prompt_ids=ids, params=params)


def _encode(message: FromScheduler) -> None:
    encode(message)


class _NoGrammars:
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        raise NotImplementedError


def bench_scheduler(options: SchedulerBenchOptions, console: Console) -> Report:
    """Measure both loops and return the report."""
    with console.status("steps of a scheduler"), set_up_interpreter():
        return overhead_report(measure_overhead(NUM_RUNNING, options.rounds, options.steps))


def overhead_report(series: Sequence[Series]) -> Report:
    """Return the report: one series per loop, all over the same sizes. JSON has times in seconds."""
    rows = [
        [f"{points[0].size:,}", *(f"{min(p.times) * 1e3:.3f} ({p.seconds * 1e3:.3f})" for p in points)]
        for points in zip(*(s.points for s in series), strict=True)
    ]
    return Report(
        title="Scheduler overhead per step",
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


class BusyWorker(InstantWorker):
    """Worker with `num_running` requests that do not end, in one of the loops."""

    def __init__(self, loop: str, num_running: int, num_steps: int, engine_thread: ThreadPoolExecutor) -> None:
        # Tokens for the requested steps, and for the steps that admit the prompts.
        num_tokens = num_steps + 2 * (1 + num_running * _PROMPT_TOKENS // _TOKEN_BUDGET)
        self._engine = SleepingEngine()
        settings = SchedulerConfig(
            overlap_schedule=loop == "overlapped",
            chunked_prefill_size=_TOKEN_BUDGET,
            max_running_requests=num_running,
            num_preallocated_rows=0,
            num_reserved_decode_tokens=num_tokens,
        )
        num_pages = num_running * -(-(_PROMPT_TOKENS + num_tokens) // PAGE_SIZE)
        super().__init__(settings, num_pages, self._engine, engine_thread)
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
    with ThreadPoolExecutor(1, thread_name_prefix="engine") as engine_thread:
        # Steps of all rounds, with a few at the start of each that do not count.
        total = (rounds + 1) * (num_steps + 5)
        cases = list(itertools.product(LOOPS, sizes))
        workers = {case: BusyWorker(*case, total, engine_thread) for case in cases}

        def overhead(case: tuple[str, int]) -> float:
            asleep = _seconds_asleep(num_steps)
            return max(0.0, workers[case].seconds_a_step(num_steps) - asleep)

        times = alternate(cases, overhead, rounds)
    conditions = f"a model of {STEP_SECONDS * 1e3:g} ms a step, {num_steps} steps a round"
    return [
        Series(
            f"{loop} loop",
            conditions,
            "running requests",
            "running request",
            "µs",
            [SeriesPoint(size, float(size), times[loop, size]) for size in sizes],
        )
        for loop in LOOPS
    ]


def _seconds_asleep(num_sleeps: int) -> float:
    return min(seconds_of(partial(time.sleep, STEP_SECONDS)) for _ in range(num_sleeps))
