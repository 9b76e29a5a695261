"""Admission of requests: rate per key, slots at the workers, turns of suspects. Independent of their content.

Slots limit the requests that the router sends to the workers at once:

1. A request is admitted at once if a slot is free and no request waits.
2. Otherwise it waits in order of arrival, within its own deadline. If the queue is full, it is rejected.
3. A request that ends or is cancelled passes its slot to the next. A waiting request that is cancelled leaves the
   queue.

Isolation: a worker that hangs or dies leaves several requests in prefill. One of them may be the cause. They are sent
to the next workers one at a time for each worker, so a second failure hits only the request that caused it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress

from splitserve.core.clock import Clock, SystemClock
from splitserve.core.errors import CapacityError, DeadlineExceededError, RateLimitError
from splitserve.router.waiting import WaitingList


class IsolationTurn:
    """Exclusive turn of one suspect request at some workers. Call `begin`, then `end` in every case.

    `locks`: the `isolation` locks of these workers, in the same order for every turn. `wait`: seconds to wait for the
    locks; after that, the request continues without them. `limit`: seconds after which the turn ends by itself.
    """

    def __init__(self, locks: Iterable[asyncio.Lock], *, wait: float, limit: float) -> None:
        self._locks = locks
        self._wait = wait
        self._limit = limit
        self._held: list[asyncio.Lock] = []
        self._timer: asyncio.TimerHandle | None = None

    async def begin(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._wait):
                for lock in self._locks:
                    await lock.acquire()
                    self._held.append(lock)
        self._timer = asyncio.get_running_loop().call_later(self._limit, self.end)

    def end(self) -> None:
        """Release the locks. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        while self._held:
            self._held.pop().release()


class RequestAdmission:
    """Slots for running requests, and a queue. `max_running` None: no limit. `max_queued`: waiting requests."""

    def __init__(self, max_running: int | None, max_queued: int) -> None:
        self._max_running = max_running
        # Grants slots in the order in which they were requested.
        self._slots = None if max_running is None else asyncio.Semaphore(max_running)
        self.queue = WaitingList(max_queued)

    async def enter(self, rid: object, seconds: float) -> float:
        """Take a slot, and return the seconds that the request waited for it, exactly 0 without a wait.

        Raises CapacityError if the queue is full, and DeadlineExceededError after `seconds` of waiting. Call `leave` if
        it does not raise.
        """
        if self._slots is None:
            return 0.0
        if not self._slots.locked():
            await self._slots.acquire()
            return 0.0
        if self.queue.is_full:
            raise CapacityError(
                f"request {rid} (stage: waiting at the router): {self._max_running} requests run and "
                f"{self.queue.num_waiting} wait, as many as may (--max-running-requests, --max-queued-requests): try "
                "again in a moment",
                stage="waiting",
            )
        began = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                with self.queue.place():
                    await self._slots.acquire()
        except TimeoutError:
            raise DeadlineExceededError(
                f"request {rid} (stage: waiting at the router): {max(0.0, seconds):.3g} s passed and all "
                f"{self._max_running} places were taken (--max-running-requests): give it a longer timeout",
                stage="waiting",
            ) from None
        return time.monotonic() - began

    def leave(self) -> None:
        """Return the slot."""
        if self._slots is not None:
            self._slots.release()


class RateLimit:
    """Token buckets, one per caller, full at first. Their number is limited by the number of keys.

    `rate`: requests per second on average, `burst`: at once; both per caller. A bucket is stored as the time at which
    it will be full again (generic cell rate algorithm, ITU-T I.371).
    """

    def __init__(self, rate: float, burst: int, clock: Clock | None = None) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock or SystemClock()
        self._full_at: dict[str, float] = {}

    def take(self, caller: str) -> None:
        """Count a request. Raises RateLimitError, and then does not count it."""
        now = self._clock.now()
        full_at = max(now, self._full_at.get(caller, now))
        too_early = full_at - now - (self._burst - 1) / self._rate
        # Smaller values are rounding errors if the machine's clock has run for months.
        if too_early > 1e-6:
            raise RateLimitError(
                f"{caller} sent more than {self._rate:g} requests a second (--rate-limit) and {self._burst} at once: "
                f"retry in {too_early:.3g} s",
                retry_after=too_early,
            )
        self._full_at[caller] = full_at + 1 / self._rate
