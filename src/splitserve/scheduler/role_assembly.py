"""Assembly of roles over the parts that all of them share: engine, KV pool, caches, output.

A role is prepared beside the one that serves (its KV transfer is opened: transport, manager, metadata). It replaces
that one when no requests are held. At startup there is no old role.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splitserve.cache.host_memory import HostCopies, HostMemory, HostTier
from splitserve.cache.kv_cache import PagedKVCache
from splitserve.cache.kv_events import BlockRecord, RecordedRadixCache
from splitserve.cache.prefix import PrefixCache, RadixCache
from splitserve.cache.shared_pages import SharedPages
from splitserve.core.batch import ModelEngine
from splitserve.core.clock import Clock
from splitserve.core.config import WorkerConfig
from splitserve.core.layout import KVLayout
from splitserve.core.request import DisaggregationMode, Request
from splitserve.scheduler.admission import PoolAdmission, WaitingOrder
from splitserve.scheduler.ports import Outbox
from splitserve.scheduler.retraction import Retraction
from splitserve.scheduler.roles.decode import DecodeRole
from splitserve.scheduler.roles.prefill import PrefillRole
from splitserve.scheduler.roles.role import Role
from splitserve.scheduler.running import RunningSet
from splitserve.scheduler.speculation import Proposer, Speculation
from splitserve.transfer.manager import TransferKit

PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
# int32 [rows, pages per row], or [pages] for the table of window pages.
PageTable = npt.NDArray[np.int32]
# Opens the KV transfer of a role, which the stack closes; None for the null role. (role, URL of the bootstrap server)
OpenTransfer = Callable[[DisaggregationMode, str | None, ExitStack], TransferKit | None]


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


@dataclass(frozen=True, slots=True)
class SharedParts:
    """Parts that stay when the role changes."""

    cache: PagedKVCache
    retraction: Retraction
    # None: speculation is off.
    speculation: Speculation | None
    outbox: Outbox
    clock: Clock
    # Record of KV events. None: they are not published.
    record: BlockRecord | None
    # Micro-batches to keep in flight.
    pp_size: int


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRole:
    """A role with its KV transfer open. Its owner closes it, once."""

    mode: DisaggregationMode
    # None: the null role, which transfers nothing.
    kit: TransferKit | None
    closing: ExitStack

    def close(self) -> None:
        self.closing.close()


class RoleAssembly:
    """Builder of roles for one scheduler."""

    def __init__(
        self, config: WorkerConfig, engine: EnginePort, shared: SharedParts, open_transfer: OpenTransfer
    ) -> None:
        self._config = config
        self._engine = engine
        self._shared = shared
        self._open_transfer = open_transfer
        # Role with its prefix caches in place. None: before the first role.
        self._installed: DisaggregationMode | None = None

    def prepare(self, mode: DisaggregationMode, bootstrap_url: str | None) -> PreparedRole:
        """Open the KV transfer of a role; may take seconds. From any thread, while another role serves.

        Raises SplitserveError.
        """
        with ExitStack() as closing:
            kit = self._open_transfer(mode, bootstrap_url, closing)
            return PreparedRole(mode, kit, closing.pop_all())

    def install(self, prepared: PreparedRole) -> Role:
        """Adapt the caches to a role and return it. Only while nothing is held. Raises SplitserveError."""
        mode, shared = prepared.mode, self._shared
        if mode is not PREFILL:
            self._engine.prepare_decode()
        self._fit_caches(mode)
        self._installed = mode
        running = self._running_set(mode)
        if prepared.kit is None:
            return Role(running, shared.cache, shared.outbox, shared.clock)
        make = PrefillRole if mode is PREFILL else DecodeRole
        return make(running, shared.cache, shared.outbox, shared.clock, prepared.kit)

    def _running_set(self, mode: DisaggregationMode) -> RunningSet:
        cache, settings = self._shared.cache, self._config.scheduler
        return RunningSet(
            cache,
            PoolAdmission(
                cache,
                num_reserved_decode_tokens=settings.num_reserved_decode_tokens,
                tokens_at_most=_prompt_only if mode is PREFILL else _prompt_and_output,
            ),
            self._shared.retraction,
            WaitingOrder(settings.schedule_policy, cache, has_priorities=settings.enable_priority),
            token_budget=settings.chunked_prefill_size,
            max_running=settings.max_running_requests,
            speculation=self._shared.speculation,
            prompt_budget=settings.local_prefill_size if mode is DECODE else None,
            pp_size=self._shared.pp_size,
        )

    def _fit_caches(self, mode: DisaggregationMode) -> None:
        """Adapt the prefix caches to the role.

        A prefix stays if the new role would have computed the same KV and may cache it.
        """
        cache, before, record = self._shared.cache, self._installed, self._shared.record
        has = self._has_prefixes(mode)
        stays = has and before is not None and self._has_prefixes(before) and not self._is_narrowed(before)
        host = None
        if has and mode is not DECODE:
            host = cache.host if stays and cache.host else self._host_tier()
        if stays:
            cache.replace_host(host)
            return
        prefix: PrefixCache = PrefixCache()
        if has:
            prefix = RadixCache(cache.page_size) if record is None else RecordedRadixCache(record)
        cache.replace_caches(prefix, host)

    def _host_tier(self) -> HostTier | None:
        num_bytes = self._config.cache.prefix_host_memory
        if not num_bytes:
            return None
        return HostTier(HostMemory(self._engine.memory, num_bytes), self._shared.cache.page_size, self._shared.record)

    def _is_narrowed(self, mode: DisaggregationMode) -> bool:
        """Return whether the KV cache in that role's pages has lost precision by its transfer."""
        return mode is DECODE and self._config.disaggregation.transfer_dtype != "auto"

    def _has_prefixes(self, mode: DisaggregationMode) -> bool:
        engine, config = self._engine, self._config.cache
        if engine.shared or not config.enable_prefix_cache:
            # Pages that change owner cannot stay in a cache.
            return False
        if mode is not DECODE:
            return True
        # For a sliding-window layer prefill sends only the tokens that this request will read, so a shorter prefix
        # would miss some. If these layers have window pages, those determine which prefixes can be continued.
        return config.enable_decode_prefix_cache and (engine.window is not None or not engine.has_windows)


def _prompt_only(request: Request) -> int:
    return request.num_prefill_tokens


def _prompt_and_output(request: Request) -> int:
    return request.num_tokens_at_most
