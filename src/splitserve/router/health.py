"""Health checks of all workers: whether each accepts requests and whether it is alive. One task of the router.

1. `/health` of each worker: whether it accepts requests. A worker that loads its model, drains or does not answer gets
   no requests.
2. `/get_load`, while this router has calls at the worker: the scheduler must answer it. A long step delays the answer,
   so a missing answer does not prove a hang. Every byte of an answer or a stream is a heartbeat.
3. A worker without a heartbeat for `hang_timeout` seconds of continuous checks counts as hung. Its calls are aborted,
   and their requests move to other workers. Time in which this router's event loop was blocked does not count.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from splitserve.router.failure import UpstreamError
from splitserve.router.http_client import ConnectError
from splitserve.router.registry import WorkerRegistry
from splitserve.router.upstream import Upstream
from splitserve.router.worker import Worker

Watch = Callable[[Worker], Coroutine[Any, Any, None]]
logger = logging.getLogger(__name__)
# Timeout of one check, seconds.
CHECK_TIMEOUT = 5.0


class Watches:
    """Tasks that run `watch` for each worker until it leaves. `close` them."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._tasks: dict[Worker, asyncio.Task[None]] = {}

    async def update(self, workers: Iterable[Worker]) -> None:
        """Start tasks for new workers, and cancel those of workers that left."""
        there = set(workers)
        left = [self._tasks.pop(worker) for worker in self._tasks.keys() - there]
        await _end(left)
        for worker in there - self._tasks.keys():
            self._tasks[worker] = asyncio.create_task(self._watch(worker))

    async def close(self) -> None:
        await self.update(())


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class HealthMonitor:
    """Health checks of all workers.

    `interval`: seconds from an answer to the next check. `hang_timeout`: see above, in seconds.
    """

    def __init__(self, registry: WorkerRegistry, upstream: Upstream, interval: float, hang_timeout: float) -> None:
        self._registry = registry
        self._upstream = upstream
        self._interval = interval
        self._hang_timeout = hang_timeout

    async def run(self) -> None:
        """Check the workers until cancelled."""
        watches = Watches(self._watch)
        try:
            while True:
                self._registry.forget_left()
                self._registry.forget_misfits()
                await watches.update(self._registry.all())
                for worker in self._registry.forget_lost():
                    logger.warning("worker forgotten url=%s mode=%s reason=unreachable", worker.url, worker.mode)
                await asyncio.sleep(self._interval)
        finally:
            await watches.close()

    async def _watch(self, worker: Worker) -> None:
        while True:
            await self._check(worker)
            # A silent worker was already checked for its whole timeout.
            is_asked = worker.silent_since is not None and worker.broken_off is None
            seconds = min(self._interval, self._hang_timeout / 8) if is_asked else self._interval
            began = time.monotonic()
            await asyncio.sleep(seconds)
            _discount(worker, time.monotonic() - began - seconds)

    async def _check(self, worker: Worker) -> None:
        """Check the worker once."""
        was_healthy = worker.healthy
        asked_at = time.monotonic()
        if worker.silent_since is None:
            worker.silent_since = asked_at
        status = await self._ask(worker, "/health")
        lives = status is not None
        if lives and (worker.calls or worker.broken_off is not None):
            # 504: the front end answers, but its scheduler does not.
            lives = await self._ask(worker, "/get_load") not in (None, 504)
        if lives:
            worker.heartbeat()
        elif worker.calls and time.monotonic() - (worker.silent_since or asked_at) >= self._hang_timeout:
            self._break_off(worker)
        if status == 200 and worker.broken_off is None:
            worker.mark_healthy()
        else:
            worker.mark_unhealthy()
        if worker.healthy != was_healthy:
            level = logging.INFO if worker.healthy else logging.WARNING
            logger.log(level, "worker url=%s mode=%s healthy=%s", worker.url, worker.mode, worker.healthy)

    async def _ask(self, worker: Worker, path: str) -> int | None:
        """Return the status of the answer. None: there was none."""
        silent_since = worker.silent_since or time.monotonic()
        left = silent_since + self._hang_timeout - time.monotonic()
        seconds = min(CHECK_TIMEOUT, self._hang_timeout, max(left, self._hang_timeout / 8))
        began = time.monotonic()
        try:
            status, _, _ = await self._upstream.ask(worker, "GET", path, seconds=seconds)
        except UpstreamError as error:
            _discount(worker, time.monotonic() - began - seconds)
            self._report(worker, error.__cause__)
            return None
        worker.connect_error = ""
        return status

    def _report(self, worker: Worker, cause: BaseException | None) -> None:
        """Log why the worker cannot be reached, such as a certificate that does not fit. Once per reason."""
        if isinstance(cause, ConnectError) and worker.connect_error != str(cause):
            worker.connect_error = str(cause)
            logger.warning("worker cannot be reached url=%s reason=%r", worker.url, worker.connect_error)

    def _break_off(self, worker: Worker) -> None:
        if worker.broken_off is None:
            logger.error("worker hangs url=%s mode=%s calls=%d", worker.url, worker.mode, len(worker.calls))
        worker.break_off(
            f"hangs: it has given no sign of life for {self._hang_timeout:g} s (--hang-timeout): see what holds it up",
            is_hung=True,
        )


def _discount(worker: Worker, stall: float) -> None:
    """Exclude seconds in which this event loop was blocked from the silence of the worker."""
    if worker.silent_since is not None and stall > 0:
        worker.silent_since += stall
