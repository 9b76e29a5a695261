"""Small OpenAI-compatible server without a model, for tests of clients. It streams numbers as tokens.

Tests choose when it answers and what fails. It records request bodies and write times.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

# Seconds to wait for `num_together` requests.
_DEADLINE = 60.0


@dataclass
class FakeOpenAI:
    # Requests are answered once this many have arrived.
    num_together: int = 1
    # Every `fails_every`-th request fails, starting with the first. 0: none.
    fails_every: int = 0
    # Message of an error frame that ends each stream. Empty: none.
    error: str = ""
    # Number of tokens by which each answer is shorter than requested.
    short_by: int = 0
    # Number of tokens at the end of each answer that `usage` has and no frame.
    lost: int = 0
    # Tokens in one frame, and whether frames have token ids, an extension of OpenAI's fields.
    tokens_a_frame: int = 1
    with_token_ids: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    # Write time of each frame with tokens, one list per stream, on the clock of time.perf_counter.
    written_at: list[list[float]] = field(default_factory=list)
    num_running: int = 0
    max_running: int = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve, and yield the server's URL."""
        self._together = asyncio.Event()
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_get("/v1/models", self._models)
        async with TestServer(app) as server:
            yield str(server.make_url("")).rstrip("/")

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake"}]})

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        number = len(self.bodies)
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            if number >= self.num_together:
                self._together.set()
            async with asyncio.timeout(_DEADLINE):
                await self._together.wait()
            if self.fails_every and (number - 1) % self.fails_every == 0:
                return web.json_response({"error": {"message": "no room"}}, status=503)
            return await self._stream(request, body)
        finally:
            self.num_running -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        written: list[float] = []
        self.written_at.append(written)
        tokens = range(body["max_tokens"] - self.short_by)
        for start in range(0, len(tokens) - self.lost, self.tokens_a_frame):
            ids = list(tokens[start : start + self.tokens_a_frame])
            choice: dict[str, Any] = {"index": 0, "text": "x" * len(ids)}
            if self.with_token_ids:
                choice["token_ids"] = ids
            written.append(time.perf_counter())
            await response.write(frame({"choices": [choice]}))
        if self.error:
            await response.write(frame({"error": {"message": self.error}}))
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(tokens)}
        await response.write(frame({"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        return response


def frame(data: dict[str, Any]) -> bytes:
    """Return `data` as a Server-Sent Event."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"
