"""Streams without an end: a client that does not read is dropped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request

from splitserve.api.responses import stream_response


async def test_a_client_that_leaves_the_stream_unread_is_dropped_and_the_frames_are_closed() -> None:
    closed = asyncio.Event()

    async def frames() -> AsyncGenerator[bytes]:
        try:
            while True:
                yield b"data: {}\n\n"
        finally:
            closed.set()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            # Its buffers are full.
            await asyncio.Event().wait()

    scope = {"type": "http", "method": "GET", "path": "/v1/live", "headers": [], "query_string": b""}
    response = await stream_response(Request(scope, receive), frames(), send_timeout=0.0)
    async with asyncio.timeout(60):
        await response(scope, receive, send)
    assert closed.is_set()
