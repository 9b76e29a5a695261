"""The scheduler's process as its front end holds it: open it with its pipes, learn of its end, end it.

It reads one line on its standard input and ends when that input ends. So it cannot outlive the front end, whatever
becomes of that one. It is in a session of its own: a Ctrl-C in the terminal reaches the front end alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Self

import msgspec

from splitserve.config import WorkerConfig
from splitserve.server.scheduler_client import SchedulerClient

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


async def open_scheduler(
    config: WorkerConfig,
    model_folder: str,
    closing: AsyncExitStack,
    *,
    bootstrap_url: str | None = None,
) -> tuple[SchedulerClient, SchedulerProcess]:
    """Bind the pipes and start the process; `closing` ends both. It has not loaded when this returns.

    The pipes lie in a folder that only this user can enter.
    """
    pipes = closing.enter_context(tempfile.TemporaryDirectory(prefix="splitserve-"))
    client = SchedulerClient(f"ipc://{pipes}/to", f"ipc://{pipes}/from")
    closing.push_async_callback(client.close)
    await client.start()
    start = SchedulerStart(
        config=config,
        model_folder=model_folder,
        to_scheduler=client.to_scheduler,
        from_scheduler=client.from_scheduler,
        bootstrap_url=bootstrap_url,
    )
    # Cancelled halfway, it would leave a process that nobody holds: `closing` waits for it, and ends it.
    starting = asyncio.create_task(SchedulerProcess.start(SCHEDULER_COMMAND, start), name="scheduler-start")
    closing.push_async_callback(_end_started, starting)
    return client, await asyncio.shield(starting)


async def _end_started(starting: asyncio.Task[SchedulerProcess]) -> None:
    await asyncio.wait({starting})
    if starting.exception() is None:
        await starting.result().close()
