"""Process and ASGI application of the router. The balancer does the work behind the routes."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import uvloop
from fastapi import FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from splitserve import __version__
from splitserve.api.api_keys import ApiKeys, KeyGuard, caller_of, read_keys
from splitserve.api.http_protocol import ABORT
from splitserve.api.http_server import END_STREAMS, HttpServer, bind, port_of, reachable_host
from splitserve.api.intake import RECEIVED_AT, Intake, RequestMemory
from splitserve.api.openapi import (
    DOCS_PATHS,
    UPSTREAM_ERRORS,
    describe,
    new_app,
    shared_operations,
)
from splitserve.api.responses import install_error_handlers, raw_json
from splitserve.api.tls import tls_files
from splitserve.process.lifecycle import Lifecycle, ReadyInfo, end_server, write_ready_file
from splitserve.process.settings import collect_rarely, setup_logger
from splitserve.router.args import LBArgs
from splitserve.router.balancer import MiniLoadBalancer
from splitserve.router.client_stream import ClientStream, serve_client
from splitserve.router.live_routes import CHARTS_PATH, LIVE_PATH, add_live_routes
from splitserve.router.metrics_route import add_metrics_route
from splitserve.router.page import PageApp
from splitserve.router.request_trace import START_HEADER
from splitserve.router.routes import add_operator_routes, add_worker_routes
from splitserve.router.trace_routes import TRACE_PREFIX, TRACES_PATH, add_trace_routes
from splitserve.router.upstream import REQUEST_HEADERS, UpstreamError

logger = logging.getLogger(__name__)

_OPERATIONS = shared_operations(UPSTREAM_ERRORS)
GENERATE_ROUTES = ("/generate", "/v1/chat/completions", "/v1/completions")
# Requests that any worker answers alike, with their methods.
ANY_WORKER_ROUTES = {
    "/get_model_info": "GET",
    "/model_info": "GET",
    "/v1/models": "GET",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/v1/tokenize": "POST",
    "/v1/detokenize": "POST",
}
# Paths without authentication, and paths for the keys of clients. All others are for operators.
OPEN_PATHS = ("/health", "/live", "/ready", "/metrics", *DOCS_PATHS)
CLIENT_PATHS = ("/", *GENERATE_ROUTES, *ANY_WORKER_ROUTES, "/health_generate")
# Prefix of further paths for clients: the name of a model follows.
CLIENT_PREFIX = "/v1/models/"


def build_router_app(args: LBArgs, *, expects_workers: bool = False) -> ASGIApp:
    """Return the ASGI application. Its balancer is open while the application runs.

    `expects_workers`: requests wait for a worker also if no worker has registered here yet.
    """
    balancer = MiniLoadBalancer(args)
    balancer.registry.expects_workers = expects_workers

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Any]]:
        await balancer.open()
        try:
            yield {END_STREAMS: balancer.end_waits}
        finally:
            await balancer.close()

    app = new_app("Splitserve router", __version__, lifespan=lifespan)
    install_error_handlers(app)
    app.add_exception_handler(UpstreamError, _answer_upstream_error)
    for path in GENERATE_ROUTES:
        app.add_api_route(path, _served_before, methods=["POST"], **_OPERATIONS[path])

    async def ask_any(request: Request) -> Response:
        body = await request.body() if request.method == "POST" else None
        return await _ask_any(balancer, request.method, request.scope["path"], body)

    for path, method in ANY_WORKER_ROUTES.items():
        shared = _OPERATIONS.get(path) or _OPERATIONS[path.removeprefix("/v1")]
        app.add_api_route(path, ask_any, methods=[method], **shared)

    @app.get(f"{CLIENT_PREFIX}{{name:path}}", **_OPERATIONS["/v1/models/{name}"])
    async def model(name: str) -> Response:
        # Encoded as one segment, so that no proxy can interpret the name as another path.
        return await _ask_any(balancer, "GET", CLIENT_PREFIX + quote(name, safe=""))

    add_worker_routes(app, balancer)
    add_operator_routes(app, balancer)
    add_trace_routes(app, balancer)
    add_live_routes(app, balancer)
    add_metrics_route(app, balancer)
    describe(app)
    memory = RequestMemory(args.limits.max_request_memory)
    memory.export(balancer.metrics.registry, "splitserve_router:")
    limited = Intake(
        GenerateApp(app, balancer),
        max_body_bytes=lambda: args.limits.request_bytes(balancer.registry.context_length),
        timeout=args.limits.body_timeout,
        memory=memory,
        on_reject=balancer.metrics.count_rejection,
    )
    return _with_access_control(limited, args, balancer.metrics.count_rejection)


async def _served_before() -> Response:
    raise AssertionError("GenerateApp serves this route")


def _with_access_control(app: ASGIApp, args: LBArgs, on_reject: Callable[[str], None]) -> ASGIApp:
    """Wrap the application in authentication, the web page and CORS."""
    if args.has_keys:
        app = KeyGuard(
            app,
            clients=_read_keys(args.api_key_file, "--api-key-file"),
            operators=_read_keys(args.operator_key_file, "--operator-key-file"),
            # Clients must not learn the addresses of workers.
            open_paths=set(OPEN_PATHS) - ({"/metrics"} if args.metrics_include_workers else set()),
            client_paths=(*CLIENT_PATHS, TRACES_PATH, LIVE_PATH, CHARTS_PATH) if args.api_key_file else CLIENT_PATHS,
            client_prefixes=(CLIENT_PREFIX, TRACE_PREFIX) if args.api_key_file else (CLIENT_PREFIX,),
            on_reject=on_reject,
        )
    if args.ui:
        # Outside the guard, because a browser opens a page without a key.
        app = PageApp(app)
    if args.cors_origins:
        # Outside the guard: browsers send preflight requests without a key, and a page may read why its key was
        # rejected.
        app = CORSMiddleware(
            app,
            allow_origins=args.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
    return app


def _read_keys(path: Path | None, option: str) -> ApiKeys | None:
    return None if path is None else ApiKeys(read_keys(path, option))


async def _ask_any(balancer: MiniLoadBalancer, method: str, target: str, body: bytes | None = None) -> Response:
    """Return the response of a healthy worker, whatever its status. `target`: path, percent-encoded."""
    worker, _ = await balancer.other_wait.until(balancer.registry.any_healthy, balancer.args.timeout)
    status, answer, headers = await balancer.upstream.ask(worker, method, target, body)
    return Response(answer, status, media_type=headers.get("content-type", "application/json"))


async def _answer_upstream_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, UpstreamError)
    return raw_json(error.body, error.status, error.headers)


class GenerateApp:
    """ASGI middleware that serves the routes that generate.

    They precede FastAPI in `app`, because its routing takes as long as all other work of the router per request.
    """

    def __init__(self, app: ASGIApp, balancer: MiniLoadBalancer) -> None:
        self._app = app
        self._balancer = balancer
        # Headers that the balancer gets. A key that was checked here is not sent to the workers.
        names = [name for name in REQUEST_HEADERS if name != "authorization" or not balancer.args.has_keys]
        self._passed = {name.encode(): name for name in [*names, START_HEADER]}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in GENERATE_ROUTES:
            await self._app(scope, receive, send)
            return
        # Intake has read the body, so it arrives in one piece.
        raw = (await receive())["body"]
        path, caller, passed, balancer = scope["path"], caller_of(scope), self._passed, self._balancer
        received_at = scope.get("state", {}).get(RECEIVED_AT)
        headers = {passed[name]: value.decode("latin-1") for name, value in scope["headers"] if name in passed}

        async def serve(client: ClientStream) -> None:
            await balancer.generate(path, raw, headers, client, caller, received_at)

        def on_disconnect() -> None:
            logger.info("client left route=%s", path)
            balancer.metrics.disconnects.inc()

        await serve_client(receive, send, serve, on_disconnect, scope.get(ABORT))


def run_router(
    args: LBArgs, *, ready_file: Path | None = None, fd: int | None = None, exit_with_parent: bool = False
) -> int:
    """Serve until a signal ends it. Return the exit code.

    `fd`: inherited listener. None: listen at `args.host` and `args.port`.
    """
    setup_logger(args.log_level, args.log_format)
    # A supervisor starts the router with its listener, and registers workers within seconds.
    app, tls = build_router_app(args, expects_workers=fd is not None), tls_files(args.ssl_certfile, args.ssl_keyfile)
    sock = bind(args.host, args.port) if fd is None else socket.socket(fileno=fd)
    port, scheme = port_of(sock), "http" if tls is None else "https"
    info = ReadyInfo(pid=os.getpid(), port=port, url=f"{scheme}://{reachable_host(args.host)}:{port}")
    return uvloop.run(_serve(HttpServer(app, sock, tls, args.limits), info, args, ready_file, exit_with_parent))


async def _serve(
    server: HttpServer, info: ReadyInfo, args: LBArgs, ready_file: Path | None, exit_with_parent: bool
) -> int:
    lifecycle = Lifecycle()
    with lifecycle.watch(exit_with_parent=exit_with_parent):
        await server.start()
        logger.info("router ready url=%s", info.url)
        with collect_rarely():
            try:
                if ready_file is not None:
                    write_ready_file(ready_file, info)
                await lifecycle.draining.wait()
            finally:
                await end_server(server, lifecycle, args.drain_timeout)
    logger.info(lifecycle.end_line("the router", has_served=True))
    return lifecycle.exit_code(has_served=True)
