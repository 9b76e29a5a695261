"""Bridge between a caller's thread or event loop and the engine's own loop, which runs in its own thread.

1. `wait` and `wait_async` run a coroutine in the engine's loop while the caller waits. A wait that is interrupted or
   cancelled cancels the coroutine.
2. A run is registered here from its first wait to its `end`, so that `close` can stop it.
3. After `close` no coroutine is run: waits raise, and `end` does nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from splitserve.core.errors import SplitserveError, WorkerUnavailableError
from splitserve.offline.backends import EngineBackend
from splitserve.offline.runs import OfflineRun
from splitserve.transfer.loop_thread import LoopThread

T = TypeVar("T")


class Bridge:
    def __init__(self) -> None:
        self._loop = LoopThread("splitserve-engine")
        # Guards the two below: a submitter always finds the loop running.
        self._lock = threading.Lock()
        self._closed = False
        self._runs: set[OfflineRun] = set()

    def wait(self, work: Coroutine[Any, Any, T], run: OfflineRun | None = None) -> T:
        """Run `work` and return its result. An interrupt (Ctrl-C) cancels `work`.

        Raises WorkerUnavailableError when closed.
        """
        future = self._submit(work, run)
        try:
            return future.result()
        except CancelledError:
            raise _closed_error() from None
        except BaseException:
            future.cancel()
            raise

    async def wait_async(self, work: Coroutine[Any, Any, T], run: OfflineRun | None = None) -> T:
        """Run `work` for a coroutine of another loop. Otherwise like `wait`."""
        return await asyncio.wrap_future(self._submit(work, run))

    def end(self, run: OfflineRun) -> None:
        """Abort the rest of a run; return when that is done."""
        if self._forget(run):
            self.wait(run.close())

    async def end_async(self, run: OfflineRun) -> None:
        if self._forget(run):
            await self.wait_async(run.close())

    def close(self, backend: EngineBackend) -> None:
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

    def _submit(self, work: Coroutine[Any, Any, T], run: OfflineRun | None) -> Future[T]:
        with self._lock:
            if self._closed:
                work.close()
                raise _closed_error()
            if run is not None:
                self._runs.add(run)
            return self._loop.submit(work)

    def _forget(self, run: OfflineRun) -> bool:
        """Forget a run. Return whether it still has to be ended; `close` has ended all."""
        with self._lock:
            self._runs.discard(run)
            return not self._closed


async def _stop(runs: list[OfflineRun], error: SplitserveError, backend: EngineBackend) -> None:
    for run in runs:
        await run.stop(error)
    await backend.close()


def _closed_error() -> WorkerUnavailableError:
    return WorkerUnavailableError("this engine is closed, and whatever it ran was aborted: open another")
