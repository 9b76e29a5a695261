"""Between a caller's thread or event loop and the engine's own loop, which runs in a thread of its own.

1. `wait` and `wait_async` run a coroutine in the engine's loop while the caller waits. A wait that is interrupted or
   cancelled cancels the coroutine.
2. A Run is known here from its first wait to its `end`, so that `close` finds and stops it.
3. After `close` nothing is run any more: waits raise, ends have nothing to do.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from splitserve.disaggregation.loop_thread import LoopThread
from splitserve.errors import SplitserveError, WorkerUnavailableError
from splitserve.offline.backends import Backend
from splitserve.offline.runs import Run

T = TypeVar("T")


class Bridge:
    def __init__(self) -> None:
        self._loop = LoopThread("splitserve-engine")
        # Guards the two below: whoever submits finds the loop running.
        self._lock = threading.Lock()
        self._closed = False
        self._runs: set[Run] = set()

    def wait(self, work: Coroutine[Any, Any, T], run: Run | None = None) -> T:
        """Its result. Raises WorkerUnavailableError when closed; interrupted (Ctrl-C), it cancels `work`."""
        future = self._submit(work, run)
        try:
            return future.result()
        except CancelledError:
            raise _closed_error() from None
        except BaseException:
            future.cancel()
            raise

    async def wait_async(self, work: Coroutine[Any, Any, T], run: Run | None = None) -> T:
        """`wait` for a coroutine of another loop."""
        return await asyncio.wrap_future(self._submit(work, run))

    def end(self, run: Run) -> None:
        """Abort what is left of it; returns when that is done."""
        if self._forget(run):
            self.wait(run.close())

    async def end_async(self, run: Run) -> None:
        if self._forget(run):
            await self.wait_async(run.close())

    def close(self, backend: Backend) -> None:
        """Stop every run and the backend, then the loop. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            runs = list(self._runs)
        try:
            self._loop.submit(_stop(runs, _closed_error(), backend)).result()
        finally:
            self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, T], run: Run | None) -> Future[T]:
        with self._lock:
            if self._closed:
                work.close()
                raise _closed_error()
            if run is not None:
                self._runs.add(run)
            return self._loop.submit(work)

    def _forget(self, run: Run) -> bool:
        """Whether it is still to be ended: after `close` it has been."""
        with self._lock:
            self._runs.discard(run)
            return not self._closed


async def _stop(runs: list[Run], error: SplitserveError, backend: Backend) -> None:
    for run in runs:
        await run.stop(error)
    await backend.close()


def _closed_error() -> WorkerUnavailableError:
    return WorkerUnavailableError("this engine is closed, and whatever it ran was aborted: open another")
