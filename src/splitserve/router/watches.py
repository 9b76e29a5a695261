"""One task per registered worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from splitserve.router.worker import Worker

Watch = Callable[[Worker], Coroutine[Any, Any, None]]


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
