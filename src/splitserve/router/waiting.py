"""Requests that wait at the router: how many, since when, and what wakes those that wait for a worker."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from splitserve.core.errors import NoWorkerError, WorkerUnavailableError

T = TypeVar("T")

logger = logging.getLogger(__name__)


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


def wait_reason(missing: NoWorkerError) -> str:
    """Return the reason of a wait for a worker as one word."""
    roles = missing.param or ""
    return f"no_{roles}_worker" if roles and "," not in roles else "no_worker"


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
    """Waits of requests for a worker of a role that has none, each at most `timeout` seconds.

    `returned`: sent when a worker may have returned. While `max_waiting` requests wait, others fail at once.
    """

    def __init__(self, returned: Wakeup, timeout: float, max_waiting: int) -> None:
        self.queue = WaitingList(max_waiting)
        self._returned = returned
        self._timeout = timeout
        self._is_closed = False

    def close(self) -> None:
        """Let all requests fail instead of waiting: the router accepts no more workers. Idempotent."""
        self._is_closed = True
        self._returned.send()

    async def until(self, choose: Callable[[], T], seconds: float) -> tuple[T, float]:
        """Return the result of the first call of `choose` without a NoWorkerError.

        With it: the seconds that the request waited for it, exactly 0 without a wait. Raises WorkerUnavailableError
        after `seconds`, or at once if too many requests wait.
        """
        limit = min(self._timeout, seconds)
        try:
            return choose(), 0.0
        except NoWorkerError as missing:
            if limit <= 0 or self.queue.is_full or self._is_closed:
                raise
            if not self.queue.num_waiting:
                logger.warning("requests wait for a worker reason=%r", missing.message)
        began = time.monotonic()
        with self.queue.place():
            found = await self._retry(choose, began, limit)
        if not self.queue.num_waiting:
            logger.info("no request waits for a worker")
        return found, time.monotonic() - began

    async def _retry(self, choose: Callable[[], T], began: float, limit: float) -> T:
        while True:
            await self._returned.wait(began + limit - time.monotonic())
            try:
                return choose()
            except NoWorkerError as missing:
                if self._is_closed:
                    raise WorkerUnavailableError("this router stops: send the request to another one") from None
                if (waited := time.monotonic() - began) >= limit:
                    message = f"{missing.message} (waited {waited:.3g} s)"
                    raise WorkerUnavailableError(message, param=missing.param) from None
