"""The scheduler processes of a worker as its front end holds them: open them with their pipes, learn of ends, end them.

There is one for each data parallel rank. It reads one line on its standard input and ends when that input ends. So it
cannot outlive the front end, whatever becomes of that one. It is in a session of its own: a Ctrl-C in the terminal
reaches the front end alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Self

import msgspec

from splitserve.config import WorkerConfig
from splitserve.core.request import DisaggregationMode
from splitserve.server.scheduler_client import SchedulerClient
from splitserve.server.scheduler_group import SchedulerGroup

logger = logging.getLogger(__name__)

SCHEDULER_COMMAND: tuple[str, ...] = (sys.executable, "-m", "splitserve.launch.scheduler_process")
# Threads that wait for each other at the end of a parallel region spin this often, then sleep. With OpenMP's default a
# worker whose core is shared spins away the time its partner needs: steps took 3 to 4 times as long (docs/log.md).
OPENMP_ENVIRONMENT = {"GOMP_SPINCOUNT": "1000"}
# The descriptor itself: a program that embeds us may have put something without one in place of sys.stderr.
_STANDARD_ERROR = 2
# Seconds it gets to end after its standard input has ended.
END_TIMEOUT = 8.0


class SchedulerStart(msgspec.Struct, frozen=True, kw_only=True):
    """The one line, as JSON."""

    config: WorkerConfig
    # Resolved: config.model.model is what the user typed.
    model_folder: str
    # ZMQ endpoints that the front end has bound.
    to_scheduler: str
    from_scheduler: str
    # Prefill: where this worker's own bootstrap server takes registrations.
    bootstrap_url: str | None = None
    # Which of the config's `dp_size` schedulers this is.
    dp_rank: int = 0


class SchedulerProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        # Done when the process has ended; its result is the exit code, negative for a signal.
        self.ended: asyncio.Task[int] = asyncio.create_task(process.wait(), name="scheduler-process")

    @classmethod
    async def start(cls, command: Sequence[str], start: SchedulerStart) -> Self:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=_STANDARD_ERROR,
            start_new_session=True,
            env={**OPENMP_ENVIRONMENT, **os.environ},
        )
        link = cls(process)
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(start) + b"\n")
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            # It has died already: `ended` tells.
            logger.debug("the scheduler process did not read its first line")
        return link

    @property
    def pid(self) -> int:
        return self._process.pid

    async def close(self) -> None:
        """End it, by force if it does not listen. Idempotent; returns when it is gone."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        await asyncio.wait({self.ended}, timeout=END_TIMEOUT)
        if not self.ended.done():
            logger.warning("the scheduler process %d did not end within %g s: killing it", self.pid, END_TIMEOUT)
            self._process.kill()
        await self.ended


@dataclass(frozen=True, slots=True)
class Schedulers:
    """All of one worker."""

    group: SchedulerGroup
    # By data parallel rank.
    processes: tuple[SchedulerProcess, ...]
    # Done when the first of them has ended: none can be missed. Its result says which, and how.
    ended: asyncio.Task[str]

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self.processes)


async def open_schedulers(
    config: WorkerConfig, model_folder: str, closing: AsyncExitStack, *, bootstrap_url: str | None = None
) -> Schedulers:
    """Bind the pipes and start the processes; `closing` ends all. They have not loaded when this returns.

    The pipes lie in a folder that only this user can enter.
    """
    pipes = closing.enter_context(tempfile.TemporaryDirectory(prefix="splitserve-"))
    clients = []
    for rank in range(config.dp_size):
        client = SchedulerClient(f"ipc://{pipes}/to-{rank}", f"ipc://{pipes}/from-{rank}")
        closing.push_async_callback(client.close)
        await client.start()
        clients.append(client)
    # Cancelled halfway, a start would leave a process that nobody holds: `closing` waits for it, and ends it.
    starting: list[asyncio.Task[SchedulerProcess]] = []
    closing.push_async_callback(_end_started, starting)
    for rank, client in enumerate(clients):
        start = SchedulerStart(
            config=config,
            model_folder=model_folder,
            to_scheduler=client.to_scheduler,
            from_scheduler=client.from_scheduler,
            bootstrap_url=bootstrap_url,
            dp_rank=rank,
        )
        process = SchedulerProcess.start(SCHEDULER_COMMAND, start)
        starting.append(asyncio.create_task(process, name=f"scheduler-start-{rank}"))
    processes = tuple(await asyncio.shield(asyncio.gather(*starting)))
    ended = asyncio.create_task(_first_end(processes), name="scheduler-watch")
    closing.callback(ended.cancel)
    is_prefill = config.disaggregation.mode is DisaggregationMode.PREFILL
    return Schedulers(SchedulerGroup(clients, is_prefill=is_prefill), processes, ended)


async def _first_end(processes: Sequence[SchedulerProcess]) -> str:
    await asyncio.wait([process.ended for process in processes], return_when=asyncio.FIRST_COMPLETED)
    rank = next(rank for rank, process in enumerate(processes) if process.ended.done())
    code = processes[rank].ended.result()
    name = f"scheduler process of data parallel rank {rank}" if len(processes) > 1 else "scheduler process"
    return f"{name} was killed by signal {-code}" if code < 0 else f"{name} ended with code {code}"


async def _end_started(starting: Sequence[asyncio.Task[SchedulerProcess]]) -> None:
    started = await asyncio.gather(*starting, return_exceptions=True)
    await asyncio.gather(*(process.close() for process in started if not isinstance(process, BaseException)))
