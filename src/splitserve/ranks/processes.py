"""Scheduler processes of a worker as owned by its front end: start with their pipes, detection of ends, and shutdown.

There is one process for each data parallel rank, and one for each follower if a model is sharded over ranks. It reads
one line from its standard input and ends when that input ends, so it cannot outlive the front end. It is in a session
of its own: a Ctrl-C in the terminal reaches only the front end.

Ranks that compute together end together. Without one of them the others wait inside a collective and receive nothing,
so they are killed. Ranks on other hosts are ended by their node when that is notified (NodeHead).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from splitserve.core.config import WorkerConfig
from splitserve.core.groups import group_of
from splitserve.core.parallel import ParallelRank, node_of
from splitserve.core.request import DisaggregationMode
from splitserve.process.engine_start import QUICK_START, spawn
from splitserve.process.forks import EngineProcess, end, take_early
from splitserve.process.owned_folder import OwnedFolder
from splitserve.process.process_end import is_stopped
from splitserve.process.template import SCHEDULER_MODULE
from splitserve.ranks.lockstep_channel import LockstepEndpoints
from splitserve.ranks.node_head import NodeHead
from splitserve.ranks.rank_channel import RankEndpoints
from splitserve.ranks.rank_heartbeat import HEARTBEAT_SECONDS, MAX_MISSED_HEARTBEATS, SILENT_HEARTBEATS, RankHeartbeats
from splitserve.ranks.scheduler_start import SchedulerStart
from splitserve.server.scheduler_client import SchedulerClient
from splitserve.server.scheduler_group import SchedulerGroup
from splitserve.transfer.wire import new_epoch

logger = logging.getLogger(__name__)

SCHEDULER_COMMAND: tuple[str, ...] = (*QUICK_START, SCHEDULER_MODULE)
FOLLOWER_COMMAND: tuple[str, ...] = (*QUICK_START, "splitserve.ranks.rank_process")
# Seconds in which a process must end after its standard input has ended.
END_TIMEOUT = 8.0


class EarlyProcess:
    """Process of the first scheduler, which imports its modules while the front end still imports its own.

    If the front end was forked from a template, it forks this process, which shares all its modules.

    Call `close` at the end. It kills a process that no scheduler has taken, which holds nothing.
    """

    def __init__(self) -> None:
        self._process: EngineProcess | None = take_early() or spawn(SCHEDULER_COMMAND)

    def take(self) -> EngineProcess | None:
        """Return the process on the first call, and None on later ones."""
        process, self._process = self._process, None
        return process

    def close(self) -> None:
        if (process := self.take()) is not None:
            end(process)


class SchedulerProcess:
    """Process of one rank of a scheduler: its driver, which represents the scheduler, or a follower."""

    def __init__(self, process: EngineProcess, rank: ParallelRank, heartbeats: RankHeartbeats | None = None) -> None:
        self._process = process
        self.rank = rank
        self._heartbeats = heartbeats
        # Whether the process was killed because its heartbeats were missing.
        self.is_hung = False
        # Done when the process has ended; its result is the exit code, negative for a signal.
        self.ended: asyncio.Task[int] = asyncio.create_task(_end_of(process), name="scheduler-process")
        self._watch = None if heartbeats is None else asyncio.create_task(self._kill_if_hung(heartbeats))

    @classmethod
    async def start(cls, command: Sequence[str], start: SchedulerStart, early: EngineProcess | None = None) -> Self:
        """Start a process, or use one that was started early, and send its configuration."""
        heartbeats = None if start.heartbeat is None else RankHeartbeats(start.heartbeat)
        process = early or spawn(command, tuple(start.descriptors.values()))
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(start) + b"\n")
        except BrokenPipeError:
            # The process has already died; `ended` reports it.
            logger.debug("the scheduler process did not read its first line")
        return cls(process, start.rank, heartbeats)

    async def _kill_if_hung(self, heartbeats: RankHeartbeats) -> None:
        with closing(heartbeats):
            while not (self.ended.done() or self.is_hung):
                await asyncio.wait({self.ended}, timeout=HEARTBEAT_SECONDS)
                if not self.ended.done() and heartbeats.is_missing():
                    self.is_hung = True
                    logger.error("rank hangs and is killed rank=%s pid=%d", self.rank.name, self.pid)
                    self.kill()

    @property
    def silence(self) -> float:
        """Return the seconds without a heartbeat. 0: fewer than SILENT_HEARTBEATS are missing."""
        num_missed = 0 if self._heartbeats is None else self._heartbeats.num_missed
        return num_missed * HEARTBEAT_SECONDS if num_missed >= SILENT_HEARTBEATS else 0.0

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Kill the process, as it cannot be used any more."""
        if not self.ended.done():
            self._process.kill()

    async def close(self) -> None:
        """End the process, by force after a timeout, at once if it hangs. Idempotent; returns when it is gone."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self.silence or is_stopped(self.pid):
            logger.warning("the scheduler process %d hangs, or was stopped: killing it", self.pid)
            self.kill()
        await asyncio.wait({self.ended}, timeout=END_TIMEOUT)
        if not self.ended.done():
            logger.warning("the scheduler process %d did not end within %g s: killing it", self.pid, END_TIMEOUT)
            self._process.kill()
        await self.ended
        if self._watch is not None:
            await self._watch


async def _end_of(process: EngineProcess) -> int:
    """Wait for the end of a process in a thread, and return its exit code."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def resolve(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    def wait() -> None:
        code = process.wait()
        # RuntimeError: the loop was closed before the process ended.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(resolve, code)

    threading.Thread(target=wait, name="scheduler-process", daemon=True).start()
    code = await ended
    assert process.stdin is not None
    process.stdin.close()
    return code


@dataclass(frozen=True, slots=True)
class Schedulers:
    """All schedulers of one worker."""

    group: SchedulerGroup
    # Processes by data parallel rank, each driver before its followers.
    processes: tuple[SchedulerProcess, ...]
    # Done when the first of them has ended, so no end is missed. Its result: which process ended, and how.
    ended: asyncio.Task[str]

    def silence(self) -> float:
        """Return the longest silence of a process on this host, seconds."""
        return max((process.silence for process in self.processes), default=0.0)

    def kill(self) -> None:
        """End all of them by force."""
        _kill(self.processes)

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the process ids of the drivers, by data parallel rank."""
        return tuple(process.pid for process in self.processes if process.rank.is_driver)

    @property
    def follower_pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self.processes if not process.rank.is_driver)


async def open_schedulers(
    config: WorkerConfig,
    model_folder: str,
    closing: AsyncExitStack,
    *,
    bootstrap_url: str | None = None,
    head: NodeHead | None = None,
    early: EarlyProcess | None = None,
) -> Schedulers:
    """Bind the pipes and start the processes; `closing` ends all. They have not loaded when this returns.

    The pipes are in a folder that only this user can access. `head`: connected nodes with ranks on other hosts.
    `early`: process for the first driver without inherited listeners.
    """
    pipes = str(closing.enter_context(OwnedFolder.for_sockets()))
    clients = []
    for dp_rank in range(config.dp_size):
        client = SchedulerClient(f"ipc://{pipes}/to-{dp_rank}", f"ipc://{pipes}/from-{dp_rank}")
        closing.push_async_callback(client.close)
        await client.start()
        clients.append(client)
    instance = new_epoch()
    all_together = config.model.dp_attention
    lockstep = LockstepEndpoints.in_folder(pipes, config.dp_size) if all_together else None
    # A cancelled start would leave a process without an owner: `closing` waits for it, and ends it.
    starting: list[asyncio.Task[SchedulerProcess]] = []
    closing.push_async_callback(end_started, starting)
    if head is not None:
        head.begin(instance, bootstrap_url)
    for dp_rank, client in enumerate(clients):
        start = SchedulerStart(
            config=config,
            model_folder=model_folder,
            to_scheduler=client.to_scheduler,
            from_scheduler=client.from_scheduler,
            bootstrap_url=bootstrap_url,
            instance=instance,
            lockstep=lockstep,
        )
        for rank_start in _starts_of_ranks(start, dp_rank, pipes, head):
            command = SCHEDULER_COMMAND if rank_start.rank.is_driver else FOLLOWER_COMMAND
            is_early = early is not None and rank_start.rank.is_driver and not rank_start.descriptors
            taken = early.take() if early is not None and is_early else None
            process = SchedulerProcess.start(command, rank_start, taken)
            starting.append(asyncio.create_task(process, name=f"scheduler-start-{len(starting)}"))
    processes = tuple(await asyncio.shield(asyncio.gather(*starting)))
    if head is not None:
        head.started()
    ended = asyncio.create_task(first_end(processes, head, all_together=all_together), name="scheduler-watch")
    closing.callback(ended.cancel)
    is_prefill = config.disaggregation.mode is DisaggregationMode.PREFILL
    return Schedulers(SchedulerGroup(clients, is_prefill=is_prefill), processes, ended)


def _starts_of_ranks(
    start: SchedulerStart, dp_rank: int, pipes: str, head: NodeHead | None = None
) -> list[SchedulerStart]:
    """Return the start of each rank of this scheduler on this host, the driver's first."""
    parallel, dp_size = group_of(start.config), start.config.dp_size
    one = ParallelRank(dp_rank=dp_rank, dp_size=dp_size, tp_size=parallel.tp_size, pp_size=parallel.pp_size)
    endpoints = RankEndpoints.in_folder(pipes, str(dp_rank), one.group_size) if one.group_size > 1 else None
    here = [rank for rank in one.group() if node_of(rank, parallel.nnodes) == parallel.node_rank]
    ranks = sorted(here, key=lambda rank: not rank.is_driver)
    descriptors: dict[str, int] = {}
    if head is not None and endpoints is not None:
        endpoints, descriptors = head.endpoints(one, endpoints)
    return [
        msgspec.structs.replace(
            start,
            rank=rank,
            endpoints=endpoints,
            descriptors=descriptors if rank.is_driver else {},
            heartbeat=f"{pipes}/heartbeat-{dp_rank}-{rank.index}",
        )
        for rank in ranks
    ]


async def first_end(
    processes: Sequence[SchedulerProcess], head: NodeHead | None = None, *, all_together: bool = False
) -> str:
    """Return which process ended first, here or on another node, and how. Kill those that depend on it.

    `all_together`: data parallel ranks also wait for each other inside collectives. The caller ends the other nodes.
    """
    ends: set[asyncio.Future[Any]] = {process.ended for process in processes}
    if head is not None:
        ends.add(head.lost)
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if head is None or not head.lost.done():
        return _first_here(processes, all_together=all_together or head is not None)
    _kill(processes)
    return head.lost.result()


def _first_here(processes: Sequence[SchedulerProcess], *, all_together: bool) -> str:
    done = [process for process in processes if process.ended.done()]
    # A killed process is the reason why others of its group ended with an error, not the other way round.
    first = min(done, key=lambda process: process.ended.result() >= 0)
    _kill([p for p in processes if all_together or p.rank.dp_rank == first.rank.dp_rank])
    places, rank = [], first.rank
    if rank.group_size > 1:
        places.append(f"tensor parallel rank {rank.tp_rank} of pipeline stage {rank.pp_rank}")
    if rank.dp_size > 1:
        places.append(f"data parallel rank {rank.dp_rank}")
    name = "scheduler process" + (f" of {', '.join(places)}" if places else "")
    if first.is_hung:
        return f"{name} sent no heartbeat for {MAX_MISSED_HEARTBEATS * HEARTBEAT_SECONDS:g} s and was killed"
    code = first.ended.result()
    return f"{name} was killed by signal {-code}" if code < 0 else f"{name} ended with code {code}"


def _kill(processes: Sequence[SchedulerProcess]) -> None:
    for process in processes:
        process.kill()


async def end_started(starting: Sequence[asyncio.Task[SchedulerProcess]]) -> None:
    started = await asyncio.gather(*starting, return_exceptions=True)
    await asyncio.gather(*(process.close() for process in started if not isinstance(process, BaseException)))
