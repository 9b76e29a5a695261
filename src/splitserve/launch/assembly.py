"""Putting one scheduler together over a loaded engine: cache, running set, role, loop, and the hand-over it needs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from splitserve.cache.block_record import BlockRecord
from splitserve.cache.host_memory import HostMemory
from splitserve.cache.host_tier import HostTier
from splitserve.cache.kv_cache import PagedKVCache
from splitserve.cache.pages import PageAllocator
from splitserve.cache.prefix import NoPrefixCache, PrefixCache
from splitserve.cache.radix import RadixCache
from splitserve.cache.slots import DecodeReqToTokenPool, ReqToTokenPool
from splitserve.cache.told_prefix import ToldPrefixCache
from splitserve.clock import Clock, SystemClock
from splitserve.config import SchedulerConfig, SpeculativeAlgorithm, SpeculativeConfig, WorkerConfig
from splitserve.core.batch import Engine
from splitserve.core.request import DisaggregationMode, Request
from splitserve.disaggregation.kit import HandOverKit
from splitserve.disaggregation.wire import ParallelRank
from splitserve.engine.build import BuiltEngine
from splitserve.engine.grammar import XGrammarCompiler
from splitserve.events.publisher import EventPublisher
from splitserve.launch.hand_over import open_hand_over
from splitserve.scheduler.admission import Admission
from splitserve.scheduler.grammar_queue import GrammarLimits, GrammarQueue
from splitserve.scheduler.inbox import FrontEndPipe
from splitserve.scheduler.kv_events import KVEventFeed
from splitserve.scheduler.loops import Loop, NormalLoop, OverlappedLoop
from splitserve.scheduler.ngram import NgramProposer
from splitserve.scheduler.outbox import Outbox
from splitserve.scheduler.policy import WaitingOrder
from splitserve.scheduler.retraction import Retraction
from splitserve.scheduler.roles.base import Role
from splitserve.scheduler.roles.colocated import ColocatedRole
from splitserve.scheduler.roles.decode import DecodeRole
from splitserve.scheduler.roles.prefill import PrefillRole
from splitserve.scheduler.running import RunningSet
from splitserve.scheduler.scheduler import Limits, Scheduler
from splitserve.scheduler.speculation import Speculation


def assemble_scheduler(
    config: WorkerConfig,
    engine: BuiltEngine,
    pipe: FrontEndPipe,
    bootstrap_url: str | None,
    closing: ExitStack,
    publisher: EventPublisher,
    *,
    dp_rank: int = 0,
) -> Loop:
    """Build the scheduler of `config`'s role over a loaded engine. What it opens is closed by `closing`.

    `publisher`: of KV events. It stays its owner's.
    """
    clock = SystemClock()
    mode = config.disaggregation.mode
    record = None if config.kv_events.publisher == "null" else BlockRecord(config.cache.page_size)
    cache = _cache(config, engine, record)
    outbox = Outbox(pipe.send, clock)
    runner, speculation = _runner(config.speculative, engine, cache)
    running = _running_set(config, engine, cache, speculation)
    kit = None
    if mode is not DisaggregationMode.NULL:
        rank = ParallelRank(dp_rank=dp_rank, dp_size=config.dp_size)
        kit = open_hand_over(config.disaggregation, engine, bootstrap_url, rank, pipe.waker.wake, closing)
    role = _role(mode, running, cache, outbox, clock, kit)
    limits = Limits(
        max_tokens_per_request=engine.max_total_tokens_per_request,
        max_queued_requests=config.scheduler.max_queued_requests,
        eos_token_ids=engine.loaded.eos_token_ids,
        has_priorities=config.scheduler.enable_priority,
        default_timeout=config.scheduler.request_timeout,
    )
    grammars = _grammars(config.scheduler, engine, clock, pipe, closing)
    feed = KVEventFeed(record, publisher)
    scheduler = Scheduler(role, running, cache, pipe, outbox, clock, limits, grammars, feed)
    # A guess goes on from tokens that are known: with speculation no step can be planned beside the one before it.
    if speculation is not None or not config.scheduler.overlap_schedule:
        return NormalLoop(scheduler, runner)
    engine_thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
    # The step under way must end before its memory goes.
    closing.callback(engine_thread.shutdown, wait=True)
    return OverlappedLoop(scheduler, runner, engine_thread, pipe.waker.wake)


def _runner(config: SpeculativeConfig, engine: BuiltEngine, cache: PagedKVCache) -> tuple[Engine, Speculation | None]:
    """What runs the steps, and what puts guesses into them."""
    table = cache.rows.table
    if engine.draft is not None:
        drafting = engine.drafting_runner(table)
        return drafting, Speculation(drafting, cache, config.num_draft_tokens)
    speculation = None
    if config.algorithm is SpeculativeAlgorithm.NGRAM:
        speculation = Speculation(NgramProposer(config.ngram_max_match), cache, config.num_draft_tokens)
    return engine.runner(table), speculation


def _grammars(
    config: SchedulerConfig, engine: BuiltEngine, clock: Clock, pipe: FrontEndPipe, closing: ExitStack
) -> GrammarQueue:
    loaded = engine.loaded
    compiler = XGrammarCompiler(loaded.folder, loaded.vocab_size, loaded.eos_token_ids)
    pool = ThreadPoolExecutor(config.grammar_threads, thread_name_prefix="grammar")
    closing.callback(pool.shutdown, wait=False, cancel_futures=True)
    limits = GrammarLimits(config.grammar_timeout, config.max_queued_grammars, config.grammar_cache_bytes)
    return GrammarQueue(compiler, pool, clock, pipe.waker.wake, limits)


def _running_set(
    config: WorkerConfig, engine: BuiltEngine, cache: PagedKVCache, speculation: Speculation | None
) -> RunningSet:
    scheduler, mode = config.scheduler, config.disaggregation.mode
    admission = Admission(
        cache,
        num_reserved_decode_tokens=scheduler.num_reserved_decode_tokens,
        tokens_at_most=_prompt_only if mode is DisaggregationMode.PREFILL else _to_the_end,
    )
    return RunningSet(
        cache,
        admission,
        Retraction(cache, engine.pool, scheduler.retraction_host_memory),
        WaitingOrder(scheduler.schedule_policy, cache, has_priorities=scheduler.enable_priority),
        token_budget=scheduler.chunked_prefill_size,
        max_running=scheduler.max_running_requests,
        speculation=speculation,
        prompt_budget=scheduler.local_prefill_size if mode is DisaggregationMode.DECODE else None,
    )


def _prompt_only(request: Request) -> int:
    return request.num_prefill_tokens


def _to_the_end(request: Request) -> int:
    return request.num_tokens_at_most


def _cache(config: WorkerConfig, engine: BuiltEngine, record: BlockRecord | None) -> PagedKVCache:
    page_size, longest = config.cache.page_size, engine.max_total_tokens_per_request
    max_running, mode = config.scheduler.max_running_requests, config.disaggregation.mode
    rows = (
        DecodeReqToTokenPool(max_running, longest, page_size, config.scheduler.num_preallocated_rows)
        if mode is DisaggregationMode.DECODE
        else ReqToTokenPool(max_running, longest, page_size)
    )
    has_prefixes = _has_prefixes(config, engine)
    prefix: PrefixCache = RadixCache(page_size) if has_prefixes else NoPrefixCache()
    if record is not None:
        prefix = ToldPrefixCache(prefix, record)
    host = None
    if has_prefixes and config.cache.prefix_host_memory and mode is not DisaggregationMode.DECODE:
        host = HostTier(HostMemory(engine.pool, config.cache.prefix_host_memory), page_size, record)
    owned = engine.shared.owned() if engine.shared else None
    pages = PageAllocator(engine.layout.num_pages, owned)
    return PagedKVCache(pages, rows, prefix, page_size, engine.shared, host)


def _has_prefixes(config: WorkerConfig, engine: BuiltEngine) -> bool:
    if engine.shared or not config.cache.enable_prefix_cache:
        # Pages that change owner cannot stay in a cache.
        return False
    if config.disaggregation.mode is not DisaggregationMode.DECODE:
        return True
    # Of a sliding-window layer prefill sends what this request will read; a shorter one would miss some of it.
    has_windows = any(component.window is not None for component in engine.layout.components)
    return config.cache.enable_decode_prefix_cache and not has_windows


def _role(
    mode: DisaggregationMode,
    running: RunningSet,
    cache: PagedKVCache,
    outbox: Outbox,
    clock: Clock,
    kit: HandOverKit | None,
) -> Role:
    if kit is None:
        return ColocatedRole(running, cache, outbox, clock)
    make = PrefillRole if mode is DisaggregationMode.PREFILL else DecodeRole
    return make(running, cache, outbox, clock, kit)
