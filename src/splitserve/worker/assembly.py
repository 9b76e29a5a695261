"""Assembly of one scheduler on a loaded engine: cache, running batch, role, loop, and the KV transfer it needs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from splitserve.cache.kv_cache import PagedKVCache
from splitserve.cache.kv_events import BlockRecord
from splitserve.cache.pages import DecodeReqToTokenPool, PageAllocator
from splitserve.cache.prefix import NoPrefixCache
from splitserve.cache.window_pages import WindowPages
from splitserve.core.clock import Clock, SystemClock
from splitserve.core.config import SchedulerConfig, SpeculativeAlgorithm, WorkerConfig
from splitserve.core.grammar import GrammarBudget
from splitserve.engine.build import BuiltEngine
from splitserve.engine.draft import DraftingRunner
from splitserve.engine.grammar_host import GrammarHost
from splitserve.engine.runner import ModelRunner
from splitserve.observe.events.publisher import EventPublisher
from splitserve.ranks.rank_channel import DriverChannel
from splitserve.scheduler.admission import PoolAdmission, WaitingOrder
from splitserve.scheduler.grammar_queue import GrammarLimits, GrammarQueue
from splitserve.scheduler.limits import RequestLimits
from splitserve.scheduler.lockstep import GroupEngine, LockstepEngine, Member
from splitserve.scheduler.loops import Loop, NormalLoop, OverlappedLoop, PipelinedLoop
from splitserve.scheduler.ports import FrontEndPipe, KVEventFeed, Outbox, SchedulerPorts
from splitserve.scheduler.retraction import Retraction
from splitserve.scheduler.role_switch import SchedulerRoleSwitch
from splitserve.scheduler.running import RunningSet
from splitserve.scheduler.scheduler import Scheduler
from splitserve.scheduler.speculation import NgramProposer, Speculation
from splitserve.worker.rank_group import DriverPlace
from splitserve.worker.roles import RoleAssembly, Shared, to_the_end
from splitserve.worker.window_demand import window_demand


def assemble_scheduler(
    config: WorkerConfig,
    engine: BuiltEngine,
    pipe: FrontEndPipe,
    bootstrap_url: str | None,
    closing: ExitStack,
    publisher: EventPublisher,
    place: DriverPlace,
) -> Loop:
    """Build the scheduler on a loaded engine, in `config`'s role at first. `closing` closes what it opens.

    `publisher`: of KV events; its owner closes it.
    """
    clock = SystemClock()
    record = None if config.kv_events.publisher == "null" else BlockRecord(config.cache.page_size)
    cache = _cache(config, engine)
    outbox = Outbox(pipe.send, clock)
    runner, speculation = _runner(config, engine, cache, place.channel)
    running = _running_set(config, engine, cache, speculation)
    shared = Shared(engine, runner, cache, running, outbox, clock, record)
    roles = RoleAssembly(config, shared, place, pipe.waker.wake)
    current = roles.prepare(config.disaggregation.mode, bootstrap_url)
    preparing = ThreadPoolExecutor(1, thread_name_prefix="role-switch")
    role_switch = SchedulerRoleSwitch(roles, current, preparing, pipe.waker.wake)
    closing.callback(role_switch.close)
    closing.callback(preparing.shutdown, wait=True)
    limits = RequestLimits(
        max_tokens_per_request=engine.max_total_tokens_per_request,
        max_queued_requests=config.scheduler.max_queued_requests,
        eos_token_ids=engine.loaded.eos_token_ids,
        has_priorities=config.scheduler.enable_priority,
        default_timeout=config.scheduler.request_timeout,
    )
    grammars = _grammars(config.scheduler, engine, clock, pipe, closing)
    ports = SchedulerPorts(pipe, outbox, KVEventFeed(record, publisher), clock)
    scheduler = Scheduler(current.install(), running, cache, ports, limits, grammars, role_switch, place.member)
    if place.member is not None and isinstance(runner, ModelRunner):
        return NormalLoop(scheduler, _group_engine(engine, runner, place.member))
    return _loop(config, scheduler, runner, pipe, closing)


def _loop(
    config: WorkerConfig,
    scheduler: Scheduler,
    runner: ModelRunner | DraftingRunner,
    pipe: FrontEndPipe,
    closing: ExitStack,
) -> Loop:
    if not _overlaps(config):
        return NormalLoop(scheduler, runner)
    engine_thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
    # The running step must end before its memory is released.
    closing.callback(engine_thread.shutdown, wait=True)
    if config.parallel.pp_size > 1 and isinstance(runner, ModelRunner):
        return PipelinedLoop(scheduler, runner, engine_thread, pipe.waker.wake, config.parallel.pp_size)
    return OverlappedLoop(scheduler, runner, engine_thread, pipe.waker.wake)


def _group_engine(engine: BuiltEngine, runner: ModelRunner, member: Member) -> GroupEngine:
    return GroupEngine(LockstepEngine(engine.shared_runner(runner), member))


def _overlaps(config: WorkerConfig) -> bool:
    """Return whether steps overlap. With speculation they do not, because proposals need known tokens."""
    return config.scheduler.overlap_schedule and config.speculative.algorithm is None


def _runner(
    config: WorkerConfig, engine: BuiltEngine, cache: PagedKVCache, channel: DriverChannel | None
) -> tuple[ModelRunner | DraftingRunner, Speculation | None]:
    """Return the runner of the steps, and the source of draft tokens for them. None: speculation is off."""
    table, windows, speculative = cache.rows.table, cache.windows.table, config.speculative
    # A role that decodes adds its graphs when it is installed.
    if engine.draft is not None:
        drafting = engine.drafting_runner(table, has_graphs=False)
        return drafting, Speculation(drafting, cache, speculative.num_draft_tokens)
    speculation = None
    if speculative.algorithm is SpeculativeAlgorithm.NGRAM:
        proposer = NgramProposer(speculative.ngram_max_match)
        speculation = Speculation(proposer, cache, speculative.num_draft_tokens)
    tell = channel.tell if channel else None
    return engine.runner(table, has_graphs=False, tell=tell, window_table=windows), speculation


def _grammars(
    config: SchedulerConfig, engine: BuiltEngine, clock: Clock, pipe: FrontEndPipe, closing: ExitStack
) -> GrammarQueue:
    loaded = engine.loaded
    budget = GrammarBudget(
        config.grammar_compile_budget,
        config.grammar_step_budget,
        config.grammar_request_budget,
        config.grammar_memory,
    )
    wake = pipe.waker.wake
    host = GrammarHost(loaded.folder, loaded.vocab_size, loaded.eos_token_ids, budget, wake)
    # The host is closed after the pool. This ends the waits of the pool's threads for the host.
    closing.callback(host.close)
    pool = ThreadPoolExecutor(config.grammar_threads, thread_name_prefix="grammar")
    closing.callback(pool.shutdown, wait=False, cancel_futures=True)
    limits = GrammarLimits(config.grammar_timeout, config.max_queued_grammars, config.grammar_cache_bytes)
    return GrammarQueue(host, pool, clock, wake, limits)


def _running_set(
    config: WorkerConfig, engine: BuiltEngine, cache: PagedKVCache, speculation: Speculation | None
) -> RunningSet:
    scheduler = config.scheduler
    # If a model is sharded over ranks, a copy would contain only this rank's part. Instead, retracted KV is computed
    # again.
    host_memory = scheduler.retraction_host_memory if config.parallel.group_size == 1 else 0
    admission = PoolAdmission(
        cache,
        num_reserved_decode_tokens=scheduler.num_reserved_decode_tokens,
        tokens_at_most=to_the_end,
    )
    return RunningSet(
        cache,
        admission,
        Retraction(cache, engine.pool, host_memory),
        WaitingOrder(scheduler.schedule_policy, cache, has_priorities=scheduler.enable_priority),
        token_budget=scheduler.chunked_prefill_size,
        max_running=scheduler.max_running_requests,
        speculation=speculation,
        pp_size=config.parallel.pp_size if _overlaps(config) else 1,
    )


def _cache(config: WorkerConfig, engine: BuiltEngine) -> PagedKVCache:
    """Return the KV cache without a prefix cache, which the role adds. The rows are enough for any role."""
    page_size, longest = config.cache.page_size, engine.max_total_tokens_per_request
    scheduler = config.scheduler
    rows = DecodeReqToTokenPool(scheduler.max_running_requests, longest, page_size, scheduler.num_preallocated_rows)
    owned = engine.shared.owned() if engine.shared else None
    pages = PageAllocator(engine.layout.num_pages, owned)
    windows = _window_pages(config, engine)
    return PagedKVCache(pages, rows, NoPrefixCache(), page_size, engine.shared, None, window_of(engine), windows)


def _window_pages(config: WorkerConfig, engine: BuiltEngine) -> WindowPages | None:
    if engine.window is None:
        return None
    layout, step_tokens = engine.layout, window_demand(config).step_tokens
    return WindowPages(
        layout.num_pages, layout.num_window_pages, layout.page_size, engine.window, step_tokens=step_tokens
    )


def window_of(engine: BuiltEngine) -> int | None:
    """Return the widest window of all layers, tokens. None: some layer sees all tokens, or another stage's may."""
    num_layers = engine.loaded.model.config.get_text_config().num_hidden_layers
    return engine.layout.window if len(engine.loaded.layers) == num_layers else None
