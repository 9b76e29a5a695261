"""Connection to the client of one request, directly on ASGI. Headers are sent with the first byte of the body.

So an error before the first token still gets its own status. This module also detects that the client disconnected.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec
from starlette.types import Receive, Send

from splitserve.api.responses import Headers


class _LineTokens(msgspec.Struct):
    token_ids: list[int] = []


_LINE = msgspec.json.Decoder(_LineTokens)


# Seconds until an aborted connection is reported as disconnected.
_ABORT_SECONDS = 5.0


class ClientStream:
    def __init__(self, receive: Receive, send: Send, abort: Callable[[], None] | None = None) -> None:
        """Create the stream of a connection that `abort` ends. None: it cannot be ended."""
        self._receive = receive
        self._send = send
        self._abort = abort
        # Whether the connection was aborted, because the client had not read the answer in time.
        self.is_dropped = False
        # Status of the answer. None: the headers have not been sent.
        self.status: int | None = None
        self.finished = False
        self.is_event_stream = False
        # Value of the header x-request-id of the answer. None: not sent.
        self.request_id: str | None = None
        # Journal of its stream: one JSON line per delta that was accepted for the client.
        self.lines: list[bytes] = []
        # Lines of the journal that were counted, and the output tokens in them.
        self._num_counted = 0
        self._num_tokens = 0
        # Whether the end of the stream was accepted for the client.
        self.is_done = False
        # Bytes accepted and not yet sent to the connection.
        self._unsent = b""
        # Clock time of the first byte.
        self.started_at: float | None = None
        # Last bytes sent, for readers that need to know how the answer ended.
        self.last_chunks: deque[bytes] = deque(maxlen=4)

    @property
    def started(self) -> bool:
        return self.status is not None

    async def start(self, status: int, headers: Headers) -> None:
        self.is_event_stream = headers.get("content-type", "").startswith("text/event-stream")
        if self.request_id is not None:
            headers = {**headers, "x-request-id": self.request_id}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
        self.status = status

    def accept(self, chunk: bytes) -> None:
        """Accept bytes for the client. The next `write` or `end` sends them."""
        self._unsent += chunk

    async def write(self, chunk: bytes = b"") -> None:
        """Send accepted bytes and `chunk`. Return when there is room for more. Cancelling loses no byte."""
        if chunk:
            self.accept(chunk)
        await self._flush(more=True)

    async def end(self, chunk: bytes = b"") -> None:
        self._unsent += chunk
        await self._flush(more=False)
        self.finished = True

    async def _flush(self, *, more: bool) -> None:
        data, self._unsent = self._unsent, b""
        # Not after the write: it wakes the client, which may take this process's core before the clock is read.
        now = time.monotonic()
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except asyncio.CancelledError:
            # The server first waits for room and then writes: if the wait is interrupted, nothing was written.
            self._unsent = data + self._unsent
            raise
        if data:
            if self.started_at is None:
                # The headers were sent with it.
                self.started_at = now
            self.last_chunks.append(data)

    async def respond(self, status: int, body: bytes, headers: Headers) -> None:
        """Send a whole answer at once."""
        await self.start(status, {"content-type": "application/json", **headers, "content-length": str(len(body))})
        await self.end(body)

    async def drop(self) -> None:
        """Abort the connection. Its end cancels the task that serves it."""
        self.is_dropped = True
        if self._abort is not None:
            self._abort()
            await asyncio.sleep(_ABORT_SECONDS)
        raise ConnectionAbortedError("the client did not read the answer in time")

    def count_tokens(self) -> int | None:
        """Return the output tokens over all samples in the journal. None: a line has an unknown format."""
        try:
            self._num_tokens += sum(len(_LINE.decode(line).token_ids) for line in self.lines[self._num_counted :])
        except msgspec.MsgspecError:
            return None
        self._num_counted = len(self.lines)
        return self._num_tokens

    async def disconnected(self) -> None:
        """Return when the client has disconnected, or has received the whole answer."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def serve_client(
    receive: Receive,
    send: Send,
    serve: Callable[[ClientStream], Awaitable[None]],
    on_disconnect: Callable[[], None],
    abort: Callable[[], None] | None = None,
) -> None:
    """Run `serve`, which writes the answer. It is cancelled if the client disconnects before the answer is complete."""
    client, work = ClientStream(receive, send, abort), asyncio.current_task()
    assert work is not None
    has_left = has_ended = False

    def stop_work(_: asyncio.Task[None]) -> None:
        nonlocal has_left
        # After the whole answer is sent, only the close of the connection is left.
        if not client.finished and not has_ended:
            has_left = True
            work.cancel()

    gone = asyncio.create_task(client.disconnected())
    gone.add_done_callback(stop_work)
    try:
        await serve(client)
    except asyncio.CancelledError:
        # This task may also have been cancelled by other code.
        if not has_left or work.uncancel() > 0:
            raise
        on_disconnect()
    finally:
        has_ended = True
        gone.cancel()
