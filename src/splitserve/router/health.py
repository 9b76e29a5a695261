"""Asks every worker how it is, round after round, and tells the registry. Runs as one task of the router."""

from __future__ import annotations

import asyncio
import logging

from splitserve.router.failure import UpstreamError
from splitserve.router.registry import WorkerRegistry
from splitserve.router.upstream import Upstream
from splitserve.router.worker import Worker

logger = logging.getLogger(__name__)

CHECK_TIMEOUT = 5.0


class HealthMonitor:
    def __init__(self, registry: WorkerRegistry, upstream: Upstream, interval: float) -> None:
        self._registry = registry
        self._upstream = upstream
        self._interval = interval

    async def run(self) -> None:
        """For ever; cancel it."""
        while True:
            await self.check_all()
            await asyncio.sleep(self._interval)

    async def check_all(self) -> None:
        """One round. A worker that loads its model or drains answers 503: it gets no requests meanwhile."""
        await asyncio.gather(*(self._check(worker) for worker in self._registry.all()))
        for worker in self._registry.forget_lost():
            logger.warning("worker forgotten url=%s mode=%s reason=unreachable", worker.url, worker.mode)

    async def _check(self, worker: Worker) -> None:
        was_healthy = worker.healthy
        try:
            status, _, _ = await self._upstream.ask(worker, "GET", "/health", seconds=CHECK_TIMEOUT)
        except UpstreamError as error:
            status = error.status
        if status == 200:
            worker.mark_healthy()
        else:
            self._registry.mark_unhealthy(worker)
        if worker.healthy != was_healthy:
            level = logging.INFO if worker.healthy else logging.WARNING
            logger.log(level, "worker url=%s mode=%s healthy=%s", worker.url, worker.mode, worker.healthy)
