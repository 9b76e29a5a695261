"""Heartbeat of a worker's schedulers. `/health` reads its age and does not wait for a scheduler itself."""

from __future__ import annotations

import asyncio
from typing import Protocol

from splitserve.core.clock import Clock
from splitserve.core.errors import SplitserveError
from splitserve.core.messages import SchedulerState

# Seconds between two requests for a heartbeat.
INTERVAL = 5.0
# Age of the last heartbeat after which schedulers count as dead, seconds: several times the longest step.
MAX_AGE = 60.0


class StatesPort(Protocol):
    async def states(self, timeout: float = ...) -> list[SchedulerState]: ...


class Heartbeat:
    """Age of the last heartbeat. Run `run` as a task."""

    def __init__(self, schedulers: StatesPort, clock: Clock) -> None:
        self._schedulers = schedulers
        self._clock = clock
        self._last = clock.now()

    async def run(self, interval: float = INTERVAL) -> None:
        """Request heartbeats until cancelled. Ended schedulers are reported elsewhere."""
        while True:
            try:
                await self._schedulers.states(timeout=interval)
                self._last = self._clock.now()
            except SplitserveError:
                # A later heartbeat may succeed. Only the age of the last one counts.
                pass
            await asyncio.sleep(interval)

    def problem(self) -> str | None:
        """Return why no request can be served. None: the last heartbeat is recent."""
        age = self._clock.now() - self._last
        if age <= MAX_AGE:
            return None
        return f"this worker's scheduler has not answered for {age:.0f} s: restart the worker"
