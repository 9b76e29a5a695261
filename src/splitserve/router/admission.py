"""How many requests the router lets to the workers at once.

1. A request that finds a place free, and nobody waiting for one, goes on at once.
2. Else it waits, in the order of arrival, its own time running. Where as many wait as may, it is refused.
3. Whoever ends gives the place on, also by leaving; so does whoever leaves the line.

It does not know what a request is.
"""

from __future__ import annotations

import asyncio
import time

from splitserve.errors import CapacityError, DeadlineExceededError


class Admission:
    """`max_running`: None: as many as come. `max_queued`: that wait, at most."""

    def __init__(self, max_running: int | None, max_queued: int) -> None:
        self._max_running = max_running
        self._max_queued = max_queued
        # Hands its places on in the order in which they were asked for.
        self._places = None if max_running is None else asyncio.Semaphore(max_running)
        self.num_queued = 0

    def place(self, rid: object, seconds: float) -> _Place:
        """A context that holds a place; it gives the seconds that the request waited, exactly 0 if it did not have to.

        Entering it raises CapacityError, and DeadlineExceededError when the request has waited its `seconds`.
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
    """Written out, as every request comes through here: a generator for it costs several times as much."""

    __slots__ = ("_admission", "_rid", "_seconds")

    def __init__(self, admission: Admission, rid: object, seconds: float) -> None:
        self._admission = admission
        self._rid = rid
        self._seconds = seconds

    async def __aenter__(self) -> float:
        return await self._admission._enter(self._rid, self._seconds)

    async def __aexit__(self, *_: object) -> None:
        self._admission._leave()
