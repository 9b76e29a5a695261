"""ASGI middleware that reads the body of each request within bounds of size, time and memory before the app starts.

1. A body larger than the limit, by its announcement or by its received bytes: 413. Bodies from a router also contain
   the journal of a stream that moves to this worker. Their limit is what the memory of all requests allows. A
   compressed body: 415.
2. A body that is not complete in time: 408.
3. Too little memory for the received bytes, or for parsing them: 503 with Retry-After. The memory is estimated from the
   size of the bodies and from the number of their entries.
4. Otherwise the app gets the body in one piece. When the response starts, only the bytes of the body stay reserved: the
   router keeps it for a retry.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, Gauge
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from splitserve.api.responses import raw_json, status_error, status_reason
from splitserve.core.limits import LimitsConfig

# Upper bound of the estimate, in bytes per byte of the body. Lists in lists need most.
MAX_FACTOR = 48
# Bytes per byte of an ASCII body, and of any other.
_TEXT_FACTORS = (4, 10)
# Added for each of these bytes, also inside strings: an entry of a list, a list, an object, an entry of an object.
_MARKS = {b",": 56, b"[": 80, b"{": 80, b":": 150}
# Divisor of the memory of all requests. The quotient is the largest body from a router, bytes.
_ROUTED_DIVISOR = 24
# Key in the state of a scope. The value is the clock time at which the head of the request was received.
RECEIVED_AT = "received_at"
# Key in the state of a scope. The value is the Reservation of the body.
BODY_MEMORY = "body_memory"


class RequestMemory:
    """Account of the bytes reserved by requests. `max_bytes`: bound of their sum."""

    def __init__(self, max_bytes: int = LimitsConfig().max_request_memory) -> None:
        self.max_bytes = max_bytes
        self.reserved = 0

    def export(self, registry: CollectorRegistry, prefix: str) -> None:
        """Add the account to the metrics of a registry."""
        reserved = Gauge(f"{prefix}request_memory_bytes", "Memory reserved by requests, bytes.", registry=registry)
        reserved.set_function(lambda: self.reserved)
        bound = Gauge(f"{prefix}request_memory_max_bytes", "Bound of that memory, bytes.", registry=registry)
        bound.set(self.max_bytes)


class Reservation:
    """Bytes reserved by one request, none at first. Use as a context manager: it releases what is still reserved.

    `own`: another reservation of the same request. None: it has no other.
    """

    def __init__(self, memory: RequestMemory, own: Reservation | None = None) -> None:
        self._memory = memory
        self._own = own
        self._num_bytes = 0

    def resize(self, num_bytes: int) -> bool:
        """Change the reservation to this many bytes. Return False, and change nothing, if it exceeds the bound.

        The only request is always admitted, so that a small bound cannot reject every request.
        """
        memory = self._memory
        others = memory.reserved - self._num_bytes
        is_alone = others == (0 if self._own is None else self._own._num_bytes)
        if num_bytes > self._num_bytes and not is_alone and others + num_bytes > memory.max_bytes:
            return False
        memory.reserved = others + num_bytes
        self._num_bytes = num_bytes
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.resize(0)


class Intake:
    """Middleware that reads bodies.

    `max_body_bytes` returns the limit, which may change with the models served. `timeout`: seconds for a body.
    `router_header`: header of the requests from a router. None: there are none. `on_reject`: called with the code of
    the error of a rejected request.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: Callable[[], int],
        timeout: float,
        memory: RequestMemory,
        router_header: str | None = None,
        on_reject: Callable[[str], None] | None = None,
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._timeout = timeout
        self._memory = memory
        self._router_header = None if router_header is None else router_header.encode()
        self._on_reject = on_reject

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})[RECEIVED_AT] = time.monotonic()
        with Reservation(self._memory) as reservation:
            scope["state"][BODY_MEMORY] = reservation
            try:
                body = await self._read(scope, receive, reservation)
            except HTTPException as rejected:
                if self._on_reject is not None:
                    self._on_reject(status_reason(rejected.status_code))
                await _rejection(rejected)(scope, receive, send)
                return
            if body is None:
                return
            num_bytes = len(body)

            async def send_and_shrink(message: Message) -> None:
                reservation.resize(num_bytes)
                await send(message)

            replayed = _replay(body, receive)
            # From here on the replay holds the body, until the app has received it.
            del body
            await self._app(scope, replayed, send_and_shrink)

    async def _read(self, scope: Scope, receive: Receive, reservation: Reservation) -> bytes | None:
        """Return the body, with memory reserved to parse it. None: the client disconnected. Raises HTTPException."""
        encodings = [value for name, value in scope["headers"] if name == b"content-encoding" and value != b"identity"]
        if encodings:
            encoding = encodings[0].decode("latin-1")
            raise HTTPException(415, f"the Content-Encoding {encoding} is not supported: send the body as it is")
        limit, option = self._max_body_bytes(), "--max-request-bytes"
        if any(name == self._router_header for name, _ in scope["headers"]):
            limit, option = max((limit, option), (self._memory.max_bytes // _ROUTED_DIVISOR, "--max-request-memory"))
        _check_size(_announced_length(scope), limit, option)
        pieces: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    pieces.append(message.get("body", b""))
                    num_bytes += len(pieces[-1])
                    _check_size(num_bytes, limit, option)
                    _reserve(reservation, num_bytes)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise HTTPException(
                408, f"the body was not complete after {self._timeout:g} s (stage: body): send it faster, or less"
            ) from None
        body = b"".join(pieces)
        _reserve(reservation, parsed_size(body))
        return body


def parsed_size(body: bytes) -> int:
    """Return the estimated memory of a body, its values and their text while they are parsed and validated, bytes."""
    text = _TEXT_FACTORS[not body.isascii()] * len(body)
    return min(MAX_FACTOR * len(body), text + sum(size * body.count(mark) for mark, size in _MARKS.items()))


def _check_size(num_bytes: int, limit: int, option: str) -> None:
    if num_bytes > limit:
        problem = f"the body has {num_bytes} bytes or more, and at most {limit} are accepted"
        raise HTTPException(413, f"{problem} ({option}): send less")


def _reserve(reservation: Reservation, num_bytes: int) -> None:
    if not reservation.resize(num_bytes):
        raise HTTPException(503, "too many large requests are being read (stage: body): retry later")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a callable that receives the body that was read, and after it the messages of the connection."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_next() -> Message:
        return messages.pop() if messages else await receive()

    return receive_next


def _announced_length(scope: Scope) -> int:
    """Return Content-Length, or 0 without one. The HTTP parser has already rejected values that are not numbers."""
    lengths = (value for name, value in scope["headers"] if name == b"content-length")
    return max((int(value) for value in lengths if value.isdigit()), default=0)


def _rejection(error: HTTPException) -> Response:
    """Return an error that closes the connection, so that the rest of the body is not parsed as the next request."""
    headers = {"connection": "close"} | ({"retry-after": "1"} if error.status_code == 503 else {})
    return raw_json(status_error(error.status_code, error.detail), error.status_code, headers)
