"""Waiting: an asyncio loop in a thread of its own, the end of asyncio tasks, and a wake-up for a polling thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An asyncio loop in a thread of its own, for HTTP in a process with a thread that must not block."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            # Ctrl-C while the thread starts. The caller has no object to close yet.
            self._end()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` in the loop. Return a future for the caller's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel running tasks and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self.submit(self._cancel_tasks()).result()
        self._end()

    @staticmethod
    async def _cancel_tasks() -> None:
        await end_tasks(task for task in asyncio.all_tasks() if task is not asyncio.current_task())

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread.ident is not None:
            self._thread.join()
        self._loop.close()


async def end_tasks(tasks: Iterable[asyncio.Future[Any]]) -> list[Any]:
    """Cancel the tasks that still run, and wait for the end of all. Return their results and errors."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


class Waker:
    """Wake-up for a waiting thread, from any other. The waiter polls `fileno()`, and calls `clear` before its work."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        """Wake the waiter without blocking. A full buffer means a pending wake-up; a closed waker has no waiter."""
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
