"""ASGI application of the router: routes and their answers. The balancer does the work behind them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from splitserve import __version__
from splitserve.api import validation
from splitserve.api.api_keys import ApiKeys, KeyGuard, caller_of, read_keys
from splitserve.api.intake import Intake, RequestMemory
from splitserve.api.openapi import (
    BOOLEAN,
    DOCS_PATHS,
    INDEX,
    OBJECT,
    TEXT,
    UPSTREAM_ERRORS,
    describe,
    fields,
    index,
    new_app,
    operation,
    shared_operations,
)
from splitserve.api.responses import Headers, install_error_handlers, json_response, raw_json
from splitserve.api.schemas import AbortBody
from splitserve.api.validation import effective_limits, parse_object
from splitserve.core.errors import InvalidRequestError, WorkerUnavailableError
from splitserve.core.request import DisaggregationMode
from splitserve.router.args import LBArgs
from splitserve.router.balancer import MiniLoadBalancer
from splitserve.router.client_stream import ClientStream, serve_client
from splitserve.router.failure import UpstreamError
from splitserve.router.upstream import REQUEST_HEADERS
from splitserve.router.worker import Worker
from splitserve.router.worker_routes import add_worker_routes

logger = logging.getLogger(__name__)

_OPERATIONS = shared_operations(UPSTREAM_ERRORS)
GENERATE_ROUTES = ("/generate", "/v1/chat/completions", "/v1/completions")
# Requests that any worker answers alike: our route, method, the worker's route.
ANY_WORKER_ROUTES = (
    ("/get_model_info", "GET", "/get_model_info"),
    ("/model_info", "GET", "/model_info"),
    ("/v1/models", "GET", "/v1/models"),
    ("/tokenize", "POST", "/tokenize"),
    ("/detokenize", "POST", "/detokenize"),
)
# Paths without authentication, and paths for the keys of clients. All others are for operators.
OPEN_PATHS = ("/health", "/ready", "/metrics", *DOCS_PATHS)
CLIENT_PATHS = ("/", *GENERATE_ROUTES, *(path for path, _, _ in ANY_WORKER_ROUTES), "/health_generate")
# Prefix of further paths for clients: the name of a model follows.
CLIENT_PREFIX = "/v1/models/"
# Order of the workers' schedulers in the merged list. Clients read the throughput of the first one.
_GENERATING_FIRST = (DisaggregationMode.DECODE, DisaggregationMode.NULL, DisaggregationMode.PREFILL)

_LINKS = ("/ready", "/v1/models", "/workers", "/server_info", "/metrics")
_SUMMARY = fields(success=BOOLEAN, failed=OBJECT)
_PROOF = operation("Generate with a pair of workers", answer=fields(success=BOOLEAN), errors=UPSTREAM_ERRORS)
_FLUSH = operation("Drop cached prefixes on all workers", answer=_SUMMARY, unavailable=_SUMMARY)
_ABORT = operation(
    "Abort a request on all workers", body=AbortBody, answer=_SUMMARY, errors=(400,), unavailable=_SUMMARY
)
_INFO = operation("Describe the router and all workers", answer=OBJECT)


def build_router_app(args: LBArgs) -> ASGIApp:
    """Return the ASGI application. Its balancer is open while the application runs."""
    balancer = MiniLoadBalancer(args)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await balancer.open()
        try:
            yield
        finally:
            await balancer.close()

    app = new_app("Splitserve router", __version__, lifespan=lifespan)
    install_error_handlers(app)
    app.add_exception_handler(UpstreamError, _answer_upstream_error)
    for path in GENERATE_ROUTES:
        app.add_api_route(path, _served_before, methods=["POST"], **_OPERATIONS[path])
    for path, method, target in ANY_WORKER_ROUTES:
        app.add_api_route(path, _any_worker_route(balancer, method, target), methods=[method], **_OPERATIONS[target])

    @app.get(f"{CLIENT_PREFIX}{{name:path}}", **_OPERATIONS["/v1/models/{name}"])
    async def model(name: str) -> Response:
        # Encoded as one segment, so that no proxy can interpret the name as another path.
        return await _ask_any(balancer, "GET", CLIENT_PREFIX + quote(name, safe=""))

    add_worker_routes(app, balancer)
    _add_operator_routes(app, balancer)
    describe(app)
    memory = RequestMemory(args.limits.max_request_memory)
    memory.export(balancer.metrics.registry, "splitserve_router:")
    limited = Intake(
        GenerateApp(app, balancer),
        max_body_bytes=lambda: args.limits.request_bytes(balancer.registry.context_length),
        timeout=args.limits.body_timeout,
        memory=memory,
    )
    return _with_access_control(limited, args)


async def _served_before() -> Response:
    raise AssertionError("GenerateApp serves this route")


def _with_access_control(app: ASGIApp, args: LBArgs) -> ASGIApp:
    """Wrap the application in authentication and CORS."""
    if args.has_keys:
        app = KeyGuard(
            app,
            clients=_read_keys(args.api_key_file, "--api-key-file"),
            operators=_read_keys(args.operator_key_file, "--operator-key-file"),
            open_paths=OPEN_PATHS,
            client_paths=CLIENT_PATHS,
            client_prefix=CLIENT_PREFIX,
        )
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


def _any_worker_route(balancer: MiniLoadBalancer, method: str, target: str) -> Any:
    async def ask_any(request: Request) -> Response:
        body = await request.body() if method == "POST" else None
        return await _ask_any(balancer, method, target, body)

    return ask_any


async def _ask_any(balancer: MiniLoadBalancer, method: str, target: str, body: bytes | None = None) -> Response:
    """Return the response of a healthy worker, whatever its status. `target`: path, percent-encoded."""
    status, answer, headers = await balancer.upstream.ask(balancer.registry.any_healthy(), method, target, body)
    return Response(answer, status, media_type=headers.get("content-type", "application/json"))


def _add_operator_routes(app: FastAPI, balancer: MiniLoadBalancer) -> None:
    """Add the routes for status, metrics and orders of operators."""
    registry = balancer.registry

    @app.get("/", **operation("Name the router, its workers and its main routes", answer=INDEX))
    async def root() -> Response:
        workers = {mode.value: len(registry.pool(mode)) for mode in DisaggregationMode}
        return json_response(index("Splitserve router", __version__, _LINKS, workers=workers))

    @app.get("/health", **operation("Return 200 while the router runs"))
    async def health() -> Response:
        return Response(status_code=200)

    @app.get("/ready", **operation("Return 200 if requests can be served", answer=fields(ready=BOOLEAN)))
    async def ready() -> Response:
        if reason := registry.unready_reason():
            raise WorkerUnavailableError(f"{reason}: GET /workers has more")
        return json_response({"ready": True})

    @app.get("/health_generate", **_PROOF)
    async def health_generate() -> Response:
        await balancer.prove_path()
        return json_response({"success": True})

    @app.post("/flush_cache", **_FLUSH)
    async def flush_cache() -> Response:
        return _summary(await balancer.ask_all(registry.all(), "POST", "/flush_cache", b"{}"))

    @app.post("/abort_request", **_ABORT)
    async def abort_request(request: Request) -> Response:
        body = parse_object(await request.body(), balancer.args.limits)
        order = validation.parse(AbortBody, body)
        if not order.rid and not order.abort_all:
            raise InvalidRequestError("rid is missing: name the request to abort, or send abort_all: true", param="rid")
        return _summary(await balancer.ask_all(registry.all(), "POST", "/abort_request", msgspec.json.encode(body)))

    @app.get("/server_info", **_INFO)
    @app.get("/get_server_info", **_INFO)
    async def server_info() -> Response:
        limits = effective_limits(balancer.args.limits, balancer.registry.context_length)
        info: dict[str, Any] = {"version": __version__, "policy": balancer.args.policy, "limits": limits}
        answers = await balancer.ask_all(registry.all(), "GET", "/server_info")
        for mode in DisaggregationMode:
            pool = [(w, answer) for w, status, answer in answers if status == 200 and w.mode is mode]
            info[mode.value] = [{"url": w.url, **_object(answer)} for w, answer in pool]
        return json_response({**info, **_merged_states(info)})

    @app.get("/metrics", **operation("Return metrics (Prometheus)", answer=TEXT, media_type="text/plain"))
    async def metrics() -> Response:
        for mode in DisaggregationMode:
            for healthy in (True, False):
                count = sum(w.healthy is healthy for w in registry.pool(mode))
                balancer.metrics.workers.labels(mode.value, str(healthy).lower()).set(count)
            num_ready = sum(w.unready_reason is None for w in registry.pool(mode))
            balancer.metrics.ready_workers.labels(mode.value).set(num_ready)
        return Response(balancer.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _merged_states(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merged fields that SGLang's clients read from a single server. Schedulers that generate come first."""
    workers = [w for mode in _GENERATING_FIRST for w in info[mode.value]]
    paths = [w["tokenizer_path"] for w in workers if "tokenizer_path" in w]
    states = [state for w in workers for state in w.get("internal_states", ())]
    return {"internal_states": states} | ({"tokenizer_path": paths[0]} if paths else {})


def _summary(answers: Sequence[tuple[Worker, int, bytes]]) -> Response:
    """Return 200 if every worker succeeded, otherwise 503 with the answers of those that did not."""
    failed = {
        w.url: {"status": status, "body": body.decode(errors="replace")} for w, status, body in answers if status != 200
    }
    return json_response({"success": not failed, "failed": failed}, 503 if failed else 200)


def _object(answer: bytes) -> dict[str, Any]:
    try:
        parsed = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


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
        # A key that was checked here is not sent to the workers.
        names = [name for name in REQUEST_HEADERS if name != "authorization" or not balancer.args.has_keys]
        self._passed = {name.encode(): name for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in GENERATE_ROUTES:
            await self._app(scope, receive, send)
            return
        # Intake has read the body, so it arrives in one piece.
        raw = (await receive())["body"]
        path, caller, headers = scope["path"], caller_of(scope), self._headers_for_workers(scope)
        balancer = self._balancer

        async def serve(client: ClientStream) -> None:
            await balancer.generate(path, raw, headers, client, caller)

        def on_disconnect() -> None:
            logger.info("client left route=%s", path)
            balancer.metrics.disconnects.inc()

        await serve_client(receive, send, serve, on_disconnect)

    def _headers_for_workers(self, scope: Scope) -> Headers:
        passed = self._passed
        return {passed[name]: value.decode("latin-1") for name, value in scope["headers"] if name in passed}
