"""Responses of router and workers: JSON, errors, and streams of Server-Sent Events.

Errors have OpenAI's format: {"error": {"message", "type", "param", "code"}}.

A stream's headers are sent with its first frame, so that a failure before the first token gets its own status. A later
failure becomes a frame with `error`. Every stream ends with `data: [DONE]`. If the client disconnects, the work is
cancelled. This module does not know the content of frames.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from splitserve.api.schemas import JOURNAL_HEADER, TRACE_COMMENT
from splitserve.core.errors import (
    DuplicateRequestError,
    InvalidKeyError,
    InvalidRequestError,
    RateLimitError,
    RequestAbortedError,
    SplitserveError,
    did_you_mean,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Each item is sent at once: one or several whole events.
Frames = AsyncGenerator[bytes, None]
Headers = dict[str, str]

# Seconds for which a request waits for the end of an earlier one with its id. The client may have left the earlier one,
# or have the end of its answer, before the server has processed that.
ID_WAIT_SECONDS = 1.0
# Seconds between two checks of a condition.
_POLL_SECONDS = 0.01
# Start of the trace after a whole answer.
_LAST_TRACE = b"\n" + TRACE_COMMENT
_MAX_CHARS = 1_500
# Ratio of difflib from which an unknown route is probably a misspelled one.
_MIN_LIKENESS = 0.8
# Codes of errors that have a status and no SplitserveError.
_CODES = {
    404: "not_found",
    # The code of OpenAI.
    405: "method_not_supported",
    408: "request_timeout",
    413: "request_too_large",
    431: "headers_too_large",
    503: "over_capacity",
}


def shortened(text: str, max_chars: int = _MAX_CHARS) -> str:
    """Return the text, or its beginning and its end if it is longer than `max_chars`."""
    if len(text) <= max_chars:
        return text
    half = (max_chars - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def error_json(message: str, error_type: str, code: str | int, param: str | None = None) -> bytes:
    """Return an error in OpenAI's format. Long texts are shortened, whatever the request contained."""
    param = None if param is None else shortened(param)
    return msgspec.json.encode(
        {"error": {"message": shortened(message), "type": error_type, "param": param, "code": code}}
    )


def status_reason(status: int) -> str:
    """Return the code of an error of the HTTP edge."""
    return _CODES.get(status, "invalid_request")


def status_error(status: int, message: str) -> bytes:
    """Return the body of an error of the HTTP edge, which has a status and no SplitserveError."""
    error_type = "server_error" if status >= 500 else "invalid_request_error"
    return error_json(message, error_type, status_reason(status))


def error_body(error: Exception) -> bytes:
    """Return the body of an error. `code` is the stable reason code."""
    if isinstance(error, SplitserveError):
        return error_json(error.message, error.openai_type, error.reason, error.param)
    return error_json("an internal error; the server's log has the details", "server_error", SplitserveError.reason)


def error_headers(error: SplitserveError) -> Headers:
    """Return the headers of a response: how to authenticate, or when to retry."""
    if isinstance(error, InvalidKeyError):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, RateLimitError):
        return {"retry-after": str(math.ceil(error.retry_after))}
    # The request may be retried at a worker that is full, loading or draining, or at another worker.
    return {"retry-after": "1"} if error.http_status == 503 else {}


def error_response(error: SplitserveError) -> Response:
    return raw_json(with_trace(error_body(error), error.trace), error.http_status, error_headers(error))


def json_response(content: object, status: int = 200) -> Response:
    return raw_json(msgspec.json.encode(content), status)


def raw_json(body: bytes, status: int = 200, headers: Headers | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


def install_error_handlers(app: Starlette) -> None:
    # Commands that serve nothing import this module, too.
    from fastapi.exceptions import RequestValidationError
    from fastapi.routing import iter_route_contexts

    async def on_known(_: Request, error: Exception) -> Response:
        assert isinstance(error, SplitserveError)
        return error_response(error)

    async def on_invalid_query(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return error_response(InvalidRequestError(f"{name}: {first['msg']}", param=name))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        problem, headers = error.detail, dict(error.headers or {})
        if error.status_code == 404:
            routes = [route.path for route in iter_route_contexts(app.routes) if route.path]
            hint = did_you_mean(request.url.path, routes, likeness=_MIN_LIKENESS)
            problem = " ".join(filter(None, ("there is no such route;", hint, "GET /docs lists all routes")))
        if error.status_code == 405:
            # Several routes may have this path, and the exception has the methods of the first one only.
            found = [r for r in iter_route_contexts(app.routes) if r.matches(request.scope)[0] is not Match.NONE]
            headers = {"allow": ", ".join(sorted({method for route in found for method in route.methods or ()}))}
            problem = f"the route has no such method: use {headers['allow']}"
        body = status_error(error.status_code, f"{request.method} {request.url.path}: {problem}")
        return raw_json(body, error.status_code, headers)

    async def on_unknown(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        # After this response the server closes the connection: without the header a router would reuse it.
        return raw_json(error_body(error), 500, {"connection": "close"})

    app.add_exception_handler(SplitserveError, on_known)
    app.add_exception_handler(RequestValidationError, on_invalid_query)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_unknown)


class EventSplitter:
    """Splitter of a byte stream into whole events, each with its closing blank line."""

    def __init__(self) -> None:
        # Bytes after the last whole event.
        self.rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        *events, self.rest = (self.rest + chunk).split(b"\n\n")
        return [event + b"\n\n" for event in events]


def event_data(event: bytes) -> Any:
    """Return the JSON data of an event. None: [DONE], a comment, or no JSON."""
    if not event.startswith(b"data:"):
        return None
    try:
        return msgspec.json.decode(event[len(b"data:") :])
    except msgspec.DecodeError:
        return None


def event_of(data: bytes) -> bytes:
    """Return the event that carries this text."""
    return b"data: " + data + b"\n\n"


def trace_comment(trace: bytes) -> bytes:
    """Return the comment event that carries a worker's trace to the router."""
    return TRACE_COMMENT + trace + b"\n\n"


def trace_in(event: bytes) -> bytes:
    """Return the trace in an event of a stream, or behind an answer. Empty: it is another event."""
    return event[len(TRACE_COMMENT) : -2] if event.startswith(TRACE_COMMENT) else b""


def with_trace(body: bytes, trace: bytes | None) -> bytes:
    """Return a whole answer and the trace after it. A header is parsed byte by byte, which takes the router longer."""
    return body if trace is None else body + b"\n" + trace_comment(trace)


def split_trace(body: bytes) -> tuple[bytes, bytes]:
    """Return a worker's whole answer, and the trace after it. Empty: there is none."""
    # JSON has no line break in its strings, so this cannot be text of the answer.
    at = body.rfind(_LAST_TRACE)
    return (body, b"") if at < 0 else (body[:at], body[at + len(_LAST_TRACE) : -2])


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client disconnects first, cancel it and raise RequestAbortedError."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestAbortedError("the client left before the answer was ready; its request was aborted")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def wait_while(condition: Callable[[], object], seconds: float) -> None:
    """Wait until `condition` returns a false value, for about `seconds` at most."""
    for _ in range(round(seconds / _POLL_SECONDS)):
        if not condition():
            return
        await asyncio.sleep(_POLL_SECONDS)


class IdWaits:
    """Waits of requests for the end of earlier requests with the same ids. Only one request waits for an id."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    async def wait(self, ids: Iterable[str], is_held: Callable[[str], object], seconds: float | None) -> None:
        """Wait until none of `ids` is held, for at most ID_WAIT_SECONDS and `seconds` (None: no further limit).

        Raises DuplicateRequestError if another request waits for one of them.
        """
        awaited = set(ids)
        if taken := awaited & self._ids:
            raise DuplicateRequestError(min(taken))
        self._ids |= awaited
        try:
            limit = ID_WAIT_SECONDS if seconds is None else min(ID_WAIT_SECONDS, seconds)
            await wait_while(lambda: any(map(is_held, awaited)), limit)
        finally:
            self._ids -= awaited


async def stream_response(request: Request, frames: Frames, *, has_journal: bool = False) -> Response:
    """Wait for the first frame, then return a response that streams all frames. Raises the error of the first frame."""
    try:
        first = await unless_disconnected(request, anext(frames, b""))
    except BaseException:
        await frames.aclose()
        raise
    return _EventStream(first, frames, {JOURNAL_HEADER: "1"} if has_journal else {})


class _EventStream(StreamingResponse):
    def __init__(self, first: bytes, frames: Frames, extra: dict[str, str]) -> None:
        headers = {"Cache-Control": "no-cache", **extra}
        super().__init__(_events(first, frames), media_type="text/event-stream", headers=headers)
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # The client may have disconnected before the body was started, or during it.
            await self._frames.aclose()


async def _events(first: bytes, frames: Frames) -> AsyncIterator[bytes]:
    if first:
        yield first
    try:
        async for frame in frames:
            yield frame
    except SplitserveError as error:
        if error.trace is not None:
            yield trace_comment(error.trace)
        yield event_of(error_body(error))
    except Exception as error:
        logger.exception("a stream failed")
        yield event_of(error_body(error))
    yield event_of(b"[DONE]")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
