"""Server-Sent Events: parsed from a worker's stream, and sent to a client that may disconnect at any time.

A stream's headers are sent with its first frame, so that a failure before the first token gets its own status. A later
failure becomes a frame with `error`. Every stream ends with `data: [DONE]`. If the client disconnects, the work is
cancelled. This module does not know the content of frames.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from splitserve.api.error_response import error_body
from splitserve.api.schemas import JOURNAL_HEADER
from splitserve.core.errors import RequestAbortedError, SplitserveError

logger = logging.getLogger(__name__)
T = TypeVar("T")
# Each item is sent at once: one or several whole events.
Frames = AsyncGenerator[bytes, None]


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


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
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


async def stream_response(request: Request, frames: Frames, *, has_journal: bool = False) -> Response:
    """Wait for the first frame, then return a response that streams all frames. Raises the error of the first frame."""
    try:
        first = await unless_disconnected(request, _next(frames))
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
        yield event_of(error_body(error))
    except Exception as error:
        logger.exception("a stream failed")
        yield event_of(error_body(error))
    yield event_of(b"[DONE]")


async def _next(frames: Frames) -> bytes:
    return await anext(frames, b"")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
