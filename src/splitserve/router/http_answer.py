"""The answer to one HTTP request, as it comes."""

from __future__ import annotations

import asyncio
from typing import Protocol

# Bytes of an answer that wait to be read before its connection is read no further.
_HIGH_WATER = 1 << 18


class BrokenConnectionError(Exception):
    """The connection ended before the answer did, or what came is no HTTP."""


class ConnectError(BrokenConnectionError):
    """There was never a connection."""


class Connection(Protocol):
    """What an answer comes by."""

    is_paused: bool

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def release(self) -> None:
        """The answer is done with. Unless that has come to its end, it takes the connection along."""
        ...


class Answer:
    """The answer to one request. `status` and `headers` (names in lower case) hold from `head` on."""

    __slots__ = (
        "_chunks",
        "_deadline",
        "_error",
        "_idle_timeout",
        "_is_read_whole",
        "_is_whole",
        "_last_sign",
        "_loop",
        "_num_waiting",
        "_timer",
        "_waiter",
        "connection",
        "headers",
        "opening",
        "status",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, idle_timeout: float) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._loop = loop
        # None: there is none yet, or no longer.
        self.connection: Connection | None = None
        # Of the connection, while there is none.
        self.opening: asyncio.Task[None] | None = None
        self._chunks: list[bytes] = []
        # Bytes of them.
        self._num_waiting = 0
        # It is wanted in one piece: there is no use in letting the server wait.
        self._is_read_whole = False
        # Its last byte has come.
        self._is_whole = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._last_sign = loop.time()
        self._deadline = self._last_sign + seconds
        self._idle_timeout = idle_timeout
        self._timer = loop.call_at(min(self._deadline, self._last_sign + idle_timeout), self._check_time)

    async def head(self) -> None:
        """Returns when status and headers are there. As all that waits here, it raises what ended the answer:
        ConnectError, BrokenConnectionError, TimeoutError, or what `fail` was given."""
        while not self.status:
            await self._wait()

    async def read(self) -> bytes:
        """All that is left of the body."""
        self._is_read_whole = True
        while not self._is_whole:
            self._resume()
            await self._wait()
        return self._take()

    async def chunk(self) -> bytes:
        """What has come since, waiting for it; empty at the end. What came before an error comes before it."""
        while not self._chunks and not self._is_whole:
            await self._wait()
        data = self._take()
        self._resume()
        return data

    def fail(self, error: Exception) -> None:
        """It ends now, with this error."""
        if self._error is None and not self._is_whole:
            self._error = error
            self.wake()

    def close(self) -> None:
        """Idempotent."""
        self._timer.cancel()
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.release()
        if self.opening is not None:
            self.opening.cancel()
            self.opening = None
        self._is_whole = True

    # What the connection tells.

    def begin(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers

    def feed(self, data: bytes) -> None:
        """Of the body."""
        self._chunks.append(data)
        self._num_waiting += len(data)
        if self._num_waiting > _HIGH_WATER and not self._is_read_whole and self.connection is not None:
            self.connection.pause()

    def finish(self) -> None:
        """The last byte has come."""
        self._is_whole = True

    def give_sign(self) -> None:
        """Bytes of it have come."""
        self._last_sign = self._loop.time()
        self.wake()

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # What the reader does.

    def _take(self) -> bytes:
        chunks, self._num_waiting = self._chunks, 0
        if len(chunks) == 1:
            return chunks.pop()
        self._chunks = []
        return b"".join(chunks)

    def _resume(self) -> None:
        if self.connection is not None:
            self.connection.resume()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        waiter = self._waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def _check_time(self) -> None:
        """The timer has run out; signs that came since it was set have not moved it."""
        ends_at = min(self._deadline, self._last_sign + self._idle_timeout)
        if self._is_paused():
            # It is the reader who is slow.
            ends_at = min(self._deadline, self._loop.time() + self._idle_timeout)
        if ends_at <= self._loop.time():
            self.fail(TimeoutError())
        else:
            self._timer = self._loop.call_at(ends_at, self._check_time)

    def _is_paused(self) -> bool:
        return self.connection is not None and self.connection.is_paused
