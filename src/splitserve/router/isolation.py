"""Isolation of suspect requests.

A worker that hangs or dies leaves several requests whose prompts it was processing. One of them may be the cause. They
are sent to the next workers one at a time for each worker, so a second failure hits only the request that caused it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress


class IsolationTurn:
    """Right to be the only suspect request at some workers. Call `begin`, then `end` in every case.

    `locks`: those of the workers, always in the same order. `wait`: seconds to wait for the locks; after that, the
    request goes on without them. `limit`: seconds after which the turn ends by itself.
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
