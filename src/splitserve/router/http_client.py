"""A small HTTP/1.1 client: requests with a body in memory, answers in one piece or as they come, connections kept.

It exists for its speed: a request that finds a connection goes out in the same moment, without a task, and an answer
costs its parsing (httptools) and little more. It follows no redirects, asks for no compression and keeps no cookies.

An `Answer` is there at once, before there is a connection. Whoever has it reads it, then closes it; closed before its
end, its connection is closed, too, which the server sees as a client that left.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import cast
from urllib.parse import urlsplit

import httptools

# Bytes of an answer that wait to be read before its connection is read no further.
_HIGH_WATER = 1 << 18
# Seconds for which a connection that nobody uses is kept. Many servers close theirs after 75.
_KEEP_ALIVE = 60.0
# Seconds that connections have to say goodbye.
_CLOSE_TIMEOUT = 1.0
# The body of these ends where they say; any other ends with its connection.
_LENGTHS = ("content-length", "transfer-encoding")


class BrokenConnectionError(Exception):
    """The connection ended before the answer did, or what came is no HTTP."""


class ConnectError(BrokenConnectionError):
    """There was never a connection."""


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a URL's requests go."""

    host: str
    port: int
    is_tls: bool
    # Before every path.
    prefix: str
    # The value of the host header.
    authority: str


class Answer:
    """The answer to one request. `status` and `headers` (names in lower case) hold from `head` on."""

    __slots__ = (
        "_chunks",
        "_connection",
        "_deadline",
        "_error",
        "_idle_timeout",
        "_is_read_whole",
        "_is_whole",
        "_last_sign",
        "_loop",
        "_num_waiting",
        "_opening",
        "_timer",
        "_waiter",
        "headers",
        "status",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, idle_timeout: float) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._loop = loop
        self._connection: _Connection | None = None
        # Of the connection, while there is none.
        self._opening: asyncio.Task[None] | None = None
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
            self._wake()

    def close(self) -> None:
        """Idempotent."""
        self._timer.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        self._is_whole = True

    # What the connection tells.

    def _feed(self, data: bytes) -> None:
        self._chunks.append(data)
        self._num_waiting += len(data)
        if self._num_waiting > _HIGH_WATER and not self._is_read_whole and self._connection is not None:
            self._connection.pause()

    def _wake(self) -> None:
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
        if self._connection is not None:
            self._connection.resume()

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
        return self._connection is not None and self._connection.is_paused


class HttpClient:
    """Owns its connections; use it inside one running event loop, then `close` it."""

    def __init__(self, connect_timeout: float) -> None:
        self._connect_timeout = connect_timeout
        self._loop = asyncio.get_running_loop()
        # Connections without a request, the last used at the right.
        self._idle: dict[_Target, deque[_Connection]] = defaultdict(deque)
        self._all: set[_Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._tls: ssl.SSLContext | None = None

    def send(
        self,
        method: str,
        url: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        *,
        seconds: float,
        idle_timeout: float,
        connect_timeout: float | None = None,
    ) -> Answer:
        """Ask the server at `url` for `path`. Does not wait. The answer must end within `seconds`, and be silent for no
        longer than `idle_timeout`."""
        target = _target(url)
        request = _request(method, target, path, body, headers)
        answer = Answer(self._loop, seconds, idle_timeout)
        connection = self._idle_connection(target)
        if connection is not None:
            connection.send(request, answer)
            return answer
        limit = self._connect_timeout if connect_timeout is None else connect_timeout
        task = self._loop.create_task(self._open_and_send(target, request, answer, limit))
        answer._opening = task
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return answer

    async def close(self) -> None:
        """Requests under way break."""
        for task in list(self._opening):
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        closed = [connection.closed for connection in self._all]
        for connection in self._all:
            connection.transport.abort()
        if closed:
            await asyncio.wait(closed, timeout=_CLOSE_TIMEOUT)

    def _idle_connection(self, target: _Target) -> _Connection | None:
        idle = self._idle[target]
        while idle:
            connection = idle.pop()
            if connection.transport.is_closing():
                continue
            if self._loop.time() - connection.idle_since < _KEEP_ALIVE:
                return connection
            # Those to the left of it are older.
            idle.append(connection)
            for old in idle:
                old.transport.close()
            idle.clear()
        return None

    async def _open_and_send(self, target: _Target, request: bytes, answer: Answer, limit: float) -> None:
        try:
            async with asyncio.timeout(limit):
                connection = await self._open(target)
        except (TimeoutError, OSError) as error:
            answer.fail(ConnectError(str(error) or f"no connection within {limit:g} s"))
        else:
            answer._opening = None
            connection.send(request, answer)

    async def _open(self, target: _Target) -> _Connection:
        if target.is_tls and self._tls is None:
            self._tls = ssl.create_default_context()
        _, protocol = await self._loop.create_connection(
            lambda: _Connection(self._loop, self._all, self._idle[target]),
            target.host,
            target.port,
            ssl=self._tls if target.is_tls else None,
        )
        return protocol


class _Connection(asyncio.Protocol):
    """One connection, used for one request after another. It is in `everyone` while it is open."""

    transport: asyncio.Transport

    def __init__(self, loop: asyncio.AbstractEventLoop, everyone: set[_Connection], idle: deque[_Connection]) -> None:
        self._loop = loop
        self._everyone = everyone
        self._idle = idle
        self._parser = httptools.HttpResponseParser(self)
        # What is expected; None once its last byte has come.
        self._answer: Answer | None = None
        self._headers: dict[str, str] = {}
        self._stays_open = False
        self.closed: asyncio.Future[None] = loop.create_future()
        self.is_paused = False
        # Clock time since which nobody uses it.
        self.idle_since = 0.0

    def send(self, request: bytes, answer: Answer) -> None:
        self._answer = answer
        answer._connection = self
        self.transport.write(request)

    def release(self) -> None:
        """Its answer is done with. Unless that has come to its end, it takes the connection along."""
        if self._answer is None and self._stays_open and not self.transport.is_closing():
            self.resume()
            self.idle_since = self._loop.time()
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
        # uvloop's transports are asyncio's by their methods only.
        self.transport = cast(asyncio.Transport, transport)
        self._everyone.add(self)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            # Nobody has asked.
            self.transport.abort()
            return
        answer._last_sign = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.transport.abort()
            answer.fail(BrokenConnectionError(f"no HTTP: {error}"))
        answer._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._everyone.discard(self)
        self.closed.set_result(None)
        if self in self._idle:
            self._idle.remove(self)
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if answer.status and error is None and not any(name in answer.headers for name in _LENGTHS):
            answer._is_whole = True
            answer._wake()
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
        # 1xx: the answer itself is still to come.
        if self._answer is not None and status >= 200:
            self._answer.status, self._answer.headers = status, headers

    def on_body(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer._feed(data)

    def on_message_complete(self) -> None:
        if self._answer is not None and self._answer.status:
            self._stays_open = self._parser.should_keep_alive()
            self._answer._is_whole = True
            self._answer = None


@lru_cache(maxsize=1024)
def _target(url: str) -> _Target:
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    authority = parts.netloc.rpartition("@")[2]
    return _Target(parts.hostname or "", parts.port or (443 if is_tls else 80), is_tls, parts.path, authority)


def _request(method: str, target: _Target, path: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {target.prefix}{path} HTTP/1.1\r\nhost: {target.authority}\r\naccept: */*\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in headers.items()]
    if body is None:
        return ("".join(lines) + "\r\n").encode("latin-1")
    return (f"{''.join(lines)}content-length: {len(body)}\r\n\r\n").encode("latin-1") + body
