"""Assembly of roles from the parts that all of them share: engine, KV pool, running batch, caches.

A role is prepared beside the one that serves (its KV transfer is opened: transport, manager, metadata). It replaces
that one when no requests are held. At startup there is no old role.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from splitserve.cache.host_memory import HostMemory, HostTier
from splitserve.cache.kv_cache import PagedKVCache
from splitserve.cache.kv_events import BlockRecord, RecordedRadixCache
from splitserve.cache.prefix import NoPrefixCache, PrefixCache, RadixCache
from splitserve.core.clock import Clock
from splitserve.core.config import WorkerConfig
from splitserve.core.request import DisaggregationMode, Request
from splitserve.engine.build import BuiltEngine
from splitserve.engine.draft import DraftingRunner
from splitserve.engine.probe import config_has_windows
from splitserve.engine.runner import ModelRunner
from splitserve.process.cluster_token import settle_host
from splitserve.scheduler.ports import Outbox
from splitserve.scheduler.roles.colocated import ColocatedRole, Role
from splitserve.scheduler.roles.decode import DecodeRole
from splitserve.scheduler.roles.prefill import PrefillRole
from splitserve.scheduler.running import RunningSet
from splitserve.transfer.manager import TransferKit
from splitserve.worker.kv_transfer import open_transfer
from splitserve.worker.rank_group import DriverPlace
from splitserve.worker.role_rules import check_role, settings_of

NULL, PREFILL, DECODE = DisaggregationMode.NULL, DisaggregationMode.PREFILL, DisaggregationMode.DECODE


@dataclass(frozen=True, slots=True)
class Shared:
    """Parts that stay when the role changes."""

    engine: BuiltEngine
    runner: ModelRunner | DraftingRunner
    cache: PagedKVCache
    running: RunningSet
    outbox: Outbox
    clock: Clock
    # Record of KV events. None: they are not published.
    record: BlockRecord | None


class RoleAssembly:
    """A RoleBuilder. `on_change` is called from a manager's thread when a KV transfer progressed."""

    def __init__(self, config: WorkerConfig, shared: Shared, place: DriverPlace, on_change: Callable[[], None]) -> None:
        self._config = config
        self._shared = shared
        self._place = place
        self._on_change = on_change
        # Role with its prefix caches in place. None: before the first role.
        self._installed: DisaggregationMode | None = None

    def prepare(self, mode: DisaggregationMode, bootstrap_url: str | None) -> AssembledRole:
        check_role(self._config, mode)
        closing = ExitStack()
        kit: TransferKit | None = None
        if mode is not NULL:
            config = settle_host(settings_of(self._config.disaggregation, mode))
            try:
                kit = open_transfer(config, self._shared.engine, bootstrap_url, self._place, self._on_change, closing)
            except BaseException:
                closing.close()
                raise
        return AssembledRole(self, mode, kit, closing)

    def install(self, mode: DisaggregationMode, kit: TransferKit | None) -> Role:
        shared = self._shared
        role = _role(mode, shared, kit)
        if mode is not PREFILL:
            runner = shared.runner
            target = runner.target if isinstance(runner, DraftingRunner) else runner
            shared.engine.add_graphs(target, shared.cache.rows.table)
        self._fit_caches(mode)
        self._fit_running_set(mode)
        self._installed = mode
        return role

    def _fit_running_set(self, mode: DisaggregationMode) -> None:
        running, scheduler = self._shared.running, self._config.scheduler
        running.admission.tokens_at_most = _prompt_only if mode is PREFILL else to_the_end
        running.prompt_budget = scheduler.local_prefill_size if mode is DECODE else running.token_budget
        running.admits_before = None

    def _fit_caches(self, mode: DisaggregationMode) -> None:
        """Adapt the prefix caches to the role.

        A prefix stays if the new role would have computed the same KV and may cache it.
        """
        cache, before = self._shared.cache, self._installed
        had, has = before is not None and self._has_prefixes(before), self._has_prefixes(mode)
        stays = had and has and not self._is_narrowed(before)
        host = cache.host if stays else None
        if has and self._config.cache.prefix_host_memory and mode is not DECODE:
            host = host or self._host_tier()
        elif cache.host is not None:
            cache.host.clear()
            host = None
        if stays:
            cache.host = host
            return
        prefix: PrefixCache = NoPrefixCache()
        if has:
            record = self._shared.record
            prefix = RadixCache(cache.page_size) if record is None else RecordedRadixCache(record)
        cache.replace_caches(prefix, host)

    def _host_tier(self) -> HostTier:
        shared = self._shared
        memory = HostMemory(shared.engine.pool, self._config.cache.prefix_host_memory)
        return HostTier(memory, shared.cache.page_size, shared.record)

    def _is_narrowed(self, mode: DisaggregationMode | None) -> bool:
        """Return whether the KV cache in that role's pages has lost precision by its transfer."""
        return mode is DECODE and self._config.disaggregation.transfer_dtype != "auto"

    def _has_prefixes(self, mode: DisaggregationMode) -> bool:
        engine, config = self._shared.engine, self._config.cache
        if engine.shared or not config.enable_prefix_cache:
            # Pages that change owner cannot stay in a cache.
            return False
        if mode is not DECODE:
            return True
        # For a sliding-window layer prefill sends only the tokens that this request will read, so a shorter prefix
        # would miss some. If these layers have window pages, those determine which prefixes can be continued.
        return config.enable_decode_prefix_cache and (engine.window is not None or not has_windows(engine))


class AssembledRole:
    """A PreparedRole. `install` makes it the role of the scheduler."""

    def __init__(
        self, assembly: RoleAssembly, mode: DisaggregationMode, kit: TransferKit | None, closing: ExitStack
    ) -> None:
        self.mode = mode
        self._assembly = assembly
        self._kit = kit
        self._closing = closing

    def install(self) -> Role:
        return self._assembly.install(self.mode, self._kit)

    def close(self) -> None:
        self._closing.close()


def _role(mode: DisaggregationMode, shared: Shared, kit: TransferKit | None) -> Role:
    if kit is None:
        return ColocatedRole(shared.running, shared.cache, shared.outbox, shared.clock)
    make = PrefillRole if mode is PREFILL else DecodeRole
    return make(shared.running, shared.cache, shared.outbox, shared.clock, kit)


def has_windows(engine: BuiltEngine) -> bool:
    """Return whether some layer has a sliding window, on this rank or on another stage's."""
    is_here = any(component.window is not None for component in engine.layout.components)
    return is_here or config_has_windows(engine.loaded.model.config.get_text_config())


def _prompt_only(request: Request) -> int:
    return request.num_prefill_tokens


def to_the_end(request: Request) -> int:
    return request.num_tokens_at_most
