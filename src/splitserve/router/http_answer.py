"""Response to one HTTP request, readable while it arrives."""

from __future__ import annotations

import asyncio
from typing import Protocol

# Unread bytes of a response at which its connection is paused.
_HIGH_WATER = 1 << 18


class BrokenConnectionError(Exception):
    """The connection ended before the response, or its bytes are not HTTP."""


class ConnectError(BrokenConnectionError):
    """The connection could not be opened."""


class Connection(Protocol):
    """Interface of the connection that a response arrives on."""

    is_paused: bool

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def release(self) -> None:
        """Return the connection to the idle ones. If the response is incomplete, close it."""
        ...


class UpstreamResponse:
    """Response to one request. `status` and `headers` (names in lower case) are valid after `head`."""

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
        # Connection that the response arrives on. None: not opened yet, or already released.
        self.connection: Connection | None = None
        # Task that opens the connection. None: no connection is being opened.
        self.opening: asyncio.Task[None] | None = None
        self._chunks: list[bytes] = []
        # Number of bytes in `_chunks`.
        self._num_waiting = 0
        # Whether the rest is read in one piece: then pausing the server has no use.
        self._is_read_whole = False
        # Whether its last byte has arrived.
        self._is_whole = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._last_sign = loop.time()
        self._deadline = self._last_sign + seconds
        self._idle_timeout = idle_timeout
        self._timer = loop.call_at(min(self._deadline, self._last_sign + idle_timeout), self._check_time)

    async def head(self) -> None:
        """Wait for status and headers.

        Raises, like all methods that wait, the error that ended the response: ConnectError, BrokenConnectionError,
        TimeoutError, or the one given to `fail`.
        """
        while not self.status:
            await self._wait()

    async def read(self) -> bytes:
        """Return the rest of the body."""
        self._is_read_whole = True
        while not self._is_whole:
            self._resume()
            await self._wait()
        return self._take()

    async def chunk(self) -> bytes:
        """Wait for bytes and return them. Empty: the end. Bytes that arrived before an error come first."""
        while not self._chunks and not self._is_whole:
            await self._wait()
        data = self._take()
        self._resume()
        return data

    def fail(self, error: Exception) -> None:
        """End the response now with this error."""
        if self._error is None and not self._is_whole:
            self._error = error
            self.wake()

    def close(self) -> None:
        """Release the connection. Idempotent."""
        self._timer.cancel()
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.release()
        if self.opening is not None:
            self.opening.cancel()
            self.opening = None
        self._is_whole = True

    # Called by the connection.

    def begin(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers

    def feed(self, data: bytes) -> None:
        """Add bytes of the body."""
        self._chunks.append(data)
        self._num_waiting += len(data)
        if self._num_waiting > _HIGH_WATER and not self._is_read_whole and self.connection is not None:
            self.connection.pause()

    def finish(self) -> None:
        """Mark the response as complete."""
        self._is_whole = True

    def give_sign(self) -> None:
        """Record the arrival of bytes."""
        self._last_sign = self._loop.time()
        self.wake()

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # Called by the reader.

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
        """Check the timeouts when the timer fires. Bytes that arrived since it was set have not moved it."""
        ends_at = min(self._deadline, self._last_sign + self._idle_timeout)
        if self._is_paused():
            # The reader is slow, not the server.
            ends_at = min(self._deadline, self._loop.time() + self._idle_timeout)
        if ends_at <= self._loop.time():
            self.fail(TimeoutError())
        else:
            self._timer = self._loop.call_at(ends_at, self._check_time)

    def _is_paused(self) -> bool:
        return self.connection is not None and self.connection.is_paused
