"""The parts of one scheduler over a loaded engine that stay when its role changes, and the roles over them.

Workers, simulators and benchmarks differ in their engines and ports only.

A role is prepared beside the one that serves (its KV transfer is opened: transport, manager, metadata). It replaces
that one when no requests are held. At startup there is no old role.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from splitserve.cache.host_memory import HostCopies, HostMemory, HostTier
from splitserve.cache.kv_cache import PagedKVCache
from splitserve.cache.kv_events import BlockRecord
from splitserve.cache.pages import PageAllocator, ReqToTokenPool
from splitserve.cache.prefix import PrefixCache, RadixCache
from splitserve.cache.shared_pages import SharedPages
from splitserve.cache.window_pages import WindowPages
from splitserve.core.batch import ModelEngine, PipelinedEngine
from splitserve.core.clock import Clock
from splitserve.core.config import WorkerConfig
from splitserve.core.grammar import GrammarCompiler
from splitserve.core.groups import group_of
from splitserve.core.layout import KVLayout
from splitserve.core.memory import EngineMemory
from splitserve.core.messages import FromScheduler
from splitserve.core.options import size_text
from splitserve.core.request import DisaggregationMode
from splitserve.core.speculative import SpeculativeAlgorithm
from splitserve.observe.events.publisher import EventPublisher
from splitserve.scheduler.admission import NUM_PROBE_ROWS
from splitserve.scheduler.chunk_size import ChunkController
from splitserve.scheduler.lockstep import Member
from splitserve.scheduler.pacing import DecodePacing
from splitserve.scheduler.ports import Inbox, Outbox
from splitserve.scheduler.retraction import Retraction
from splitserve.scheduler.roles.decode import DecodeRole
from splitserve.scheduler.roles.prefill import PrefillRole
from splitserve.scheduler.roles.role import Role
from splitserve.scheduler.running import RunningSet
from splitserve.scheduler.speculation import NgramProposer, Proposer, Speculation
from splitserve.transfer.manager import TransferKit

logger = logging.getLogger(__name__)

PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
# int32 [rows, pages per row], or [pages] for the table of window pages.
PageTable = npt.NDArray[np.int32]
# Opens the KV transfer of a role, which the stack closes; None for the null role. (role, URL of the bootstrap server)
OpenTransfer = Callable[[DisaggregationMode, str | None, ExitStack], TransferKit[Any] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePort:
    """A loaded engine as its scheduler uses it."""

    layout: KVLayout
    # Owner of the pool's memory.
    memory: HostCopies
    # Maximum prompt and output tokens of a request.
    max_tokens_per_request: int
    eos_token_ids: frozenset[int] = frozenset()
    # Return the engine over the page table, and over the table of window pages if the layout has them. Also return the
    # proposer of draft tokens, if the engine has one.
    start: Callable[[PageTable, PageTable | None], tuple[ModelEngine, Proposer | None]]
    # Prepare the started engine for decode steps. Called before each role that decodes. Raises EngineError.
    prepare_decode: Callable[[], None] = lambda: None
    # Largest window of the layers with window pages, tokens. None: no layer has window pages.
    window: int | None = None
    # Largest window of all layers, tokens. None: some layer attends to all tokens.
    window_of_all: int | None = None
    # Whether some layer has a window, on this rank or on another.
    has_windows: bool = False
    # Table of owners of the pages, if several workers compute in one pool.
    shared: SharedPages | None = None
    # Whether another worker of the host computes prompts now.
    has_other_prompts: Callable[[], bool] = lambda: False
    # Release of memory, and updates of weights. None: the engine supports neither.
    engine_memory: EngineMemory | None = None


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


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRole:
    """A role with its KV transfer open. Its owner closes it, once."""

    mode: DisaggregationMode
    # None: the null role, which transfers nothing.
    kit: TransferKit[Any] | None
    closing: ExitStack


class SchedulerParts:
    """The parts of one scheduler, and the builder of its roles."""

    def __init__(self, config: WorkerConfig, engine: EnginePort, ports: WorkerPorts) -> None:
        self.config = config
        self.engine = engine
        self.ports = ports
        # Record of KV events. None: they are not published.
        self.record = None if config.kv_events.publisher == "null" else BlockRecord(config.cache.page_size)
        self.outbox = Outbox(ports.send, ports.clock)
        self.cache = _cache(config, engine)
        # The started engine.
        windows = self.cache.windows
        self.runner, proposer = engine.start(self.cache.rows.table, windows.table if windows else None)
        if proposer is None and config.speculative.algorithm is SpeculativeAlgorithm.NGRAM:
            proposer = NgramProposer(config.speculative.ngram_max_match)
        # None: speculation is off.
        self.speculation = Speculation(proposer, self.cache, config.speculative.most_proposals) if proposer else None
        has_stages = config.parallel.pp_size > 1 and isinstance(self.runner, PipelinedEngine)
        # Whether the next step is planned while one runs. Never for ranks that step together. With speculation only in
        # a pipeline: draft tokens follow known tokens, and its steps in flight have different requests.
        self.overlaps = (
            config.scheduler.overlap_schedule and ports.member is None and (has_stages or self.speculation is None)
        )
        # Micro-batches to keep in flight.
        self.pp_size = config.parallel.pp_size if self.overlaps and has_stages else 1
        # Limits prompts beside decodes. None: chunks have a fixed size. In a pipeline, and among ranks that step
        # together, the time of a step also depends on other steps.
        self.chunks = None
        # Intervals between decode steps, for the same workers. None: steps follow each other.
        self.pacing = None
        if config.scheduler.target_itl_ms != 0 and self.pp_size == 1 and ports.member is None:
            target = config.scheduler.target_itl_ms
            seconds = None if target is None else target / 1e3
            self.chunks = ChunkController(seconds, config.cache.page_size)
            if seconds is not None:
                self.pacing = DecodePacing(seconds, engine.has_other_prompts, ports.clock)
        self.retraction = Retraction(self.cache, engine.memory, config.scheduler.retraction_host_memory)
        _log_host_memory(self.retraction.memory, config)
        # Role with its prefix caches in place. None: before the first role.
        self._installed: DisaggregationMode | None = None

    def prepare(self, mode: DisaggregationMode, bootstrap_url: str | None) -> PreparedRole:
        """Open the KV transfer of a role; may take seconds. From any thread, while another role serves.

        Raises SplitserveError.
        """
        with ExitStack() as closing:
            kit = self.ports.open_transfer(mode, bootstrap_url, closing)
            return PreparedRole(mode, kit, closing.pop_all())

    def install(self, prepared: PreparedRole) -> Role:
        """Adapt the caches to a role and return it. Only while nothing is held. Raises SplitserveError."""
        mode, settings = prepared.mode, self.config.scheduler
        if mode is not PREFILL:
            self.engine.prepare_decode()
        self._fit_caches(mode)
        self._installed = mode
        running = RunningSet(
            self.cache,
            self.retraction,
            settings,
            mode,
            speculation=self.speculation,
            # Nothing decodes on a prefill worker.
            chunks=None if mode is PREFILL else self.chunks,
            pp_size=self.pp_size,
        )
        if prepared.kit is None:
            return Role(running, self.outbox, self.ports.clock)
        if mode is PREFILL:
            return PrefillRole(running, self.outbox, self.ports.clock, prepared.kit)
        return DecodeRole(running, self.outbox, self.ports.clock, prepared.kit, self.pacing)

    def _fit_caches(self, mode: DisaggregationMode) -> None:
        """Adapt the prefix caches to the role.

        A prefix stays if the new role would have computed the same KV and may cache it.
        """
        cache, before, record = self.cache, self._installed, self.record
        has = self._has_prefixes(mode)
        # The KV cache in a decode worker's pages may have lost precision by its transfer.
        is_narrowed = before is DECODE and self.config.disaggregation.transfer_dtype != "auto"
        stays = has and before is not None and self._has_prefixes(before) and not is_narrowed
        host, num_host_bytes = None, self.config.cache.prefix_host_memory
        if has and mode is not DECODE and num_host_bytes:
            host = cache.host if stays else None
            host = host or HostTier(HostMemory(self.engine.memory, num_host_bytes), cache.page_size, record)
        if stays:
            prefix = cache.prefix
        elif has:
            prefix = RadixCache(cache.page_size, record)
        else:
            prefix = PrefixCache()
        cache.replace_caches(prefix, host)

    def _has_prefixes(self, mode: DisaggregationMode) -> bool:
        engine, config = self.engine, self.config.cache
        if engine.shared or not config.enable_prefix_cache:
            # Pages that change owner cannot stay in a cache.
            return False
        if mode is not DECODE:
            return True
        # For a sliding-window layer prefill sends only the tokens that this request will read, so a shorter prefix
        # would miss some. If these layers have window pages, those determine which prefixes can be continued.
        return config.enable_decode_prefix_cache and (engine.window is not None or not engine.has_windows)


def _log_host_memory(memory: HostMemory, config: WorkerConfig) -> None:
    """Log how much KV of retracted requests fits in host memory."""
    num_ranks = group_of(config).group_size
    logger.info(
        "host memory for retracted requests was set limit=%s tokens=%d%s",
        size_text(memory.limit),
        memory.limit // memory.bytes_per_page * config.cache.page_size,
        "" if num_ranks == 1 else f" ranks={num_ranks} (the limit is for all ranks together)",
    )


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
    num_rows = settings.max_running_requests + settings.num_preallocated_rows + NUM_PROBE_ROWS
    rows = ReqToTokenPool(num_rows, engine.max_tokens_per_request, page_size)
    pages = PageAllocator(layout.num_pages, engine.shared.owned() if engine.shared else None)
    windows = None
    if engine.window is not None:
        windows = WindowPages(
            layout.num_pages, layout.num_window_pages, page_size, engine.window, step_tokens=step_tokens(config)
        )
    return PagedKVCache(pages, rows, PrefixCache(), page_size, engine.shared, None, engine.window_of_all, windows)
