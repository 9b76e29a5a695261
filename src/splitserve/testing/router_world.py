"""A world for the router: scripted workers on real sockets, and a real router in front of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from splitserve.launch.http_server import HttpServer, bind, port_of
from splitserve.router.app import build_router_app
from splitserve.router.args import LBArgs, PrefillConfig

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class FakeWorker:
    """Answers every route with `handler`, remembers bodies, and sees clients leave."""

    handler: Handler
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    # The router closed the connection of a request that was under way.
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    health_status: int = 200

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response(status=self.health_status)
        if request.path == "/get_load":
            return web.json_response([])
        raw = await request.read()
        body = json.loads(raw) if raw else {}
        self.bodies.append(body)
        self.paths.append(request.path)
        self.arrived.set()
        try:
            return await self.handler(request, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.cancelled.set()
            raise


@asynccontextmanager
async def start_worker(handler: Handler) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker(handler)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", worker.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    worker.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield worker
    finally:
        await runner.cleanup()


@asynccontextmanager
async def start_router(**options: Any) -> AsyncIterator[str]:
    """URL of a router with these LBArgs."""
    sock = bind("127.0.0.1", 0)
    server = HttpServer(build_router_app(LBArgs(**options)), sock)
    url = f"http://127.0.0.1:{port_of(sock)}"
    await server.start()
    try:
        yield url
    finally:
        await server.stop(5.0)


@dataclass
class Pair:
    prefill: FakeWorker
    decode: FakeWorker
    router: str
    client: aiohttp.ClientSession

    async def post(self, path: str, body: Any, raw: bytes | None = None) -> tuple[int, bytes, dict[str, str]]:
        data = raw if raw is not None else json.dumps(body).encode()
        async with self.client.post(self.router + path, data=data) as response:
            return response.status, await response.read(), dict(response.headers)


@asynccontextmanager
async def serve_pair(prefill: Handler, decode: Handler, **options: Any) -> AsyncIterator[Pair]:
    """Two scripted workers, a router with these LBArgs, and a client."""
    async with (
        start_worker(prefill) as p,
        start_worker(decode) as d,
        start_router(prefill=(PrefillConfig(p.url, 8998),), decode=(d.url,), **options) as url,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=15)) as client,
    ):
        yield Pair(p, d, url, client)


def answers(body: Any, status: int = 200) -> Handler:
    async def handler(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return handler


def never() -> Handler:
    async def handler(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    return handler


def streams(*chunks: bytes, after: asyncio.Event | None = None, hang: bool = False, die: bool = False) -> Handler:
    """An event stream of these chunks, one write each; waits for `after` before all but the first."""

    async def handler(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for i, chunk in enumerate(chunks):
            if i and after is not None:
                await after.wait()
            await response.write(chunk)
        if hang:
            await asyncio.Event().wait()
        if die:
            assert request.transport is not None
            request.transport.abort()
        return response

    return handler


def dies() -> Handler:
    """Closes the connection without an answer."""

    async def handler(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    return handler


def after(event: asyncio.Event, handler: Handler) -> Handler:
    async def wait(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await event.wait()
        return await handler(request, body)

    return wait
