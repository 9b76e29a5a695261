"""HTTP connection of router or worker: uvicorn's protocol with limits on size and time.

- The line and headers of a request are bounded in bytes (431) and in time (408).
- A connection without a complete request is listed in PendingConnections, which closes the oldest of an address.
- A connection is closed only after its client could read the response, also if the client still sends a body.
- A connection is closed after `--send-timeout` if its client does not read the response.
- A request for another protocol is served as if it had no `Upgrade`.
- HEAD is answered for all routes with GET.
- A client of HTTP/1.0 gets a body that ends with the connection, because it cannot read chunks.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import socket
import struct
from collections import OrderedDict, defaultdict
from contextlib import suppress
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from splitserve.api.responses import status_error
from splitserve.core.limits import LimitsConfig

logger = logging.getLogger(__name__)

# Seconds during which a closing connection still reads and discards what the client sends. A close with unread data
# would reset the connection, and the client might lose the response.
_LINGER_SECONDS = 5.0
# Hop-by-hop headers that request another protocol.
_UPGRADE_HEADERS = (b"connection", b"upgrade", b"http2-settings")
# Key in the scope of a request. The value is a function that aborts its connection.
ABORT = "splitserve.abort"
# Place and size of tcpi_bytes_acked in Linux's struct tcp_info.
_ACKED = struct.Struct("=120xQ")


class PendingConnections:
    """Connections without a complete request. `max_per_address`: limit for each client address."""

    def __init__(self, max_per_address: int) -> None:
        self._max_per_address = max_per_address
        self._by_address: defaultdict[str, OrderedDict[EdgeProtocol, None]] = defaultdict(OrderedDict)

    def add(self, address: str, connection: EdgeProtocol) -> None:
        """Add a connection that waits for its next request. If its address has too many, close the oldest one."""
        pending = self._by_address[address]
        pending[connection] = None
        if len(pending) > self._max_per_address:
            oldest, _ = pending.popitem(last=False)
            oldest.transport.abort()

    def remove(self, address: str, connection: EdgeProtocol) -> None:
        """Remove a connection: its request is complete, or it is closed. Idempotent."""
        pending = self._by_address.get(address)
        if pending is not None:
            pending.pop(connection, None)
            if not pending:
                del self._by_address[address]

    def __len__(self) -> int:
        return sum(map(len, self._by_address.values()))


class _Reading(enum.Enum):
    """Part of a request that a connection reads."""

    # No request is being read: the last one is complete, or none has arrived.
    NOTHING = enum.auto()
    HEADERS = enum.auto()
    BODY = enum.auto()


class EdgeProtocol(HttpToolsProtocol):
    """HTTP/1.1 connection with limits. `limits` and `pending` belong to the server; all its connections share them.

    `router_header`: header of requests from a router, which limits the time of its own clients. None: there are none.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: LimitsConfig,
        pending: PendingConnections,
        router_header: str | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._pending = pending
        self._router_header = None if router_header is None else router_header.encode()
        self._address = ""
        # Timer of the headers. It starts with the first byte of a request, or with the accept of a new connection.
        self._header_timer: asyncio.TimerHandle | None = None
        # Bytes of the request line and headers so far, rounded up to the end of the last received piece.
        self._num_header_bytes = 0
        self._reading = _Reading.NOTHING
        # True: the response is written. The connection waits for the client to close it, or for the linger timer.
        self.is_lingering = False
        # Timer of a client that does not read, and what it had read when the timer was set.
        self._send_timer: asyncio.TimerHandle | None = None
        self._progress = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._raw_transport = transport
        super().connection_made(_LingeringTransport(transport, self))  # type: ignore[arg-type]
        self._address = self.client[0] if self.client else ""
        self._pending.add(self._address, self)
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pending.remove(self._address, self)
        self._stop_header_timer()
        super().connection_lost(exc)
        # Last, because uvicorn closes the transport once more.
        self._stop_send_timer()

    def data_received(self, data: bytes) -> None:
        if self.is_lingering:
            return
        before = self._reading
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._reject(400, "the request is not valid HTTP/1.1: correct its first line, headers or chunk sizes")
            return
        if self._reading is _Reading.HEADERS:
            self._start_header_timer()
            self._num_header_bytes += len(data)
            self._check_header_bytes()
        elif before is self._reading is _Reading.NOTHING and not self._is_responding:
            # The data was empty lines before a request, which the parser skips.
            self._start_header_timer()

    def on_message_begin(self) -> None:
        self._reading = _Reading.HEADERS
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._reading = _Reading.BODY
        self._stop_header_timer()
        self._num_header_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if self._check_header_bytes():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.is_lingering:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.is_lingering and not self.parser.should_upgrade():
            self._reading = _Reading.NOTHING
            self._num_header_bytes = 0
            self._pending.remove(self._address, self)
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._pending.add(self._address, self)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Limit the time in which the client must read. Called when much of a response is unsent."""
        super().pause_writing()
        self._start_send_timer()

    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    def shutdown(self) -> None:
        """Close the connection, or finish the response in progress first. Called when the server stops."""
        if self._is_responding:
            self.cycle.keep_alive = False
        else:
            # It flushes written data, and does not linger.
            self._raw_transport.close()

    @property
    def _is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def linger(self, transport: asyncio.Transport) -> None:
        """Close the connection: at once between two requests, otherwise after the client could read the response."""
        # TLS connections have no half-close.
        if self._reading is _Reading.NOTHING or not transport.can_write_eof():
            transport.close()
            if transport.get_write_buffer_size():
                # The transport stays open until the client has read it.
                self._start_send_timer()
        elif not self.is_lingering and not transport.is_closing():
            self.is_lingering = True
            transport.write_eof()
            self.flow.resume_reading()
            self.loop.call_later(_LINGER_SECONDS, transport.abort)

    def _parse(self, data: bytes) -> None:
        """Pass received bytes to the parser. Raises HttpParserError.

        At a request for another protocol the parser ends the message after the headers, and would read the body as the
        next request. A new parser gets the headers without the upgrade request, and then the body.
        """
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":
                    self._reject(405, "the method CONNECT is not supported: send the request without a tunnel")
                    return
                rest, head = rest[upgrade.args[0] :], self._head_without_upgrade()
                self.parser = httptools.HttpRequestParser(self)
                # As uvicorn does: a response is sent though the client sends more after `Connection: close`.
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.parser.feed_data(head)

    def _head_without_upgrade(self) -> bytes:
        """Return the request line and headers of the last parsed request, without its upgrade request."""
        tokens = [
            token
            for name, value in self.headers
            if name == b"connection"
            for token in map(bytes.strip, value.split(b","))
            if token.lower() not in _UPGRADE_HEADERS
        ]
        kept = [(name, value) for name, value in self.headers if name not in _UPGRADE_HEADERS]
        if tokens:
            kept.append((b"connection", b", ".join(tokens)))
        version = self.parser.get_http_version().encode()
        line = self.parser.get_method() + b" " + self.url + b" HTTP/" + version
        return b"\r\n".join([line, *(name + b": " + value for name, value in kept), b"", b""])

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.scope[ABORT] = self._raw_transport.abort  # type: ignore[literal-required]
        if cycle.scope["method"] == "HEAD":
            app = _as_get(app)
        elif cycle.scope["http_version"] == "1.0":
            app = _CloseDelimited(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self._limits.header_timeout, self._time_out)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _time_out(self) -> None:
        self._header_timer = None
        if self._reading is _Reading.NOTHING:
            self.transport.close()
        else:
            self._reject(408, f"the headers were not complete after {self._limits.header_timeout:g} s")

    def _start_send_timer(self) -> None:
        self._stop_send_timer()
        if self.cycle is not None and any(name == self._router_header for name, _ in self.cycle.scope["headers"]):
            return
        self._progress = self._num_read()
        self._send_timer = self.loop.call_later(self._limits.send_timeout, self._check_reader)

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _check_reader(self) -> None:
        """Close the connection if its client has read nothing since the timer was set."""
        if self._num_read() > self._progress:
            self._start_send_timer()
            return
        logger.warning("connection closed client=%s reason=%r", self._address, "the client does not read its response")
        self._raw_transport.abort()

    def _num_read(self) -> int:
        """Return a number that grows when the client reads. Its differences are bytes.

        A slow client's bytes are acknowledged in steps: Linux opens a full receive buffer when a 16th of it is free.
        With TLS the unsent bytes do not contain those of the connection below.
        """
        connection, num_acked = self._raw_transport.get_extra_info("socket"), 0
        # Not on Linux.
        with suppress(AttributeError, OSError, struct.error):
            (num_acked,) = _ACKED.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED.size))
        return int(num_acked) - self._raw_transport.get_write_buffer_size()

    def _check_header_bytes(self) -> bool:
        """Return whether the headers are within their limit. If not, reject the request."""
        limit = self._limits.max_header_bytes
        if self._num_header_bytes <= limit:
            return True
        self._reject(431, f"the line and headers of the request have more than {limit} bytes: send less")
        return False

    def _reject(self, status: int, message: str) -> None:
        if not self.transport.is_closing():
            # Otherwise the rejection would be inserted into the response to an earlier request of this connection.
            if not self._is_responding:
                body = status_error(status, message)
                head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
                self.transport.write(STATUS_LINE[status] + head + body)
            self.transport.close()


class _LingeringTransport:
    """Transport of a connection with a `close` that lets the client read the written data first."""

    def __init__(self, transport: asyncio.Transport, protocol: EdgeProtocol) -> None:
        self._transport = transport
        self._protocol = protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._protocol.is_lingering or self._transport.is_closing()

    def close(self) -> None:
        self._protocol.linger(self._transport)


def _as_get(app: ASGIApp) -> ASGIApp:
    """Return the app for a HEAD request: it answers as for GET, up to the body, which may have no end."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        answered = asyncio.Event()

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
            elif not answered.is_set():
                await send({"type": "http.response.body", "body": b""})
                answered.set()

        work = asyncio.ensure_future(app({**scope, "method": "GET"}, receive, send_head))
        end = asyncio.ensure_future(answered.wait())
        try:
            await asyncio.wait({work, end}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            end.cancel()
            await asyncio.gather(work, end, return_exceptions=True)

    return answer


class _CloseDelimited:
    """App wrapper: a response without Content-Length ends with the connection."""

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle
        self._is_delimited = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_plain(message: Message) -> None:
            if message["type"] == "http.response.start" and not any(
                name.lower() == b"content-length" for name, _ in message.get("headers", ())
            ):
                self._is_delimited = True
            await (self._send(message) if self._is_delimited else send(message))

        await self._app(scope, receive, send_plain)

    async def _send(self, message: Message) -> None:
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected or cycle.response_complete:
            return
        if message["type"] == "http.response.start":
            cycle.response_started = True
            headers = [*cycle.default_headers, *message.get("headers", ()), (b"connection", b"close")]
            lines = [name + b": " + value + b"\r\n" for name, value in headers]
            cycle.transport.write(b"".join([STATUS_LINE[message["status"]], *lines, b"\r\n"]))
            return
        cycle.transport.write(message.get("body", b""))
        if not message.get("more_body", False):
            cycle.response_complete = True
            cycle.message_event.set()
            cycle.transport.close()
            cycle.on_response()
