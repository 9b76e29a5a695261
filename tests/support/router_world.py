"""Environment for the router: scripted workers on real sockets, and a real router in front of them."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from splitserve.api.http_server import HttpServer, bind, port_of
from splitserve.observe.live import SAMPLE_PATH, WorkerSample
from splitserve.router.app import build_router_app
from splitserve.router.args import LBArgs, PrefillConfig

# Seconds a test waits for anything before it fails.
DEADLINE = 60.0

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class Rooms(defaultdict[str, asyncio.Event]):
    """Events by `bootstrap_room`, as JSON. Set when a prefill worker has received a request for the room."""

    def __init__(self) -> None:
        super().__init__(asyncio.Event)


@dataclass
class FakeWorker:
    """Scripted worker. Answers every route with `handler`, records bodies, and detects closed connections.

    A decode worker answers for a room only after a prefill worker with the same `rooms` has received its request.
    Without this wait, the answer of a scripted decode may arrive before the request reaches its prefill, which is
    impossible with real workers.
    """

    handler: Handler
    is_decode: bool = False
    rooms: Rooms = field(default_factory=Rooms)
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    # Set when the router has closed the connection of a request in flight.
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    health_status: int = 200
    load_status: int = 200
    # Sample for the live view. None: it has no such route, like a worker of another system.
    sample: WorkerSample | None = None
    # Answers no probe, like a process that was stopped.
    is_stopped: bool = False
    # Number of probes, and an event that is set after more than 60 of them.
    num_questions: int = 0
    asked_often: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path in ("/health", "/get_load"):
            self.num_questions += 1
            if self.num_questions > 60:
                self.asked_often.set()
            if self.is_stopped:
                await asyncio.Event().wait()
            return web.Response(status=self.health_status if request.path == "/health" else self.load_status)
        if request.path == SAMPLE_PATH:
            return web.Response(status=404) if self.sample is None else _json(self.sample)
        raw = await request.read()
        body = json.loads(raw) if raw else {}
        self.bodies.append(body)
        self.paths.append(request.path)
        self.arrived.set()
        room = self.rooms[json.dumps(body.get("bootstrap_room"))]
        if not self.is_decode:
            room.set()
        try:
            if "bootstrap_room" in body:
                async with asyncio.timeout(DEADLINE):
                    await room.wait()
            return await self.handler(request, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.cancelled.set()
            raise


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


@asynccontextmanager
async def start_worker(handler: Handler, **fields: Any) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker(handler, **fields)
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
async def start_router(
    on_port: int = 0,
    on_host: str = "127.0.0.1",
    stop_seconds: float = 0.1,
    expects_workers: bool = False,
    **options: Any,
) -> AsyncIterator[str]:
    """Yield the URL of a router with these LBArgs. `on_port` 0: any free port.

    By default it probes no workers, and requests do not wait for workers to return.

    `stop_seconds`: at the end, running requests get so much time.
    """
    options = {"probe": False, "worker_wait_timeout": 0.0} | options
    sock = bind(on_host, on_port)
    args = LBArgs(**options)
    server = HttpServer(build_router_app(args, expects_workers=expects_workers), sock, limits=args.limits)
    url = f"http://{on_host}:{port_of(sock)}"
    await server.start()
    try:
        yield url
    finally:
        await server.stop(stop_seconds)


@dataclass
class FakeWorkerPair:
    prefill: FakeWorker
    decode: FakeWorker
    router: str
    client: aiohttp.ClientSession

    async def post(self, path: str, body: Any, raw: bytes | None = None) -> tuple[int, bytes, dict[str, str]]:
        data = raw if raw is not None else json.dumps(body).encode()
        async with self.client.post(self.router + path, data=data) as response:
            return response.status, await response.read(), dict(response.headers)


@asynccontextmanager
async def serve_pair(prefill: Handler, decode: Handler, **options: Any) -> AsyncIterator[FakeWorkerPair]:
    """Run two scripted workers, a router with these LBArgs, and a client."""
    rooms = Rooms()
    async with (
        start_worker(prefill, rooms=rooms) as p,
        start_worker(decode, rooms=rooms, is_decode=True) as d,
        start_router(prefill=(PrefillConfig(p.url, 8998),), decode=(d.url,), **options) as url,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE)) as client,
    ):
        yield FakeWorkerPair(p, d, url, client)


@dataclass
class Pools:
    prefill: list[FakeWorker]
    decode: list[FakeWorker]
    router: str
    client: aiohttp.ClientSession

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        async with self.client.post(self.router + path, data=json.dumps(body).encode(), headers=headers) as response:
            return response.status, await response.read()


@asynccontextmanager
async def serve_pools(prefill: Sequence[Handler], decode: Sequence[Handler], **options: Any) -> AsyncIterator[Pools]:
    """Do as `serve_pair`, with several workers of each role. Requests go to the workers of each role in turn."""
    rooms = Rooms()
    async with AsyncExitStack() as stack:
        p = [await stack.enter_async_context(start_worker(handler, rooms=rooms)) for handler in prefill]
        d = [await stack.enter_async_context(start_worker(handler, rooms=rooms, is_decode=True)) for handler in decode]
        configs = tuple(PrefillConfig(w.url, 8998) for w in p)
        router = start_router(prefill=configs, decode=tuple(w.url for w in d), **options)
        url = await stack.enter_async_context(router)
        client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE))
        yield Pools(p, d, url, await stack.enter_async_context(client))


def delta(i: int) -> bytes:
    """Return what a worker with a journal sends for its token number `i`."""
    return b'data: {"i": %d}\n\n: {"index":0,"token_ids":[%d]}\n\n' % (i, i)


def journals(
    count: int,
    *,
    until: int | None = None,
    then: bytes = b"",
    hang: bool = False,
    die: bool = True,
    go_on: asyncio.Event | None = None,
) -> Handler:
    """Return a handler that streams `count` deltas with a journal, except those that the request lists as already sent.

    `until`: before this delta it sends `then`, and breaks off (`die`), hangs, or waits for `go_on`.
    """

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-splitserve-journal": "1"})
        await response.prepare(request)
        for i in range(len(body["dispatch"]["told"]), count + 1):
            if i == until:
                await response.write(then)
                if go_on is not None:
                    await go_on.wait()
                elif hang:
                    await asyncio.Event().wait()
                elif die:
                    assert request.transport is not None
                    request.transport.close()
                    return response
                else:
                    return response
            if i < count:
                await response.write(delta(i))
        await response.write(b"data: [DONE]\n\n")
        return response

    return handler


def answers(body: Any, status: int = 200) -> Handler:
    async def handler(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return handler


def error(code: Any, message: str = "no") -> dict[str, Any]:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": code}}


def reports(code: str, status: int) -> Handler:
    """Return a handler that answers with an error."""
    return answers(error(code), status)


def never() -> Handler:
    async def handler(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    return handler


def streams(*chunks: bytes, after: asyncio.Event | None = None, hang: bool = False, die: bool = False) -> Handler:
    """Return a handler that streams these chunks, one write each. It waits for `after` before all but the first."""

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
    """Return a handler that closes the connection without an answer."""

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
