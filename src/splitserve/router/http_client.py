"""A small HTTP/1.1 client: requests with a body in memory, answers whole or streamed, connections kept alive.

It exists for its speed. A request that finds an idle connection is sent at once, without a task. An answer costs
little more than its parsing (httptools). The client follows no redirects, requests no compression and keeps no
cookies.

An `UpstreamResponse` exists before there is a connection. Its owner reads it, then closes it. If it is closed before
its end, the connection is closed too, and the server sees a disconnected client.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from splitserve.router.http_answer import ConnectError, UpstreamResponse
from splitserve.router.http_connection import HttpConnection

# Seconds for which an idle connection is kept. Many servers close theirs after 75.
_KEEP_ALIVE = 60.0
# Seconds for connections to close.
_CLOSE_TIMEOUT = 1.0


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
    """Owns its connections; use it inside one running event loop, then `close` it."""

    def __init__(self, connect_timeout: float, tls: ssl.SSLContext | None = None) -> None:
        """Create a client. `tls`: for servers at https URLs. None: the certificates that the system trusts."""
        self._connect_timeout = connect_timeout
        self._loop = asyncio.get_running_loop()
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
        *,
        seconds: float,
        idle_timeout: float,
        connect_timeout: float | None = None,
    ) -> UpstreamResponse:
        """Send a request for `path` to the server at `url`. Does not wait.

        The answer must end within `seconds`, and must not be silent for longer than `idle_timeout`.
        """
        target = _target(url)
        request = _request(method, target, path, body, headers)
        answer = UpstreamResponse(self._loop, seconds, idle_timeout)
        connection = self._idle_connection(target)
        if connection is not None:
            connection.send(request, answer)
            return answer
        limit = self._connect_timeout if connect_timeout is None else connect_timeout
        task = self._loop.create_task(self._open_and_send(target, request, answer, limit))
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
            if self._loop.time() - connection.idle_since < _KEEP_ALIVE:
                return connection
            # This connection and those further left have been idle for too long: close them.
            idle.append(connection)
            for old in idle:
                old.transport.close()
            idle.clear()
        return None

    async def _open_and_send(self, target: _Target, request: bytes, answer: UpstreamResponse, limit: float) -> None:
        try:
            async with asyncio.timeout(limit):
                connection = await self._open(target)
        except (TimeoutError, OSError) as error:
            answer.fail(ConnectError(str(error) or f"no connection within {limit:g} s"))
        else:
            answer.opening = None
            connection.send(request, answer)

    async def _open(self, target: _Target) -> HttpConnection:
        if target.is_tls and self._tls is None:
            self._tls = ssl.create_default_context()
        _, protocol = await self._loop.create_connection(
            lambda: HttpConnection(self._loop, self._all, self._idle[target]),
            target.host,
            target.port,
            ssl=self._tls if target.is_tls else None,
        )
        return protocol


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
