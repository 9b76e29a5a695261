"""Routes of the router about its workers: register, list, drain, resume, and switch the role.

Role switch, ordered by an operator:
1. The router checks that other workers can serve meanwhile.
2. The worker gets no new requests, and `GET /workers` lists its new role. Its running requests finish, or return and
   are served elsewhere (`attempts.py`); the worker ensures that (`worker/role_switch.py`).
3. The worker answers when it has switched, and joins its new pool then. If it could not switch, it answers with the
   reason and stays in its old pool.
"""

from __future__ import annotations

import logging
from typing import Any, Literal, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from splitserve.api.openapi import BOOLEAN, TEXT, UPSTREAM_ERRORS, fields, list_of, operation, or_null
from splitserve.api.responses import json_response
from splitserve.core.errors import InvalidRequestError, RoleSwitchRunningError, WorkerUnavailableError
from splitserve.core.request import DisaggregationMode
from splitserve.router.balancer import MiniLoadBalancer
from splitserve.router.failure import UpstreamError, in_log
from splitserve.router.register import PDRegistryRequest, WorkerOrder
from splitserve.router.registry import WorkerRegistry
from splitserve.router.upstream import Upstream
from splitserve.router.worker import Worker

Body = TypeVar("Body", bound=BaseModel)

logger = logging.getLogger(__name__)

# Seconds that the answer may take beyond the timeout given to the worker.
_ANSWER_SECONDS = 30.0


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


_MESSAGE = fields(message=TEXT)
_WORKER = fields(url=TEXT, mode=TEXT, healthy=BOOLEAN, ready=BOOLEAN, reason=or_null(TEXT), draining=BOOLEAN)
_ROLE = operation(
    "Change the role of a worker", body=RoleOrderBody, answer=_WORKER, errors=(404, 409, *UPSTREAM_ERRORS)
)


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
        if registry.deregister(worker.registry_url):
            logger.info("worker deregistered url=%s mode=%s", worker.registry_url, worker.mode)
        return json_response({"message": "Deregistered"})

    @app.get("/workers", **operation("List the workers", answer=fields(workers=list_of(_WORKER))))
    async def workers() -> Response:
        return json_response({"workers": [_describe(w) for w in registry.all()]})

    @app.post("/workers", **operation("Add a worker", body=PDRegistryRequest, answer=_WORKER, errors=(400,)))
    async def add_worker(request: Request) -> Response:
        worker = _parse(PDRegistryRequest, await request.body(), "register")
        registry.add(worker.registry_url, worker.role, worker.bootstrap_port, is_static=True)
        return json_response(_describe(registry.get(worker.registry_url)))

    @app.delete("/workers", **operation("Remove a worker", answer=_WORKER, errors=(400, 404)))
    async def remove_worker(url: str = "") -> Response:
        if not url:
            raise InvalidRequestError("url is missing: DELETE /workers?url=URL, as GET /workers has it", param="url")
        worker = registry.get(url)
        registry.remove(worker.url)
        return json_response(_describe(worker))

    @app.post("/workers/drain", **operation("Drain a worker", body=WorkerOrder, answer=_WORKER, errors=(400, 404, 409)))
    async def drain_worker(request: Request) -> Response:
        order = _parse(WorkerOrder, await request.body(), "find")
        return json_response(_describe(_drain(registry, order)))

    @app.post("/workers/resume", **operation("Resume a worker", body=WorkerOrder, answer=_WORKER, errors=(400, 404)))
    async def resume_worker(request: Request) -> Response:
        worker = registry.get(_parse(WorkerOrder, await request.body(), "find").url)
        worker.is_draining = False
        # The operator has examined the worker.
        worker.forgive()
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
            f"no other {worker.mode} worker takes requests, so what runs on {worker.url} can go nowhere: "
            "start one, or drain without migrate"
        )
    worker.is_draining = True
    if order.migrate:
        worker.break_off("was drained by an operator")
    return worker


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
    if not order.force and registry.needs(worker):
        raise WorkerUnavailableError(
            f"without {worker.url} no worker would serve requests: start another worker first, or send force: true"
        )
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
    except msgspec.MsgspecError as error:
        message = f"{worker.url} does not say what has become of it ({error}): is it a worker of this release?"
        raise UpstreamError.lost(worker, 502, message) from error


def _parse(model: type[Body], raw: bytes, what_for: str) -> Body:
    try:
        return model.model_validate_json(raw)
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
