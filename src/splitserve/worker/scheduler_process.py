"""Process of the scheduler, started by a worker's front end.

The command is `python -m splitserve.process.quick_start splitserve.worker.scheduler_process`.

1. One line of JSON on standard input contains its configuration (`SchedulerStart`).
2. The model is loaded, the scheduler is assembled, and SchedulerReady is sent, or SchedulerFailed after an error.
3. The loop runs until standard input ends: the front end has closed it, or has ended. A scheduler never outlives it.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec
import torch

from splitserve.core.batch import ModelEngine
from splitserve.core.clock import SystemClock
from splitserve.core.config import ModelConfig, WorkerConfig
from splitserve.core.errors import RanksLostError, SplitserveError
from splitserve.core.grammar import GrammarBudget
from splitserve.core.memory import EngineMemory
from splitserve.core.messages import SchedulerFailed, SchedulerReady
from splitserve.core.request import DisaggregationMode
from splitserve.engine.build import BuiltEngine, build_engine
from splitserve.engine.grammar_host import GrammarHost
from splitserve.engine.kernels.cores import has_other_prompts
from splitserve.engine.memory import BuiltEngineMemory
from splitserve.engine.parallel.ranks import Ranks
from splitserve.engine.parallel.steps import JointOrders
from splitserve.engine.probe import config_has_windows
from splitserve.engine.runner import ModelRunner
from splitserve.observe.events.publisher import EventPublisher, EventPublisherFactory
from splitserve.process.process_end import watch_starter
from splitserve.process.settings import set_up_interpreter, setup_logger
from splitserve.ranks import kv_transfer
from splitserve.ranks.group import RankPlace, meet, pipe_net, share_of_rank, window_demand
from splitserve.ranks.group_memory import GroupMemory, exchange_over
from splitserve.ranks.lockstep_channel import LockstepChannel
from splitserve.ranks.rank_channel import EXCHANGE_TIMEOUT, DriverChannel
from splitserve.ranks.rank_heartbeat import send_heartbeats
from splitserve.ranks.rank_process import GRACE, end_rank, let_others_speak
from splitserve.ranks.scheduler_start import SchedulerStart
from splitserve.scheduler.assembly import assemble_scheduler
from splitserve.scheduler.lockstep import LockstepEngine
from splitserve.scheduler.loops import Loop
from splitserve.scheduler.parts import EnginePort, OpenTransfer, PageTable, WorkerPorts
from splitserve.scheduler.ports import FrontEndPipe
from splitserve.scheduler.speculation import Proposer
from splitserve.transfer.manager import TransferKit
from splitserve.transfer.transports import pool_sharing_of
from splitserve.worker.exclusions import memory_obstacle, settings_in_role

logger = logging.getLogger(__name__)


def main() -> int:
    # Ctrl-C is sent to the whole process group; only the front end handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not (line := sys.stdin.buffer.readline()):
        # The front end ended before it sent the configuration.
        return 0
    start = msgspec.json.decode(line, type=SchedulerStart)
    setup_logger(start.config.server.log_level, start.config.server.log_format)
    pipe = FrontEndPipe(start.to_scheduler, start.from_scheduler)
    lockstep = None
    if start.lockstep is not None:
        lockstep = LockstepChannel(start.lockstep, start.rank.dp_rank, pipe.waker.wake)
    stopping = threading.Event()

    def stop() -> None:
        stopping.set()
        if lockstep is not None:
            # Other ranks may wait for this rank to join their step, and it for them.
            lockstep.retire()
        pipe.waker.wake()

    watch_starter(stop, GRACE)
    with ExitStack() as closing:
        closing.callback(pipe.close)
        if lockstep is not None:
            closing.callback(lockstep.close)
        try:
            # Open the publisher first, so that a port in use is reported before the model is loaded.
            publisher = EventPublisherFactory.create(start.config.kv_events, start.rank.dp_rank)
            closing.callback(publisher.shutdown)
            engine, place = _build_engine(start, lockstep, closing)
            loop = assemble_worker(start.config, engine, pipe, start.bootstrap_url, closing, publisher, place)
        except SplitserveError as error:
            pipe.send(SchedulerFailed(message=error.message, exit_code=error.exit_code))
            return 1
        except Exception as error:
            logger.exception("the scheduler could not start")
            pipe.send(SchedulerFailed(message=f"{type(error).__name__}: {error}"))
            return 1
        closing.enter_context(set_up_interpreter())
        if start.heartbeat is not None:
            send_heartbeats(start.heartbeat)
        pipe.send(_ready(start.config.model, engine, publisher))
        try:
            loop.run(stopping.is_set)
        except RanksLostError as error:
            let_others_speak()
            if lockstep is not None and stopping.is_set():
                # The process group ended because the whole worker ends.
                return 0
            logger.error("%s", error.message)
            pipe.send(SchedulerFailed(message=error.message))
            pipe.close()
            # Exit without closing resources: that could wait for ranks that wait for this one.
            os._exit(1)
    return 0


def _build_engine(
    start: SchedulerStart, lockstep: LockstepChannel | None, closing: ExitStack
) -> tuple[BuiltEngine, RankPlace]:
    """Build this rank's engine, after the ranks that compute with it have connected."""
    config, transfer = start.config, start.config.disaggregation
    model, cache = share_of_rank(start)
    place, ranks = _take_place(start, model.device, lockstep, closing)
    engine = build_engine(
        model,
        cache,
        ranks=ranks,
        pp_layers=config.parallel.pp_layers,
        draft_model=config.speculative.draft_model,
        draft_head=config.speculative.head,
        # Also if the first role transfers no KV, because the role may change.
        pool_sharing=pool_sharing_of(transfer.transfer_backend, transfer.transfer_options),
        windows=window_demand(config),
    )
    closing.callback(engine.close)
    return engine, place


def _take_place(
    start: SchedulerStart, device: str, lockstep: LockstepChannel | None, closing: ExitStack
) -> tuple[RankPlace, Ranks | None]:
    """Join the ranks that compute with this one, if there are any."""
    member = lockstep.member if lockstep is not None else None
    place = RankPlace(start.rank, start.instance, member=member)
    if start.endpoints is not None:
        channel = DriverChannel(start.endpoints, start.rank, pipe_net(start))
        closing.callback(channel.close)
        exchange = functools.partial(channel.exchange, timeout=EXCHANGE_TIMEOUT)
        end = functools.partial(end_rank, start.rank, start.from_scheduler)
        place = replace(place, exchange=exchange, end=end, channel=channel)
    ranks = meet(start, device)
    if ranks is not None:
        closing.enter_context(ranks)
    return place, ranks


def _ready(model: ModelConfig, engine: BuiltEngine, publisher: EventPublisher) -> SchedulerReady:
    # Without our kernels, weights are converted to floats. The method of a scheme is its first word.
    method = engine.loaded.quantization.partition(" ")[0] if engine.loaded.kernels else ""
    return SchedulerReady(
        max_total_tokens_per_request=engine.max_total_tokens_per_request,
        vocab_size=engine.loaded.vocab_size,
        pages_total=engine.num_pages,
        page_size=engine.layout.page_size,
        dtype=engine.loaded.dtype_name,
        kv_bytes_per_token=engine.layout.bytes_per_token,
        device=str(engine.loaded.device),
        num_parameters=engine.loaded.num_parameters,
        load_seconds=engine.loaded.load_seconds,
        kernels=None if engine.loaded.kernels is None else engine.loaded.kernels.name,
        quantization=engine.loaded.quantization,
        weights_quantization=model.quantization or method or None,
        batch_invariant=engine.batch_invariant,
        threads=torch.get_num_threads(),
        model=engine.loaded.fingerprint,
        kv_events_endpoints=[publisher.endpoint],
        kv_replay_endpoints=[publisher.replay_endpoint],
    )


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
    # Closing the host first ends the calls in which threads of `grammar_pool` wait for it.
    closing.callback(host.close)
    ports = WorkerPorts(
        inbox=pipe,
        send=pipe.send,
        wake=wake,
        clock=SystemClock(),
        publisher=publisher,
        open_transfer=transfer_opener(config, engine, place, wake),
        compiler=host,
        step_thread=engine_thread(),
        grammar_pool=ThreadPoolExecutor(settings.grammar_threads, thread_name_prefix="grammar"),
        role_thread=ThreadPoolExecutor(1, thread_name_prefix="role-switch"),
        member=place.member,
    )
    memory = None if memory_obstacle(config) is not None else _memory(engine, place, closing)
    _, loop = assemble_scheduler(config, engine_port(engine, place, memory), ports, bootstrap_url, closing)
    return loop


def engine_thread() -> ThreadPoolExecutor:
    """Return the thread of the overlapped loop, which computes steps with the number of threads of this process.

    Without this call, torch's libraries would use the number in the environment, which may be that of the template.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="engine", initializer=torch.get_num_threads)


def _memory(engine: BuiltEngine, place: RankPlace, closing: ExitStack) -> EngineMemory:
    own = BuiltEngineMemory(engine)
    closing.callback(own.close)
    if place.channel is None:
        return own
    return GroupMemory(own, place.channel.send_order, exchange_over(engine))


def transfer_opener(
    config: WorkerConfig, engine: BuiltEngine, place: RankPlace, wake: Callable[[], None]
) -> OpenTransfer:
    """Return the function that opens the KV transfer of a role. It raises SplitserveError.

    `wake` is called from a manager's thread when a KV transfer progressed.
    """

    def open_transfer(
        mode: DisaggregationMode, bootstrap_url: str | None, closing: ExitStack
    ) -> TransferKit[Any] | None:
        settings = settings_in_role(config, mode)
        if mode is DisaggregationMode.NULL:
            return None
        if mode is DisaggregationMode.PREFILL:
            # The receiver chooses the transfer dtype.
            settings = msgspec.structs.replace(settings, transfer_dtype="auto")
        widths = kv_transfer.row_widths(config, engine)
        return kv_transfer.open_transfer(settings, widths, engine, bootstrap_url, place, wake, closing)

    return open_transfer


def engine_port(engine: BuiltEngine, place: RankPlace, memory: EngineMemory | None = None) -> EnginePort:
    """Return the engine as its scheduler uses it. `memory`: the engine's. None: it stays as it is."""
    # Runner and page table of the started engine.
    started: tuple[ModelRunner, PageTable] | None = None
    send_order = place.channel.send_order if place.channel else None

    def start(page_table: PageTable, window_table: PageTable | None) -> tuple[ModelEngine, Proposer | None]:
        nonlocal started
        # Hold orders until all groups have joined the step. CUDA graphs are added by `prepare_decode`.
        orders = JointOrders(send_order) if send_order is not None and place.member is not None else None
        send_step = orders.hold if orders is not None else send_order
        drafting = None
        if engine.draft is None:
            runner = engine.runner(page_table, has_graphs=False, send_order=send_step, window_table=window_table)
        else:
            drafting = engine.drafting_runner(page_table, has_graphs=False, send_order=send_step)
            runner = drafting.target
        started = runner, page_table
        if place.member is not None:
            prepare = engine.shared_runner(runner, orders).prepare
            return LockstepEngine(drafting.after(prepare) if drafting else prepare, place.member), drafting
        return drafting or runner, drafting

    def prepare_decode() -> None:
        assert started is not None
        engine.add_graphs(*started)

    return EnginePort(
        layout=engine.layout,
        memory=engine.copies(send_order),
        max_tokens_per_request=engine.max_total_tokens_per_request,
        eos_token_ids=engine.loaded.eos_token_ids,
        start=start,
        prepare_decode=prepare_decode,
        window=engine.window,
        window_of_all=window_of(engine),
        has_windows=has_windows(engine),
        shared=engine.shared,
        has_other_prompts=has_other_prompts,
        engine_memory=memory,
    )


def window_of(engine: BuiltEngine) -> int | None:
    """Return the widest window of all layers, tokens. None: some layer sees all tokens, or another stage's may."""
    num_layers = engine.loaded.model.config.get_text_config().num_hidden_layers
    return engine.layout.window if len(engine.loaded.layers) == num_layers else None


def has_windows(engine: BuiltEngine) -> bool:
    """Return whether some layer has a sliding window, on this rank or on another stage's."""
    is_here = any(component.window is not None for component in engine.layout.components)
    return is_here or config_has_windows(engine.loaded.model.config.get_text_config())
