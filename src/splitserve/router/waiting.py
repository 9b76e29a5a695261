"""Requests that wait at the router: how many, since when, and what wakes those that wait for a worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from splitserve.core.errors import NoWorkerError, WorkerUnavailableError

T = TypeVar("T")


class WaitingList:
    """Requests that wait for the same thing. `max_size`: callers reject further requests while it `is_full`."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        # Clock times at which requests began to wait, in order of arrival.
        self._began: dict[object, float] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._began)

    @property
    def is_full(self) -> bool:
        return len(self._began) >= self._max_size

    def oldest_wait(self) -> float:
        """Return the seconds that the first request has waited. 0: none waits."""
        return time.monotonic() - next(iter(self._began.values())) if self._began else 0.0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Count a request as waiting within this context."""
        waiting = object()
        self._began[waiting] = time.monotonic()
        try:
            yield
        finally:
            del self._began[waiting]


class Wakeup:
    """Event that wakes every task that waits for it at that moment. It can be sent again and again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def send(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """Return at the next `send`, or after `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()


class WorkerWait:
    """Wait of requests for a worker of a role that has none. Each waits at most `timeout` seconds.

    `returned`: sent when a worker may have returned. While `max_waiting` requests wait, others fail at once.
    """

    def __init__(self, returned: Wakeup, timeout: float, max_waiting: int) -> None:
        self.queue = WaitingList(max_waiting)
        self._returned = returned
        self._timeout = timeout

    async def until(self, choose: Callable[[], T], seconds: float) -> T:
        """Return what `choose` returns, at the first call that does not raise NoWorkerError.

        Raises WorkerUnavailableError after `seconds`, or at once if too many requests wait.
        """
        limit = min(self._timeout, seconds)
        try:
            return choose()
        except NoWorkerError:
            if limit <= 0 or self.queue.is_full:
                raise
        deadline = time.monotonic() + limit
        with self.queue.place():
            while True:
                await self._returned.wait(deadline - time.monotonic())
                try:
                    return choose()
                except NoWorkerError as missing:
                    if time.monotonic() >= deadline:
                        raise WorkerUnavailableError(f"{missing.message} (waited {limit:.3g} s)") from None
