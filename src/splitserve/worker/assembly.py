"""Ports of a worker's scheduler: its engine, KV transfer, grammar processes and threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from splitserve.core.batch import ModelEngine
from splitserve.core.clock import SystemClock
from splitserve.core.config import WorkerConfig
from splitserve.core.grammar import GrammarBudget
from splitserve.core.request import DisaggregationMode
from splitserve.engine.build import BuiltEngine
from splitserve.engine.grammar_host import GrammarHost
from splitserve.engine.probe import config_has_windows
from splitserve.engine.runner import ModelRunner
from splitserve.observe.events.publisher import EventPublisher
from splitserve.process.cluster_token import settle_host
from splitserve.ranks import kv_transfer
from splitserve.ranks.group import RankPlace
from splitserve.scheduler.lockstep import LockstepEngine
from splitserve.scheduler.loops import Loop, assemble_scheduler
from splitserve.scheduler.parts import EnginePort, OpenTransfer, PageTable, WorkerPorts
from splitserve.scheduler.ports import FrontEndPipe
from splitserve.scheduler.speculation import Proposer
from splitserve.transfer.manager import TransferKit
from splitserve.worker.role_rules import check_role, settings_of


def assemble_worker(
    config: WorkerConfig,
    engine: BuiltEngine,
    pipe: FrontEndPipe,
    bootstrap_url: str | None,
    closing: ExitStack,
    publisher: EventPublisher,
    place: RankPlace,
) -> Loop:
    """Build the scheduler on a loaded engine, in `config`'s role at first. `closing` closes what it opens.

    `publisher`: of KV events; its owner closes it.
    """
    settings, wake = config.scheduler, pipe.waker.wake
    budget = GrammarBudget(
        settings.grammar_compile_budget,
        settings.grammar_step_budget,
        settings.grammar_request_budget,
        settings.grammar_memory,
    )
    loaded = engine.loaded
    host = GrammarHost(loaded.folder, loaded.vocab_size, loaded.eos_token_ids, budget, wake)
    # This ends the waits of the pool's threads for the host.
    closing.callback(host.close)
    ports = WorkerPorts(
        inbox=pipe,
        send=pipe.send,
        wake=wake,
        clock=SystemClock(),
        publisher=publisher,
        open_transfer=transfer_opener(config, engine, place, wake),
        compiler=host,
        step_thread=ThreadPoolExecutor(1, thread_name_prefix="engine"),
        grammar_pool=ThreadPoolExecutor(settings.grammar_threads, thread_name_prefix="grammar"),
        role_thread=ThreadPoolExecutor(1, thread_name_prefix="role-switch"),
        member=place.member,
    )
    _, loop = assemble_scheduler(config, engine_port(engine, place), ports, bootstrap_url, closing)
    return loop


def transfer_opener(
    config: WorkerConfig, engine: BuiltEngine, place: RankPlace, wake: Callable[[], None]
) -> OpenTransfer:
    """Return the function that opens the KV transfer of a role. It raises SplitserveError.

    `wake` is called from a manager's thread when a KV transfer progressed.
    """

    def open_transfer(
        mode: DisaggregationMode, bootstrap_url: str | None, closing: ExitStack
    ) -> TransferKit[Any] | None:
        check_role(config, mode)
        if mode is DisaggregationMode.NULL:
            return None
        settings = settle_host(settings_of(config.disaggregation, mode))
        return kv_transfer.open_transfer(settings, engine, bootstrap_url, place, wake, closing)

    return open_transfer


def engine_port(engine: BuiltEngine, place: RankPlace) -> EnginePort:
    """Return the engine as its scheduler uses it."""
    # Runner and page table of the started engine.
    started: tuple[ModelRunner, PageTable] | None = None

    def start(page_table: PageTable, window_table: PageTable | None) -> tuple[ModelEngine, Proposer | None]:
        nonlocal started
        # A role that decodes adds the graphs.
        if engine.draft is not None:
            drafting = engine.drafting_runner(page_table, has_graphs=False)
            started = drafting.target, page_table
            return drafting, drafting
        tell = place.channel.tell if place.channel else None
        runner = engine.runner(page_table, has_graphs=False, tell=tell, window_table=window_table)
        started = runner, page_table
        if place.member is not None:
            return LockstepEngine(engine.shared_runner(runner).prepare, place.member), None
        return runner, None

    def prepare_decode() -> None:
        assert started is not None
        engine.add_graphs(*started)

    return EnginePort(
        layout=engine.layout,
        memory=engine.pool,
        max_tokens_per_request=engine.max_total_tokens_per_request,
        eos_token_ids=engine.loaded.eos_token_ids,
        start=start,
        prepare_decode=prepare_decode,
        window=engine.window,
        window_of_all=window_of(engine),
        has_windows=has_windows(engine),
        shared=engine.shared,
    )


def window_of(engine: BuiltEngine) -> int | None:
    """Return the widest window of all layers, tokens. None: some layer sees all tokens, or another stage's may."""
    num_layers = engine.loaded.model.config.get_text_config().num_hidden_layers
    return engine.layout.window if len(engine.loaded.layers) == num_layers else None


def has_windows(engine: BuiltEngine) -> bool:
    """Return whether some layer has a sliding window, on this rank or on another stage's."""
    is_here = any(component.window is not None for component in engine.layout.components)
    return is_here or config_has_windows(engine.loaded.model.config.get_text_config())
