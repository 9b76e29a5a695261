"""Schedulers on fakes under a manual clock: whole workers in one thread, without sockets or waits.

`SimWorker` is one worker: the real scheduler, role, cache and queues over the fake engine, with lists as pipes. The
test runs each turn of its loop: the normal loop, or the overlapped or pipelined one with an engine that ends steps some
turns later. `ColocatedWorld` is one null worker.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from splitserve.cache.host_memory import HostCopies
from splitserve.cache.shared_pages import SharedPages
from splitserve.core.batch import ModelEngine, TokenLogprob
from splitserve.core.clock import ManualClock
from splitserve.core.config import (
    CacheConfig,
    DisaggregationConfig,
    SchedulePolicy,
    SchedulerConfig,
    WorkerConfig,
)
from splitserve.core.grammar import GrammarCompiler
from splitserve.core.kv_events import KVEventsConfig
from splitserve.core.layout import KVLayout, Region
from splitserve.core.messages import FromScheduler, StepOutputs, TokenOutput, ToScheduler
from splitserve.core.parallel import ParallelConfig
from splitserve.core.request import DisaggregationMode, FinishReason
from splitserve.core.speculative import SpeculativeConfig
from splitserve.observe.events.publisher import EventPublisher, NullEventPublisher
from splitserve.observe.events.schema import CPU_PINNED, GPU, BlockIndex, KVEvent
from splitserve.scheduler.assembly import assemble_scheduler
from splitserve.scheduler.lockstep import Member
from splitserve.scheduler.loops import NormalLoop, OverlappedLoop, PipelinedLoop, StepInFlight
from splitserve.scheduler.parts import EnginePort, PageTable, WorkerPorts
from splitserve.scheduler.roles.role import Role
from splitserve.scheduler.running import RunningSet
from splitserve.scheduler.speculation import Proposer
from splitserve.transfer.manager import TransferKit
from support.fake_engine import FakeEngine, numbers_of
from support.fake_grammar import FakeCompiler, HeldPool, InlinePool
from support.fake_memory import FakeMemory


class EngineWithMemory(ModelEngine, HostCopies, Protocol):
    """Engine together with the pool that it computes into."""

    layout: KVLayout

    def start(self, page_table: PageTable, window_table: PageTable | None) -> Proposer | None:
        """Use these tables from here on. Return the engine's own proposer of draft tokens, if it has one."""
        ...

    def regions(self) -> tuple[Region, ...]: ...


# (number of pages, page size) -> engine
EngineMaker = Callable[[int, int], EngineWithMemory]


class ListInbox:
    """Inbox in a list. Waiting is a no-op: the test decides what happens next."""

    def __init__(self) -> None:
        self.messages: list[ToScheduler] = []

    def drain(self) -> list[ToScheduler]:
        drained, self.messages = self.messages, []
        return drained

    def wait(self, timeout: float) -> None:
        return None


class LateLoop:
    """Overlapped or pipelined loop in one thread. All work of a step, from first read to last write, is at its end."""

    def __init__(self, loop: OverlappedLoop | PipelinedLoop, thread: HeldPool, rng: random.Random) -> None:
        self._loop = loop
        self._thread = thread
        self._rng = rng
        self._ends = rng.choice([0.2, 0.6, 1.0])
        # Steps in flight of the overlapped loop.
        self._in_flight: StepInFlight | None = None

    @property
    def steps(self) -> list[StepInFlight]:
        """Steps in flight."""
        if isinstance(self._loop, PipelinedLoop):
            return list(self._loop.in_flight)
        return [self._in_flight] if self._in_flight else []

    def run_once(self) -> bool:
        """Run one turn, after ending some steps in flight at random. Return False if there was nothing to compute."""
        while self._rng.random() < self._ends and not all(step.result.done() for step in self.steps):
            self._thread.finish_next()
        before = bool(self.steps)
        if isinstance(self._loop, PipelinedLoop):
            self._loop.turn()
        else:
            self._in_flight = self._loop.turn(self._in_flight)
        return before or bool(self.steps)


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
    # Rows beyond those of running requests.
    pre_alloc_size: int = 0
    # Admission.
    token_budget: int = 2048
    # On decode workers: prompt tokens computed locally per step. None: the token budget.
    prompt_budget: int | None = None
    # Milliseconds of a step with decodes, if prompts are computed in it. None: the default rule.
    target_itl_ms: float | None = None
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
    # Width of the hidden states in metadata rows. 0: rows have none.
    hidden_size: int = 0
    # Width of a draft head's states in metadata rows. 0: rows have none.
    draft_state_size: int = 0
    # Random end of steps in the overlapped loop. None: the normal loop.
    late_steps: random.Random | None = None
    # Stages of the pipelined loop, which replaces the overlapped one. None: no pipeline.
    pp_size: int | None = None
    # Member of a group of workers that compute their steps together. None: no group.
    group: Member | None = None
    inbox: ListInbox | None = None
    # Whether memory can be released and weights replaced.
    has_memory: bool = False
    # Whether followers would follow the engine, so that its role is closed during an update.
    closes_role: bool = False
    # Executor of loads and of roles that open. None: at once.
    role_thread: Executor | None = None
    # Whether KV events are recorded.
    has_events: bool = True
    # Publisher of KV events. None: an index that is compared with the caches at the end.
    publisher: EventPublisher | None = None

    def config(self, mode: DisaggregationMode) -> WorkerConfig:
        """Return the settings in the form that workers have."""
        return WorkerConfig(
            cache=CacheConfig(
                page_size=self.page_size, enable_prefix_cache=self.prefix, prefix_host_memory=self.prefix_host_memory
            ),
            scheduler=SchedulerConfig(
                chunked_prefill_size=self.token_budget,
                local_prefill_size=self.token_budget if self.prompt_budget is None else self.prompt_budget,
                target_itl_ms=self.target_itl_ms,
                max_running_requests=self.max_running,
                max_queued_requests=self.max_queued,
                max_queued_grammars=self.max_queued,
                num_preallocated_rows=self.pre_alloc_size,
                num_reserved_decode_tokens=self.num_reserved_decode_tokens,
                retraction_host_memory=self.host_memory,
                schedule_policy=self.policy,
                enable_priority=self.has_priorities,
                overlap_schedule=self.late_steps is not None or self.pp_size is not None,
                request_timeout=self.default_timeout,
            ),
            speculative=SpeculativeConfig(num_draft_tokens=self.num_draft_tokens),
            disaggregation=DisaggregationConfig(mode=mode),
            # The publisher itself is a port.
            kv_events=KVEventsConfig(publisher="zmq" if self.has_events else "null"),
            parallel=ParallelConfig(pp_size=self.pp_size or 1),
        )


class SimWorker:
    """Worker under a manual clock. Its messages to the front end are collected by request and checked on arrival."""

    def __init__(self, clock: ManualClock, mode: DisaggregationMode, settings: SimSettings) -> None:
        self.clock = clock
        self.settings = settings
        # Turns of its loop so far.
        self.num_turns = 0
        self.longest = settings.num_pages * settings.page_size
        num_pages = settings.shared.num_pages if settings.shared else settings.num_pages
        self.engine = settings.make_engine(num_pages, settings.page_size)
        self.memory = FakeMemory(self.fake_engine, closes_role=settings.closes_role) if settings.has_memory else None
        self.inbox = settings.inbox or ListInbox()
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.replies: list[FromScheduler] = []
        self._published = settings.publisher or IndexingPublisher()
        step_thread = HeldPool()
        ports = WorkerPorts(
            inbox=self.inbox,
            send=self._collect,
            wake=lambda: None,
            clock=clock,
            publisher=self._published,
            open_transfer=self.open_transfer,
            compiler=settings.grammar_compiler or FakeCompiler(settings.eos_token_ids),
            step_thread=step_thread,
            grammar_pool=settings.grammar_pool or InlinePool(),
            role_thread=settings.role_thread or InlinePool(),
            member=settings.group,
        )
        self.scheduler, loop = assemble_scheduler(settings.config(mode), self._port(), ports, None, ExitStack())
        self.cache, self._record = self.scheduler.parts.cache, self.scheduler.parts.record
        self._loop: LateLoop | NormalLoop = NormalLoop(self.scheduler, self.engine)
        if settings.late_steps and not isinstance(loop, NormalLoop):
            self._loop = LateLoop(loop, step_thread, settings.late_steps)

    def open_transfer(
        self, mode: DisaggregationMode, bootstrap_url: str | None, closing: ExitStack
    ) -> TransferKit[Any] | None:
        """Open the KV transfer of a role. None: the null role."""
        assert mode is DisaggregationMode.NULL
        return None

    def _port(self) -> EnginePort:
        engine, settings = self.engine, self.settings
        layout, windows = engine.layout, [component.window for component in engine.layout.components]

        def start(page_table: PageTable, window_table: PageTable | None) -> tuple[ModelEngine, Proposer | None]:
            proposer = engine.start(page_table, window_table if layout.num_window_pages else None)
            return engine, settings.proposer or proposer

        return EnginePort(
            layout=layout,
            memory=engine,
            max_tokens_per_request=self.longest,
            eos_token_ids=settings.eos_token_ids,
            start=start,
            window=max(window or 0 for window in windows) if layout.num_window_pages else None,
            window_of_all=layout.window,
            has_windows=any(window is not None for window in windows),
            shared=settings.shared,
            engine_memory=self.memory,
        )

    @property
    def running(self) -> RunningSet:
        return self.role.running

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
        self.num_turns += 1
        return self._loop.run_once()

    def is_idle(self) -> bool:
        is_computing = isinstance(self._loop, LateLoop) and bool(self._loop.steps)
        return self.role.is_idle() and not (is_computing or self.inbox.messages or self.scheduler.grammars)

    def tokens(self, rid: str) -> list[int]:
        return [t for output in self.outputs.get(rid, []) for t in output.token_ids]

    def finish(self, rid: str) -> FinishReason | None:
        outputs = self.outputs.get(rid, [])
        return outputs[-1].finish if outputs else None

    def cached(self, rid: str) -> int:
        return self.outputs[rid][-1].num_cached_tokens

    def hidden_states(self, rid: str) -> list[list[float]]:
        return [numbers_of(state) for output in self.outputs[rid] for state in output.hidden_states]

    def input_logprobs(self, rid: str) -> list[TokenLogprob]:
        return [lp for output in self.outputs[rid] for lp in output.input_logprobs or []]

    def check(self) -> None:
        self.scheduler.check_invariants()

    def check_published_events(self) -> None:
        """Assert that the published KV events match the caches."""
        if self._record is None:
            return
        held = self._record.blocks()
        assert sum(GPU in media for media in held.values()) == self.cache.prefix.num_pages
        num_host_pages = self.cache.host.num_pages if self.cache.host else 0
        assert sum(CPU_PINNED in media for media in held.values()) == num_host_pages
        if isinstance(self._published, IndexingPublisher):
            self.scheduler.publish_kv_events()
            assert self._published.index.blocks() == held

    def check_nothing_is_held(self) -> None:
        self.check()
        self.check_published_events()
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
            assert not earlier or earlier[-1].finish is None, f"{output.rid} got a message after its final one"
            earlier.append(output)


class ColocatedWorld(SimWorker):
    """One null worker with its clock."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(ManualClock(), DisaggregationMode.NULL, SimSettings(**settings))

    def run_until_idle(self, max_turns: int = 20_000) -> None:
        for _ in range(max_turns):
            self.turn()
            self.clock.advance(0.001)
            if self.is_idle():
                return
        raise AssertionError("still busy: something hangs")

    def largest_step(self) -> int:
        return max(self.fake_engine.step_sizes)
