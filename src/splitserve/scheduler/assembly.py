"""Assembly of one scheduler over a loaded engine: cache, role, loop.

Workers, simulators and benchmarks build their schedulers here. These differ in their engines and ports only.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass

from splitserve.cache.kv_cache import PagedKVCache
from splitserve.cache.kv_events import BlockRecord
from splitserve.cache.pages import PageAllocator, ReqToTokenPool
from splitserve.cache.prefix import PrefixCache
from splitserve.cache.window_pages import WindowPages
from splitserve.core.batch import ModelEngine, PipelinedEngine
from splitserve.core.clock import Clock
from splitserve.core.config import SpeculativeAlgorithm, WorkerConfig
from splitserve.core.grammar import GrammarCompiler
from splitserve.core.messages import FromScheduler
from splitserve.observe.events.publisher import EventPublisher
from splitserve.scheduler.grammar_queue import GrammarLimits, GrammarQueue
from splitserve.scheduler.limits import RequestLimits
from splitserve.scheduler.lockstep import Member
from splitserve.scheduler.loops import NormalLoop, OverlappedLoop, PipelinedLoop
from splitserve.scheduler.ports import Inbox, KVEventFeed, Outbox, SchedulerPorts
from splitserve.scheduler.retraction import Retraction
from splitserve.scheduler.role_assembly import EnginePort, OpenTransfer, RoleAssembly, SharedParts
from splitserve.scheduler.role_switch import SchedulerRoleSwitch
from splitserve.scheduler.scheduler import Scheduler
from splitserve.scheduler.speculation import NgramProposer, Speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPorts:
    """Everything outside the scheduler that it uses, except the engine."""

    inbox: Inbox
    # Sends a message to the front end.
    send: Callable[[FromScheduler], None]
    # Ends the inbox's wait, from any thread.
    wake: Callable[[], None]
    clock: Clock
    # Publisher of KV events. Its owner closes it.
    publisher: EventPublisher
    open_transfer: OpenTransfer
    compiler: GrammarCompiler
    # Executors of running steps, compilations of grammars, and preparations of roles. The assembly shuts them down.
    step_thread: Executor
    grammar_pool: Executor
    role_thread: Executor
    # Membership among data parallel ranks that compute their steps together. None: it steps independently.
    member: Member | None = None


@dataclass(frozen=True, slots=True)
class AssembledScheduler:
    """A scheduler with the parts that tests inspect."""

    scheduler: Scheduler
    loop: NormalLoop | OverlappedLoop | PipelinedLoop
    engine: ModelEngine
    cache: PagedKVCache
    kv_events: KVEventFeed


def assemble_scheduler(
    config: WorkerConfig, engine: EnginePort, ports: WorkerPorts, bootstrap_url: str | None, closing: ExitStack
) -> AssembledScheduler:
    """Build the scheduler in `config`'s role. `closing` closes what it opens, and the executors first.

    `bootstrap_url`: the worker's bootstrap server, if the role is prefill.
    """
    settings = config.scheduler
    record = None if config.kv_events.publisher == "null" else BlockRecord(config.cache.page_size)
    cache = _cache(config, engine)
    runner, proposer = engine.start(cache.rows.table, cache.windows.table)
    if proposer is None and config.speculative.algorithm is SpeculativeAlgorithm.NGRAM:
        proposer = NgramProposer(config.speculative.ngram_max_match)
    speculation = Speculation(proposer, cache, config.speculative.num_draft_tokens) if proposer else None
    # With speculation steps do not overlap, because proposals need known tokens. A group's ranks step together.
    overlaps = settings.overlap_schedule and speculation is None and ports.member is None
    outbox = Outbox(ports.send, ports.clock)
    # If a model is sharded over ranks, a copy would contain only this rank's part. Instead, retracted KV is computed
    # again.
    host_memory = settings.retraction_host_memory if config.parallel.group_size == 1 else 0
    shared = SharedParts(
        cache,
        Retraction(cache, engine.memory, host_memory),
        speculation,
        outbox,
        ports.clock,
        record,
        pp_size=config.parallel.pp_size if overlaps else 1,
    )
    roles = RoleAssembly(config, engine, shared, ports.open_transfer)
    current = roles.prepare(config.disaggregation.mode, bootstrap_url)
    role_switch = SchedulerRoleSwitch(roles, current, ports.role_thread, ports.wake)
    closing.callback(role_switch.close)
    closing.callback(ports.role_thread.shutdown, wait=True)
    closing.callback(ports.grammar_pool.shutdown, wait=False, cancel_futures=True)
    # The running step must end before its memory is released.
    closing.callback(ports.step_thread.shutdown, wait=True)
    feed = KVEventFeed(record, ports.publisher)
    scheduler = Scheduler(
        roles.install(current),
        cache,
        SchedulerPorts(ports.inbox, outbox, feed, ports.clock),
        _request_limits(config, engine),
        _grammars(config, ports),
        role_switch,
        ports.member,
    )
    loop = _loop(scheduler, runner, ports, shared.pp_size) if overlaps else NormalLoop(scheduler, runner)
    return AssembledScheduler(scheduler, loop, runner, cache, feed)


def step_tokens(config: WorkerConfig) -> int:
    """Return the prompt tokens of all steps that may hold pages of a window at one time."""
    # A chunk's pages are released when its step has ended; the next step is planned before that.
    num_steps = max(2, config.parallel.pp_size) if config.scheduler.overlap_schedule else 1
    return num_steps * config.scheduler.chunked_prefill_size


def _cache(config: WorkerConfig, engine: EnginePort) -> PagedKVCache:
    """Return the KV cache without a prefix cache, which the role adds. The rows are enough for any role."""
    layout, settings = engine.layout, config.scheduler
    page_size = layout.page_size
    # With the extra rows KV transfers continue while the running batch is full.
    num_rows = settings.max_running_requests + settings.num_preallocated_rows
    rows = ReqToTokenPool(num_rows, engine.max_tokens_per_request, page_size)
    pages = PageAllocator(layout.num_pages, engine.shared.owned() if engine.shared else None)
    windows = None
    if engine.window is not None:
        windows = WindowPages(
            layout.num_pages, layout.num_window_pages, page_size, engine.window, step_tokens=step_tokens(config)
        )
    return PagedKVCache(pages, rows, PrefixCache(), page_size, engine.shared, None, engine.window_of_all, windows)


def _request_limits(config: WorkerConfig, engine: EnginePort) -> RequestLimits:
    return RequestLimits(
        max_tokens_per_request=engine.max_tokens_per_request,
        max_queued_requests=config.scheduler.max_queued_requests,
        eos_token_ids=engine.eos_token_ids,
        has_priorities=config.scheduler.enable_priority,
        default_timeout=config.scheduler.request_timeout,
    )


def _grammars(config: WorkerConfig, ports: WorkerPorts) -> GrammarQueue:
    settings = config.scheduler
    limits = GrammarLimits(settings.grammar_timeout, settings.max_queued_grammars, settings.grammar_cache_bytes)
    return GrammarQueue(ports.compiler, ports.grammar_pool, ports.clock, ports.wake, limits)


def _loop(
    scheduler: Scheduler, runner: ModelEngine, ports: WorkerPorts, pp_size: int
) -> OverlappedLoop | PipelinedLoop:
    if pp_size > 1 and isinstance(runner, PipelinedEngine):
        return PipelinedLoop(scheduler, runner, ports.step_thread, ports.wake, pp_size)
    return OverlappedLoop(scheduler, runner, ports.step_thread, ports.wake)
