"""Schedulers on fakes under a manual clock: whole workers in one thread, without sockets or waits.

`SimWorker` is one worker: the real scheduler, role, cache and queues over the fake engine, with lists as pipes. The
test runs each turn of its loop: the normal loop, or the overlapped or pipelined one with an engine that ends steps some
turns later. `ColocatedWorld` is one null worker.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from splitserve.cache.host_memory import HostCopies, HostMemory, HostTier
from splitserve.cache.kv_cache import PagedKVCache
from splitserve.cache.kv_events import BlockRecord, RecordedRadixCache
from splitserve.cache.pages import DecodeReqToTokenPool, PageAllocator, ReqToTokenPool
from splitserve.cache.prefix import NoPrefixCache, PrefixCache, RadixCache
from splitserve.cache.shared_pages import SharedPages
from splitserve.cache.window_pages import WindowPages
from splitserve.core.batch import ModelEngine, PipelinedEngine, TokenLogprob
from splitserve.core.clock import ManualClock
from splitserve.core.config import SchedulePolicy
from splitserve.core.grammar import GrammarCompiler
from splitserve.core.layout import KVLayout, Region
from splitserve.core.messages import FromScheduler, StepOutputs, TokenOutput, ToScheduler
from splitserve.core.request import FinishReason, Request
from splitserve.observe.events.publisher import EventPublisher, NullEventPublisher
from splitserve.observe.events.schema import CPU_PINNED, GPU, BlockIndex, KVEvent
from splitserve.scheduler.admission import PoolAdmission, WaitingOrder
from splitserve.scheduler.grammar_queue import GrammarLimits, GrammarQueue
from splitserve.scheduler.limits import RequestLimits
from splitserve.scheduler.lockstep import Member
from splitserve.scheduler.loops import NormalLoop, OverlappedLoop, PipelinedLoop, StepInFlight
from splitserve.scheduler.ports import KVEventFeed, Outbox, SchedulerPorts
from splitserve.scheduler.retraction import Retraction
from splitserve.scheduler.role_switch import SchedulerRoleSwitch
from splitserve.scheduler.roles.colocated import ColocatedRole, Role
from splitserve.scheduler.running import RunningSet
from splitserve.scheduler.scheduler import Scheduler
from splitserve.scheduler.speculation import Proposer, Speculation
from support.fake_engine import FakeEngine
from support.fake_grammar import FakeCompiler, HeldPool, InlinePool

RoleMaker = Callable[["SimWorker", RunningSet, Outbox], Role]


class EngineWithMemory(ModelEngine, HostCopies, Protocol):
    """Engine together with the pool that it computes into."""

    layout: KVLayout
    # Set if the layout has window pages.
    window_table: npt.NDArray[np.int32] | None

    def regions(self) -> tuple[Region, ...]: ...


# (page table, number of pages, page size) -> engine
EngineMaker = Callable[[npt.NDArray[np.int32], int, int], EngineWithMemory]


class ListInbox:
    """Inbox in a list. Waiting is a no-op: the test decides what happens next."""

    def __init__(self) -> None:
        self.messages: list[ToScheduler] = []

    def drain(self) -> list[ToScheduler]:
        drained, self.messages = self.messages, []
        return drained

    def wait(self, timeout: float) -> None:
        return None


class LateSteps:
    """Overlapped loop in one thread. All work of a step, from first read to last write, is done at its end."""

    def __init__(self, scheduler: Scheduler, engine: ModelEngine, rng: random.Random) -> None:
        self._engine_thread = HeldPool()
        self._loop = OverlappedLoop(scheduler, engine, self._engine_thread, wake=lambda: None)
        self._rng = rng
        self._ends = rng.choice([0.2, 0.6, 1.0])
        self.under_way: StepInFlight | None = None

    @property
    def is_computing(self) -> bool:
        return self.under_way is not None

    def run_once(self) -> bool:
        """Run one turn, after ending the step in flight at random. Return False if there was nothing to compute."""
        if self._rng.random() < self._ends:
            self._engine_thread.finish_all()
        before, self.under_way = self.under_way, self._loop.turn(self.under_way)
        return before is not None or self.under_way is not None


class LatePipeline:
    """Pipelined loop in one thread. All work of a step, from first read to last write, is done at its end."""

    def __init__(self, scheduler: Scheduler, engine: PipelinedEngine, rng: random.Random, pp_size: int) -> None:
        self._engine_thread = HeldPool()
        self._loop = PipelinedLoop(scheduler, engine, self._engine_thread, wake=lambda: None, pp_size=pp_size)
        self._rng = rng
        self._ends = rng.choice([0.2, 0.6, 1.0])

    @property
    def is_computing(self) -> bool:
        return bool(self._loop.under_way)

    def run_once(self) -> bool:
        """Run one turn, after ending some steps in flight at random. Return False if there was nothing to compute."""
        while self._rng.random() < self._ends and not self._are_all_done():
            self._engine_thread.finish_next()
        before = self.is_computing
        self._loop.turn()
        return before or self.is_computing

    def _are_all_done(self) -> bool:
        return all(step.result.done() for step in self._loop.under_way)


class IndexingPublisher(NullEventPublisher):
    """Publisher into one index, at once."""

    def __init__(self) -> None:
        self.index = BlockIndex()

    def publish(self, events: Sequence[KVEvent]) -> None:
        for event in events:
            self.index.apply(event)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSettings:
    """Settings of one worker."""

    # Memory.
    num_pages: int = 64
    page_size: int = 16
    prefix: bool = True
    shared: SharedPages | None = None
    # Bytes for copies of retracted requests, and for evicted pages of the prefix cache.
    host_memory: int = 1 << 30
    prefix_host_memory: int = 0
    # None: the worker has no rows beyond those of running requests.
    pre_alloc_size: int | None = None
    # Admission.
    token_budget: int = 2048
    prompt_budget: int | None = None
    max_running: int = 64
    max_queued: int = 1000
    num_reserved_decode_tokens: int = 512
    policy: SchedulePolicy = SchedulePolicy.FCFS
    has_priorities: bool = False
    default_timeout: float | None = None
    # Model.
    make_engine: EngineMaker = FakeEngine
    eos_token_ids: frozenset[int] = frozenset()
    grammar_compiler: GrammarCompiler | None = None
    grammar_pool: Executor | None = None
    proposer: Proposer | None = None
    num_draft_tokens: int = 4
    # Random end of steps in the overlapped loop. None: the normal loop.
    late_steps: random.Random | None = None
    # Stages of the pipelined loop, which replaces the overlapped one. None: no pipeline.
    pp_size: int | None = None
    # Member of a group of workers that compute their steps together. None: no group.
    group: Member | None = None
    inbox: ListInbox | None = None
    # Whether KV events are recorded.
    tells: bool = True
    # Publisher of KV events. None: an index that is compared with the caches at the end.
    publisher: EventPublisher | None = None


class SimWorker:
    """Worker under a manual clock. Its messages to the front end are collected by request and checked on arrival."""

    def __init__(
        self,
        clock: ManualClock,
        make_role: RoleMaker,
        tokens_at_most: Callable[[Request], int],
        settings: SimSettings,
    ) -> None:
        self.clock = clock
        self.longest = settings.num_pages * settings.page_size
        self._record = BlockRecord(settings.page_size) if settings.tells else None
        self.engine, self.cache = self._engine_and_cache(settings)
        self.inbox = settings.inbox or ListInbox()
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.replies: list[FromScheduler] = []
        outbox = Outbox(self._collect, clock)
        self.running = self._running_set(settings, tokens_at_most)
        # Set by `make_role` if the role can change.
        self.role_switch: SchedulerRoleSwitch | None = None
        role = make_role(self, self.running, outbox)
        self._told = settings.publisher or IndexingPublisher()
        self._feed = KVEventFeed(self._record, self._told)
        self.scheduler = Scheduler(
            role,
            self.running,
            self.cache,
            SchedulerPorts(self.inbox, outbox, self._feed, clock),
            RequestLimits(
                self.longest,
                settings.max_queued,
                settings.eos_token_ids,
                settings.has_priorities,
                settings.default_timeout,
            ),
            self._grammars(settings),
            self.role_switch,
            settings.group,
        )
        self._late: LateSteps | LatePipeline | None = None
        if settings.late_steps and settings.pp_size:
            self._late = LatePipeline(self.scheduler, self.fake_engine, settings.late_steps, settings.pp_size)
        elif settings.late_steps:
            self._late = LateSteps(self.scheduler, self.engine, settings.late_steps)
        self._loop = self._late or NormalLoop(self.scheduler, self.engine)

    def _engine_and_cache(self, settings: SimSettings) -> tuple[EngineWithMemory, PagedKVCache]:
        page_size, shared = settings.page_size, settings.shared
        rows = (
            ReqToTokenPool(settings.max_running, self.longest, page_size)
            if settings.pre_alloc_size is None
            else DecodeReqToTokenPool(settings.max_running, self.longest, page_size, settings.pre_alloc_size)
        )
        engine = settings.make_engine(rows.table, shared.num_pages if shared else settings.num_pages, page_size)
        prefixes: PrefixCache = NoPrefixCache()
        if settings.prefix:
            prefixes = RadixCache(page_size) if self._record is None else RecordedRadixCache(self._record)
        pages = PageAllocator(shared.num_pages, shared.owned()) if shared else PageAllocator(settings.num_pages)
        host = None
        if settings.prefix_host_memory:
            host = HostTier(HostMemory(engine, settings.prefix_host_memory), page_size, self._record)
        windows = _window_pages(engine, settings.token_budget)
        return engine, PagedKVCache(pages, rows, prefixes, page_size, shared, host, engine.layout.window, windows)

    def _running_set(self, settings: SimSettings, tokens_at_most: Callable[[Request], int]) -> RunningSet:
        reserved, proposer = settings.num_reserved_decode_tokens, settings.proposer
        return RunningSet(
            self.cache,
            PoolAdmission(self.cache, num_reserved_decode_tokens=reserved, tokens_at_most=tokens_at_most),
            Retraction(self.cache, self.engine, settings.host_memory),
            WaitingOrder(settings.policy, self.cache, has_priorities=settings.has_priorities),
            token_budget=settings.token_budget,
            max_running=settings.max_running,
            speculation=Speculation(proposer, self.cache, settings.num_draft_tokens) if proposer else None,
            prompt_budget=settings.prompt_budget,
            pp_size=settings.pp_size or 1,
        )

    def _grammars(self, settings: SimSettings) -> GrammarQueue:
        compiler = settings.grammar_compiler or FakeCompiler(settings.eos_token_ids)
        bounds = GrammarLimits(timeout=60.0, max_waiting=settings.max_queued, cache_bytes=1 << 30)
        return GrammarQueue(compiler, settings.grammar_pool or InlinePool(), self.clock, lambda: None, bounds)

    @property
    def role(self) -> Role:
        return self.scheduler.role

    @property
    def fake_engine(self) -> FakeEngine:
        """Return the engine, which must be the fake one."""
        assert isinstance(self.engine, FakeEngine)
        return self.engine

    def submit(self, message: ToScheduler) -> None:
        self.inbox.messages.append(message)

    def turn(self) -> bool:
        """Run one turn of the loop. Return False if there was nothing to compute."""
        return self._loop.run_once()

    def is_idle(self) -> bool:
        is_computing = self._late is not None and self._late.is_computing
        return self.role.is_idle() and not (is_computing or self.inbox.messages or self.scheduler.grammars)

    def tokens(self, rid: str) -> list[int]:
        return [t for output in self.outputs.get(rid, []) for t in output.token_ids]

    def finish(self, rid: str) -> FinishReason | None:
        outputs = self.outputs.get(rid, [])
        return outputs[-1].finish if outputs else None

    def cached(self, rid: str) -> int:
        return self.outputs[rid][-1].num_cached_tokens

    def input_logprobs(self, rid: str) -> list[TokenLogprob]:
        return [lp for output in self.outputs[rid] for lp in output.input_logprobs or []]

    def check(self) -> None:
        self.scheduler.check_invariants()

    def check_what_was_told(self) -> None:
        """Assert that the published KV events match the caches."""
        if self._record is None:
            return
        held = self._record.blocks()
        assert sum(GPU in media for media in held.values()) == self.cache.prefix.num_pages
        num_host_pages = self.cache.host.num_pages if self.cache.host else 0
        assert sum(CPU_PINNED in media for media in held.values()) == num_host_pages
        if isinstance(self._told, IndexingPublisher):
            self._feed.publish()
            assert self._told.index.blocks() == held

    def check_nothing_is_held(self) -> None:
        self.check()
        self.check_what_was_told()
        state = self.scheduler.state()
        assert self.role.is_idle()
        assert state.pages_free + state.pages_cached == state.pages_total
        assert state.window_pages_free == state.window_pages_total
        assert state.rows_free == state.rows_total
        assert state.retraction_host_bytes == 0
        assert state.metadata_slots_free == state.metadata_slots_total
        assert state.num_invariant_violations_total == 0

    def _collect(self, message: FromScheduler) -> None:
        if not isinstance(message, StepOutputs):
            self.replies.append(message)
            return
        for output in message.outputs:
            earlier = self.outputs.setdefault(output.rid, [])
            assert not earlier or earlier[-1].finish is None, f"{output.rid} heard more after its final message"
            earlier.append(output)


def _window_pages(engine: EngineWithMemory, token_budget: int) -> WindowPages | None:
    layout = engine.layout
    if not layout.num_window_pages:
        return None
    window = max(component.window or 0 for component in layout.components)
    windows = WindowPages(layout.num_pages, layout.num_window_pages, layout.page_size, window, step_tokens=token_budget)
    engine.window_table = windows.table
    return windows


class ColocatedWorld(SimWorker):
    """One null worker with its clock."""

    def __init__(self, **settings: Any) -> None:
        def make_role(worker: SimWorker, running: RunningSet, outbox: Outbox) -> Role:
            return ColocatedRole(running, worker.cache, outbox, worker.clock)

        super().__init__(ManualClock(), make_role, lambda r: r.num_tokens_at_most, SimSettings(**settings))

    def run_until_idle(self, max_turns: int = 20_000) -> None:
        for _ in range(max_turns):
            self.turn()
            self.clock.advance(0.001)
            if self.is_idle():
                return
        raise AssertionError("still busy: something hangs")

    def largest_step(self) -> int:
        return max(self.fake_engine.step_sizes)
