"""Null worker for measurements of the scheduler: the real scheduler and caches with a model that computes nothing."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

from splitserve.core.batch import RequestResult, StepPlan, StepResult
from splitserve.core.clock import ManualClock
from splitserve.core.config import SchedulerConfig, WorkerConfig
from splitserve.core.grammar import CompiledGrammar, GrammarSpec
from splitserve.core.layout import KVComponent, KVLayout
from splitserve.core.messages import FromScheduler, GenerateRequest, ToScheduler, encode
from splitserve.core.sampling import ResolvedSampling
from splitserve.observe.events.publisher import NullEventPublisher
from splitserve.scheduler.assembly import assemble_scheduler
from splitserve.scheduler.loops import NormalLoop, OverlappedLoop, StepInFlight
from splitserve.scheduler.parts import EnginePort, WorkerPorts

PAGE_SIZE = 16


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


class ListInbox:
    """Inbox in a list. Waiting is a no-op."""

    def __init__(self) -> None:
        self.messages: list[ToScheduler] = []

    def wake(self) -> None:
        """Do nothing: nothing waits."""

    def drain(self) -> list[ToScheduler]:
        drained, self.messages = self.messages, []
        return drained

    def wait(self, timeout: float) -> None:
        return None


class InstantWorker:
    """Null worker in the caller's thread. It encodes its messages, like a process that sends them, and keeps none."""

    def __init__(
        self,
        settings: SchedulerConfig,
        num_pages: int,
        engine: InstantEngine,
        inbox: ListInbox,
        step_thread: Executor | None = None,
    ) -> None:
        """Assemble the worker. `step_thread`: for the overlapped loop."""
        self.inbox = inbox
        # The threads of these pools start with the first grammar or change of the role: there are none.
        idle = ThreadPoolExecutor(1)
        ports = WorkerPorts(
            inbox=inbox,
            send=_encode,
            wake=inbox.wake,
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
        while True:
            self.turn()
            if is_done():
                return

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
