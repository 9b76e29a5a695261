"""Routes for operators: status, and orders to workers: register, drain, resume, switch the role.

Role switch, ordered by an operator:
1. The router checks that other workers can serve meanwhile.
2. The worker gets no new requests, and `GET /workers` lists its new role. Its running requests finish, or return and
   are served elsewhere (`attempts.py`); the worker ensures that (`worker/role_switch.py`).
3. The worker answers when it has switched, and joins its new pool then. If it could not switch, it answers with the
   reason and stays in its old pool.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from splitserve import __version__
from splitserve.api import validation
from splitserve.api.openapi import (
    BOOLEAN,
    INDEX,
    OBJECT,
    TEXT,
    UPSTREAM_ERRORS,
    fields,
    index,
    list_of,
    operation,
    or_null,
)
from splitserve.api.responses import json_response
from splitserve.api.schemas import AbortBody
from splitserve.api.validation import effective_limits, parse_object
from splitserve.core.errors import (
    UNREADABLE,
    InvalidRequestError,
    NotForwardedError,
    RoleSwitchRunningError,
    WorkerUnavailableError,
)
from splitserve.core.request import DisaggregationMode
from splitserve.router.balancer import MiniLoadBalancer
from splitserve.router.register import PDRegistryRequest
from splitserve.router.registry import WorkerRegistry
from splitserve.router.upstream import Upstream, UpstreamError, in_log
from splitserve.router.worker import Worker

Body = TypeVar("Body", bound=BaseModel)

logger = logging.getLogger(__name__)

# Seconds that the answer may take beyond the timeout given to the worker.
_ANSWER_SECONDS = 30.0


class WorkerOrder(BaseModel):
    """Body of POST /workers/drain and POST /workers/resume."""

    model_config = ConfigDict(extra="ignore")

    # URL as in GET /workers.
    url: str
    # On drain: move running requests to other workers now, instead of letting them finish.
    migrate: bool = False
    # On drain: also if no other worker can serve meanwhile.
    force: bool = False


class RoleOrderBody(BaseModel):
    """Body of POST /role."""

    model_config = ConfigDict(extra="ignore")

    # URL as in GET /workers.
    url: str
    role: Literal["prefill", "decode", "null"]
    # Whether running requests finish there, or continue elsewhere.
    drain: Literal["complete", "migrate"] = "complete"
    # Timeout of the whole switch, seconds.
    timeout: float = Field(default=60.0, gt=0.0, le=86400.0)
    # On prefill workers: port of the bootstrap server. None: the one it had, or any free one.
    bootstrap_port: int | None = Field(default=None, ge=0, lt=65536)
    # Switch even if no other worker can serve meanwhile.
    force: bool = False


class _Answer(msgspec.Struct, frozen=True):
    role: DisaggregationMode
    seconds: float
    bootstrap_port: int | None = None


# Order of the workers' schedulers in the merged list. Clients read the throughput of the first one.
_GENERATING_FIRST = (DisaggregationMode.DECODE, DisaggregationMode.NULL, DisaggregationMode.PREFILL)

_LINKS = ("/ready", "/v1/models", "/workers", "/server_info", "/v1/traces", "/v1/charts", "/metrics")
_SUMMARY = fields(success=BOOLEAN, failed=OBJECT)
_PROOF = operation("Generate with a pair of workers", answer=fields(success=BOOLEAN), errors=UPSTREAM_ERRORS)
_FLUSH = operation("Drop cached prefixes on all workers", answer=_SUMMARY, unavailable=_SUMMARY)
_ABORT = operation(
    "Abort a request here and on all workers", body=AbortBody, answer=_SUMMARY, errors=(400,), unavailable=_SUMMARY
)
_INFO = operation("Describe the router and all workers", answer=OBJECT)
# Routes of workers alone, with their methods.
WORKER_ROUTES = {
    "/release_memory_occupation": "POST",
    "/resume_memory_occupation": "POST",
    "/update_weights_from_disk": "POST",
    "/update_weights_from_shared_memory": "POST",
    "/get_load": "GET",
    "/v1/loads": "GET",
    "/v1/sample": "GET",
    "/kv_index": "GET",
}
# Maximum number of workers that an error names.
_MAX_NAMED = 8
_MESSAGE = fields(message=TEXT)
_WORKER = fields(url=TEXT, mode=TEXT, healthy=BOOLEAN, ready=BOOLEAN, reason=or_null(TEXT), draining=BOOLEAN)
_LEFT = fields(url=TEXT, mode=TEXT, reason=TEXT)
_ROLE = operation(
    "Change the role of a worker", body=RoleOrderBody, answer=_WORKER, errors=(404, 409, *UPSTREAM_ERRORS)
)
_ALIVE = operation("Return 200 while the router runs")


def add_operator_routes(app: FastAPI, balancer: MiniLoadBalancer) -> None:
    """Add the routes for status and orders of operators."""
    registry = balancer.registry

    @app.get("/", **operation("Name the router, its workers and its main routes", answer=INDEX))
    async def root() -> Response:
        workers = {mode.value: len(registry.pool(mode)) for mode in DisaggregationMode}
        return json_response(index("Splitserve router", __version__, _LINKS, workers=workers))

    @app.get("/health", **_ALIVE)
    @app.get("/live", **_ALIVE)
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
        # First here, so that a request that returns from a worker meanwhile is not sent to another one.
        balancer.aborts.give(None if order.abort_all else order.rid)
        return _summary(await balancer.ask_all(registry.all(), "POST", "/abort_request", msgspec.json.encode(body)))

    async def not_forwarded(request: Request) -> Response:
        urls = [worker.url for worker in registry.all()]
        raise NotForwardedError(
            f"{request.method} {request.url.path} is a route of single workers, which a router does not forward: send "
            f"it to each worker ({', '.join(urls[:_MAX_NAMED]) or 'none is registered'}; GET /workers "
            "lists those that are registered)"
        )

    for path, method in WORKER_ROUTES.items():
        app.add_api_route(path, not_forwarded, methods=[method], include_in_schema=False)

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


def add_worker_routes(app: FastAPI, balancer: MiniLoadBalancer) -> None:
    """Add the routes that register, list, drain and switch workers."""
    registry = balancer.registry

    @app.post("/register", **operation("Register a worker", body=PDRegistryRequest, answer=_MESSAGE, errors=(400,)))
    async def register(request: Request) -> Response:
        worker = _parse(PDRegistryRequest, await request.body(), "register")
        if registry.add(worker.registry_url, worker.role, worker.bootstrap_port):
            logger.info("worker registered url=%s mode=%s", worker.registry_url, worker.mode)
        return json_response({"message": "Registered successfully"})

    @app.post("/deregister", **operation("Deregister a worker", body=PDRegistryRequest, answer=_MESSAGE, errors=(400,)))
    async def deregister(request: Request) -> Response:
        worker = _parse(PDRegistryRequest, await request.body(), "register")
        if registry.deregister(worker.registry_url, worker.reason):
            logger.info("worker deregistered url=%s mode=%s", worker.registry_url, worker.mode)
        return json_response({"message": "Deregistered"})

    @app.get("/workers", **operation("List the workers", answer=fields(workers=list_of(_WORKER), left=list_of(_LEFT))))
    async def workers() -> Response:
        left = [{"url": url, "mode": mode, "reason": reason} for url, (mode, reason) in registry.left.items()]
        return json_response({"workers": [_describe(w) for w in registry.all()], "left": left})

    @app.post("/workers", **operation("Add a worker", body=PDRegistryRequest, answer=_WORKER, errors=(400,)))
    async def add_worker(request: Request) -> Response:
        worker = _parse(PDRegistryRequest, await request.body(), "register")
        if any(w.url == worker.registry_url and w.healthy and w.mode is not worker.role for w in registry.all()):
            raise InvalidRequestError("this worker serves in another mode: change it with POST /role", param="mode")
        registry.add(worker.registry_url, worker.role, worker.bootstrap_port, is_static=True)
        return json_response(_describe(registry.get(worker.registry_url)))

    @app.delete("/workers", **operation("Remove a worker", answer=_WORKER, errors=(400, 404)))
    async def remove_worker(url: str = "") -> Response:
        if not url:
            raise InvalidRequestError("url is missing: DELETE /workers?url=URL, as GET /workers has it", param="url")
        worker = registry.get(url)
        registry.remove(worker.url)
        return json_response(_describe(worker))

    @app.post(
        "/workers/drain", **operation("Drain a worker", body=WorkerOrder, answer=_WORKER, errors=(400, 404, 409, 503))
    )
    async def drain_worker(request: Request) -> Response:
        order = _parse(WorkerOrder, await request.body(), "find")
        return json_response(_describe(_drain(registry, order)))

    @app.post("/workers/resume", **operation("Resume a worker", body=WorkerOrder, answer=_WORKER, errors=(400, 404)))
    async def resume_worker(request: Request) -> Response:
        worker = registry.get(_parse(WorkerOrder, await request.body(), "find").url)
        worker.is_draining = False
        # The operator has examined the worker.
        worker.forgive()
        registry.has_takers.send()
        return json_response(_describe(worker))

    @app.post("/role", **_ROLE)
    async def role(request: Request) -> Response:
        order = _parse(RoleOrderBody, await request.body(), "change the role of")
        worker, seconds = await switch_role(registry, balancer.upstream, order)
        return json_response({**_describe(worker), "seconds": seconds})


def _drain(registry: WorkerRegistry, order: WorkerOrder) -> Worker:
    """Stop new requests to a worker. With `migrate`, move those in flight, too.

    Raises UnknownWorkerError, RoleSwitchRunningError or WorkerUnavailableError.
    """
    worker = registry.get(order.url)
    if worker.switching_to is not None:
        raise RoleSwitchRunningError(f"{worker.url} changes its role to {worker.switching_to}: drain it afterwards")
    if order.migrate and not registry.has_stand_in(worker):
        raise WorkerUnavailableError(
            f"no other {worker.mode} worker accepts requests and is compatible with a partner, so the requests on "
            f"{worker.url} cannot continue elsewhere: start one, or drain without migrate"
        )
    _check_needed(registry, worker, order.force, "force: true (splitserve cluster drain --force)")
    worker.is_draining = True
    if order.migrate:
        worker.break_off("was drained by an operator")
    return worker


def _check_needed(registry: WorkerRegistry, worker: Worker, force: bool, how: str = "force: true") -> None:
    """Raise WorkerUnavailableError if no requests could be served without this worker. `how`: to force the order."""
    if not force and registry.needs(worker):
        raise WorkerUnavailableError(
            f"without {worker.url} no worker would serve requests: start another worker first, or send {how}"
        )


async def switch_role(registry: WorkerRegistry, upstream: Upstream, order: RoleOrderBody) -> tuple[Worker, float]:
    """Return the worker in its new role, and the seconds that its switch took.

    Raises UnknownWorkerError, RoleSwitchRunningError, WorkerUnavailableError, and UpstreamError with the worker's
    reason if it could not switch.
    """
    worker = registry.get(order.url)
    if worker.switching_to is not None:
        raise RoleSwitchRunningError(f"{worker.url} is changing its role to {worker.switching_to} already")
    if worker.mode == order.role:
        return worker, 0.0
    if worker.is_draining:
        raise RoleSwitchRunningError(f"{worker.url} is draining: POST /workers/resume first, a switch drains by itself")
    _check_needed(registry, worker, order.force)
    worker.is_draining = True
    worker.switching_to = DisaggregationMode(order.role)
    logger.info("worker changes its role url=%s from=%s to=%s", worker.url, worker.mode, order.role)
    try:
        answer = await _ask(upstream, worker, order)
    except UpstreamError as error:
        logger.warning("worker keeps its role url=%s mode=%s cause=%s", worker.url, worker.mode, in_log(error.body))
        raise
    finally:
        worker.switching_to, worker.is_draining = None, False
        registry.has_takers.send()
    # The worker may have registered itself meanwhile; a static worker does not register itself.
    registry.add(worker.url, answer.role, answer.bootstrap_port)
    return registry.get(worker.url), answer.seconds


async def _ask(upstream: Upstream, worker: Worker, order: RoleOrderBody) -> _Answer:
    body = msgspec.json.encode(order.model_dump(include={"role", "drain", "timeout", "bootstrap_port"}))
    seconds = order.timeout + _ANSWER_SECONDS
    status, answer, headers = await upstream.ask(worker, "POST", "/role", body, seconds=seconds)
    if status != 200:
        raise UpstreamError.answered(worker, status, answer, headers)
    try:
        return msgspec.json.decode(answer, type=_Answer)
    except UNREADABLE as error:
        message = f"{worker.url} does not report its state ({error}): is it a worker of this release?"
        raise UpstreamError.lost(worker, 502, message) from error


def _parse(model: type[Body], raw: bytes, what_for: str) -> Body:
    try:
        return model.model_validate_json(raw or b"{}")
    except ValidationError as error:
        errors = [(".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")) for e in error.errors()]
        problems = "; ".join(f"{field}: {problem}" if field else problem for field, problem in errors)
        raise InvalidRequestError(f"cannot {what_for} this worker: {problems}", param=errors[0][0] or None) from None


def _describe(worker: Worker) -> dict[str, Any]:
    return {
        "url": worker.url,
        "mode": worker.mode.value,
        "bootstrap_port": worker.bootstrap_port,
        "healthy": worker.healthy,
        "ready": worker.unready_reason is None,
        "reason": worker.unready_reason,
        "draining": worker.drains,
        "switching_to": None if worker.switching_to is None else worker.switching_to.value,
        "incompatible": [{"url": partner.url, "reason": reason} for partner, (reason, _) in worker.misfits.items()],
        "num_running": worker.num_running,
        "num_cached_blocks": None if worker.prefixes is None else worker.prefixes.num_blocks,
    }


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
    except UNREADABLE:
        return {}
    return parsed if isinstance(parsed, dict) else {}
