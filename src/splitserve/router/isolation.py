"""Isolation of suspect requests.

A worker that hangs or dies leaves several requests in prefill. One of them may be the cause. They are sent to the next
workers one at a time for each worker, so a second failure hits only the request that caused it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress


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
