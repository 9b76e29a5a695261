"""Connection to an HTTP server, used for one request after another."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import cast

import httptools

from splitserve.router.http_answer import BrokenConnectionError, UpstreamResponse

# A body with one of these headers has a known end; any other body ends with its connection.
_LENGTHS = ("content-length", "transfer-encoding")


class HttpConnection(asyncio.Protocol):
    """Connection that is in `everyone` while it is open, and in `idle` while it has no request."""

    transport: asyncio.Transport

    def __init__(
        self, loop: asyncio.AbstractEventLoop, everyone: set[HttpConnection], idle: deque[HttpConnection]
    ) -> None:
        self._loop = loop
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
        answer.give_sign()

    def connection_lost(self, error: Exception | None) -> None:
        self._everyone.discard(self)
        self.closed.set_result(None)
        if self in self._idle:
            self._idle.remove(self)
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if answer.status and error is None and not any(name in answer.headers for name in _LENGTHS):
            answer.finish()
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
            self._answer.begin(status, headers)

    def on_body(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.feed(data)

    def on_message_complete(self) -> None:
        if self._answer is not None and self._answer.status:
            self._stays_open = self._parser.should_keep_alive()
            self._answer.finish()
            self._answer = None
