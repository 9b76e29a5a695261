"""Null worker for measurements of the scheduler: the real scheduler and caches with a model that computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from splitserve.cache.kv_cache import PagedKVCache
from splitserve.cache.pages import PageAllocator, ReqToTokenPool
from splitserve.cache.prefix import RadixCache
from splitserve.core.batch import RequestResult, StepPlan, StepResult
from splitserve.core.clock import ManualClock
from splitserve.core.config import SchedulePolicy
from splitserve.core.grammar import CompiledGrammar, GrammarSpec
from splitserve.core.messages import FromScheduler, ToScheduler, encode
from splitserve.scheduler.admission import PoolAdmission, WaitingOrder
from splitserve.scheduler.grammar_queue import GrammarLimits, GrammarQueue
from splitserve.scheduler.limits import RequestLimits
from splitserve.scheduler.loops import NormalLoop
from splitserve.scheduler.ports import KVEventFeed, Outbox, SchedulerPorts
from splitserve.scheduler.retraction import Retraction
from splitserve.scheduler.roles.colocated import ColocatedRole
from splitserve.scheduler.running import RunningSet
from splitserve.scheduler.scheduler import Scheduler

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

    def drain(self) -> list[ToScheduler]:
        drained, self.messages = self.messages, []
        return drained

    def wait(self, timeout: float) -> None:
        return None


class InstantWorker:
    """Null worker in the caller's thread. It encodes its messages, like a process that sends them, and keeps none."""

    def __init__(
        self,
        engine: InstantEngine,
        inbox: ListInbox,
        *,
        num_pages: int,
        max_running: int,
        max_queued: int,
        token_budget: int = 2048,
        num_reserved_decode_tokens: int = 512,
    ) -> None:
        self.engine, self.inbox, clock = engine, inbox, ManualClock()
        longest = num_pages * PAGE_SIZE
        rows = ReqToTokenPool(max_running, longest, PAGE_SIZE)
        cache = PagedKVCache(PageAllocator(num_pages), rows, RadixCache(PAGE_SIZE), PAGE_SIZE)
        admission = PoolAdmission(
            cache,
            num_reserved_decode_tokens=num_reserved_decode_tokens,
            tokens_at_most=lambda request: request.num_tokens_at_most,
        )
        self.running = RunningSet(
            cache,
            admission,
            Retraction(cache, engine, host_memory=1 << 30),
            WaitingOrder(SchedulePolicy.FCFS, cache),
            token_budget=token_budget,
            max_running=max_running,
        )
        outbox = Outbox(_encode, clock)
        limits = GrammarLimits(timeout=60.0, max_waiting=max_queued, cache_bytes=0)
        # Its one thread is started by the first grammar, and no request has one.
        grammars = GrammarQueue(_NoGrammars(), ThreadPoolExecutor(1), clock, lambda: None, limits)
        self.scheduler = Scheduler(
            ColocatedRole(self.running, cache, outbox, clock),
            self.running,
            cache,
            SchedulerPorts(inbox, outbox, KVEventFeed(), clock),
            RequestLimits(longest, max_queued, frozenset()),
            grammars,
        )
        self.loop = NormalLoop(self.scheduler, engine)

    def submit(self, message: ToScheduler) -> None:
        self.inbox.messages.append(message)

    def run_until_idle(self) -> None:
        while True:
            self.loop.run_once()
            if self.scheduler.role.is_idle() and not self.inbox.messages:
                return


def _encode(message: FromScheduler) -> None:
    encode(message)


class _NoGrammars:
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        raise NotImplementedError
