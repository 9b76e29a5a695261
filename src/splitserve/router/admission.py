"""Limit of the requests that the router sends to the workers at once.

1. A request is admitted at once if a slot is free and no request waits.
2. Otherwise it waits in order of arrival, within its own deadline. If the queue is full, it is rejected.
3. A request that ends or is cancelled passes its slot to the next. A waiting request that is cancelled leaves the
   queue.

Independent of what a request is.
"""

from __future__ import annotations

import asyncio
import time

from splitserve.core.errors import CapacityError, DeadlineExceededError


class RequestAdmission:
    """Slots for running requests, and a queue. `max_running` None: no limit. `max_queued`: waiting requests."""

    def __init__(self, max_running: int | None, max_queued: int) -> None:
        self._max_running = max_running
        self._max_queued = max_queued
        # Grants slots in the order in which they were requested.
        self._places = None if max_running is None else asyncio.Semaphore(max_running)
        self.num_queued = 0

    def place(self, rid: object, seconds: float) -> _Place:
        """Return a context that holds a slot. It yields the seconds that the request waited, exactly 0 without a wait.

        Entering it raises CapacityError if the queue is full, and DeadlineExceededError after `seconds` of waiting.
        """
        return _Place(self, rid, seconds)

    async def _enter(self, rid: object, seconds: float) -> float:
        if self._places is None:
            return 0.0
        if self._places.locked():
            return await self._wait(self._places, rid, seconds)
        await self._places.acquire()
        return 0.0

    def _leave(self) -> None:
        if self._places is not None:
            self._places.release()

    async def _wait(self, places: asyncio.Semaphore, rid: object, seconds: float) -> float:
        if self.num_queued >= self._max_queued:
            raise CapacityError(
                f"request {rid} (stage: waiting at the router): {self._max_running} requests are under way and "
                f"{self.num_queued} wait, as many as may (--max-running-requests, --max-queued-requests): try again in "
                "a moment",
                stage="waiting",
            )
        began = time.monotonic()
        self.num_queued += 1
        try:
            async with asyncio.timeout(seconds):
                await places.acquire()
        except TimeoutError:
            raise DeadlineExceededError(
                f"request {rid} (stage: waiting at the router): {max(0.0, seconds):.3g} s passed and all "
                f"{self._max_running} places were taken (--max-running-requests): give it a longer timeout",
                stage="waiting",
            ) from None
        finally:
            self.num_queued -= 1
        return time.monotonic() - began


class _Place:
    """Context of one slot. A class, because every request uses one and a generator would cost several times as much."""

    __slots__ = ("_admission", "_rid", "_seconds")

    def __init__(self, admission: RequestAdmission, rid: object, seconds: float) -> None:
        self._admission = admission
        self._rid = rid
        self._seconds = seconds

    async def __aenter__(self) -> float:
        return await self._admission._enter(self._rid, self._seconds)

    async def __aexit__(self, *_: object) -> None:
        self._admission._leave()
