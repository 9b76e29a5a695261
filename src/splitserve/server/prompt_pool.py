"""Threads that parse, render and tokenize large requests, so that these do not block the event loop.

Small requests are processed at once, in the event loop. The others wait in one of two lanes by size. Each lane has its
own thread, so that a client that sends the largest requests delays only requests of that size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from splitserve.core.errors import CapacityError, DeadlineExceededError

T = TypeVar("T")

# Largest body that is processed in the event loop, bytes: some milliseconds of tokenization.
INLINE_BYTES = 8 << 10
# Largest body in the lane of medium requests, bytes.
MEDIUM_BYTES = 256 << 10
MAX_WAITING = 256
# Seconds that a request may take in its lane, with its wait.
TIMEOUT = 60.0


class PromptPool:
    """Two lanes of threads. `max_waiting`: requests in each lane. `timeout`: seconds per request. `close` it."""

    def __init__(self, max_waiting: int = MAX_WAITING, timeout: float = TIMEOUT) -> None:
        self._medium = _Lane("medium-prompts", max_waiting, timeout)
        self._large = _Lane("large-prompts", max_waiting, timeout)

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Return the result of `work` for a body of this size.

        Raises what `work` raises, CapacityError, DeadlineExceededError.
        """
        if num_bytes <= INLINE_BYTES:
            return work()
        return await (self._medium if num_bytes <= MEDIUM_BYTES else self._large).run(work)

    def close(self) -> None:
        """Cancel work that has not begun. Idempotent."""
        self._medium.close()
        self._large.close()


class _Lane:
    """One thread, and the requests that wait for it in order of arrival."""

    def __init__(self, name: str, max_waiting: int, timeout: float) -> None:
        self._max_waiting = max_waiting
        self._timeout = timeout
        self._num_waiting = 0
        self._thread = ThreadPoolExecutor(1, name)

    async def run(self, work: Callable[[], T]) -> T:
        if self._num_waiting >= self._max_waiting:
            raise CapacityError(f"{self._num_waiting} large requests wait for tokenization: retry later")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._timeout):
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except TimeoutError:
            raise DeadlineExceededError(
                f"the prompt was not tokenized within {self._timeout:g} s (stage: tokenization): retry later"
            ) from None
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
