"""A small HTTP/1.1 client: requests with a body in memory, answers whole or streamed, connections kept alive.

It exists for its speed. A request that finds an idle connection is sent at once, without a task. An answer costs
little more than its parsing (httptools). The client follows no redirects, requests no compression and keeps no
cookies.

An `UpstreamResponse` exists before there is a connection. Its owner reads it, then closes it. If it is closed before
its end, the connection is closed too, and the server sees a disconnected client.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar, cast
from urllib.parse import urlsplit

import httptools

# Unread bytes of a response at which its connection is paused.
_HIGH_WATER = 1 << 18

R = TypeVar("R", bound="UpstreamResponse")
# A body with one of these headers has a known end; any other body ends with its connection.
_LENGTHS = ("content-length", "transfer-encoding")
# Seconds for which an idle connection is kept. Many servers close theirs after 75.
_KEEP_ALIVE = 60.0
# Seconds for connections to close.
_CLOSE_TIMEOUT = 1.0


class BrokenConnectionError(Exception):
    """The connection ended before the response, or its bytes are not HTTP."""


class ConnectError(BrokenConnectionError):
    """The connection could not be opened."""


class UpstreamResponse:
    """Response to one request. `status` and `headers` (names in lower case) are valid after `head`."""

    def __init__(
        self,
        seconds: float,
        idle_timeout: float,
        loop: asyncio.AbstractEventLoop | None = None,
        max_bytes: float = math.inf,
    ) -> None:
        """Create a response that must end within `seconds`, and must not be silent for longer than `idle_timeout`.

        `max_bytes`: unread bytes of the body at which it fails.
        """
        self._max_bytes = max_bytes
        self.status = 0
        self.headers: dict[str, str] = {}
        self._loop = loop = loop or asyncio.get_running_loop()
        # Connection that the response arrives on. None: not opened yet, or already released.
        self.connection: HttpConnection | None = None
        # Task that opens the connection. None: no connection is being opened.
        self.opening: asyncio.Task[None] | None = None
        self._chunks: list[bytes] = []
        # Number of bytes in `_chunks`.
        self._num_waiting = 0
        # Whether the rest is read in one piece: then pausing the server has no use.
        self._is_read_whole = False
        # Whether its last byte has arrived.
        self.is_whole = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._last_bytes_at = loop.time()
        self._deadline = self._last_bytes_at + seconds
        self._idle_timeout = idle_timeout
        self._timer = loop.call_at(min(self._deadline, self._last_bytes_at + idle_timeout), self._check_time)

    @property
    def is_overdue(self) -> bool:
        """Return whether the time of the response is over."""
        return self._loop.time() >= self._deadline

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
        while not self.is_whole:
            self._resume()
            await self._wait()
        return self._take()

    async def chunk(self) -> bytes:
        """Wait for bytes and return them. Empty: the end. Bytes that arrived before an error come first."""
        while not self._chunks and not self.is_whole:
            await self._wait()
        data = self._take()
        self._resume()
        return data

    def fail(self, error: Exception) -> None:
        """End the response now with this error."""
        if self._error is None and not self.is_whole:
            self._error = self._translated(error)
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
        self.is_whole = True

    # Called by the connection.

    def feed(self, data: bytes) -> None:
        """Add bytes of the body."""
        self._chunks.append(data)
        self._num_waiting += len(data)
        if self._num_waiting > self._max_bytes:
            self.fail(BrokenConnectionError(f"its answer has more than {self._max_bytes} bytes"))
        if self._num_waiting > _HIGH_WATER and not self._is_read_whole and self.connection is not None:
            self.connection.pause()

    def heartbeat(self) -> None:
        """Record the arrival of bytes."""
        self._last_bytes_at = self._loop.time()
        self.wake()

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # Called by the reader.

    def _translated(self, error: Exception) -> Exception:
        """Return the error that readers get for `error`."""
        return error

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
        ends_at = min(self._deadline, self._last_bytes_at + self._idle_timeout)
        if self.connection is not None and self.connection.is_paused:
            # The reader is slow, not the server.
            ends_at = min(self._deadline, self._loop.time() + self._idle_timeout)
        if ends_at <= self._loop.time():
            self.fail(TimeoutError())
        else:
            self._timer = self._loop.call_at(ends_at, self._check_time)


class HttpConnection(asyncio.Protocol):
    """Connection that is in `everyone` while it is open, and in `idle` while it has no request."""

    transport: asyncio.Transport

    def __init__(
        self, loop: asyncio.AbstractEventLoop, everyone: set[HttpConnection], idle: deque[HttpConnection]
    ) -> None:
        self._everyone = everyone
        self._idle = idle
        self._parser = httptools.HttpResponseParser(self)
        # Pending response. None: its last byte has arrived.
        self._answer: UpstreamResponse | None = None
        self._headers: dict[str, str] = {}
        self._stays_open = False
        self.closed: asyncio.Future[None] = loop.create_future()
        self.is_paused = False
        # Clock time since which the connection is idle.
        self.idle_since = 0.0

    def send(self, request: bytes, answer: UpstreamResponse) -> None:
        self._answer = answer
        answer.connection = self
        self.transport.write(request)

    def release(self) -> None:
        """Return the connection to the idle ones. If its response is incomplete, abort it."""
        if self._answer is None and self._stays_open and not self.transport.is_closing():
            self.resume()
            self.idle_since = time.monotonic()
            self._idle.append(self)
        else:
            self._answer = None
            self.transport.abort()

    def pause(self) -> None:
        if not self.is_paused and not self.transport.is_closing():
            self.is_paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.is_paused and not self.transport.is_closing():
            self.is_paused = False
            self.transport.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have asyncio's methods, but not its base classes.
        self.transport = cast(asyncio.Transport, transport)
        self._everyone.add(self)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            # Data without a request.
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.transport.abort()
            answer.fail(BrokenConnectionError(f"no HTTP: {error}"))
        answer.heartbeat()

    def connection_lost(self, error: Exception | None) -> None:
        self._everyone.discard(self)
        self.closed.set_result(None)
        if self in self._idle:
            self._idle.remove(self)
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if answer.status and error is None and not any(name in answer.headers for name in _LENGTHS):
            answer.is_whole = True
            answer.wake()
        else:
            answer.fail(BrokenConnectionError(str(error or "closed")))

    # httptools

    def on_message_begin(self) -> None:
        if self._answer is None:
            self.transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower().decode("latin-1")] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status, headers = self._parser.get_status_code(), self._headers
        self._headers = {}
        # After a 1xx status the response itself still follows.
        if self._answer is not None and status >= 200:
            self._answer.status, self._answer.headers = status, headers

    def on_body(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.feed(data)

    def on_message_complete(self) -> None:
        if self._answer is not None and self._answer.status:
            self._stays_open = self._parser.should_keep_alive()
            self._answer.is_whole = True
            self._answer = None


@dataclass(frozen=True, slots=True)
class _Target:
    """Destination of the requests to a URL."""

    host: str
    port: int
    is_tls: bool
    # Prefix of every path.
    prefix: str
    # Value of the host header.
    authority: str


class HttpClient:
    """Owner of its connections. Send requests in one event loop, then `close` it."""

    def __init__(self, connect_timeout: float, tls: ssl.SSLContext | None = None) -> None:
        """Create a client. `tls`: for servers at https URLs. None: the certificates that the system trusts."""
        self._connect_timeout = connect_timeout
        # Connections without a request, the last used at the right.
        self._idle: dict[_Target, deque[HttpConnection]] = defaultdict(deque)
        self._all: set[HttpConnection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._tls = tls

    def send(
        self,
        method: str,
        url: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        answer: R,
        connect_timeout: float | None = None,
    ) -> R:
        """Send a request for `path` to the server at `url`, and return `answer`, its response. Do not wait."""
        target = _target(url)
        request = _request(method, target, path, body, headers)
        connection = self._idle_connection(target)
        if connection is not None:
            connection.send(request, answer)
            return answer
        limit = self._connect_timeout if connect_timeout is None else connect_timeout
        task = asyncio.create_task(self._open_and_send(target, request, answer, limit))
        answer.opening = task
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return answer

    async def close(self) -> None:
        """Abort all connections and the requests in flight."""
        for task in list(self._opening):
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        closed = [connection.closed for connection in self._all]
        for connection in self._all:
            connection.transport.abort()
        if closed:
            await asyncio.wait(closed, timeout=_CLOSE_TIMEOUT)

    def _idle_connection(self, target: _Target) -> HttpConnection | None:
        idle = self._idle[target]
        while idle:
            connection = idle.pop()
            if connection.transport.is_closing():
                continue
            if time.monotonic() - connection.idle_since < _KEEP_ALIVE:
                return connection
            # This connection and those further left have been idle for too long: close them.
            idle.append(connection)
            for old in idle:
                old.transport.close()
            idle.clear()
        return None

    async def _open_and_send(self, target: _Target, request: bytes, answer: UpstreamResponse, limit: float) -> None:
        if target.is_tls and self._tls is None:
            self._tls = ssl.create_default_context()
        loop, tls = asyncio.get_running_loop(), self._tls if target.is_tls else None
        try:
            async with asyncio.timeout(limit):
                _, connection = await loop.create_connection(
                    lambda: HttpConnection(loop, self._all, self._idle[target]), target.host, target.port, ssl=tls
                )
        except (TimeoutError, OSError, UnicodeError) as error:  # UnicodeError: no name server accepts the host name.
            answer.fail(ConnectError(str(error) or f"no connection within {limit:g} s"))
        else:
            answer.opening = None
            connection.send(request, answer)


@lru_cache(maxsize=1024)
def _target(url: str) -> _Target:
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    authority = parts.netloc.rpartition("@")[2]
    return _Target(parts.hostname or "", parts.port or (443 if is_tls else 80), is_tls, parts.path, authority)


def _request(method: str, target: _Target, path: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {target.prefix}{path} HTTP/1.1\r\nhost: {target.authority}\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in headers.items()]
    if "accept" not in headers:
        lines.append("accept: */*\r\n")
    if body is None:
        return ("".join(lines) + "\r\n").encode("latin-1")
    return (f"{''.join(lines)}content-length: {len(body)}\r\n\r\n").encode("latin-1") + body
