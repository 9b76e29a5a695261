"""Role switch of a worker, ordered by an operator through the router.

1. The router checks that other workers can serve meanwhile.
2. The worker gets no new requests, and `GET /workers` lists its new role. Its running requests finish, or return and
   are served elsewhere (`tries.py`); the worker ensures that (`worker/role_switch.py`).
3. The worker answers when it has switched, and joins its new pool then. If it could not switch, it answers with the
   reason and stays in its old pool.
"""

from __future__ import annotations

import logging
from typing import Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from splitserve.core.errors import RoleSwitchRunningError, WorkerUnavailableError
from splitserve.core.request import DisaggregationMode
from splitserve.router.failure import UpstreamError, in_log
from splitserve.router.registry import WorkerRegistry
from splitserve.router.upstream import Upstream
from splitserve.router.worker import Worker

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
        raise UpstreamError.answered(worker.mode.value, worker.url, status, answer, headers)
    try:
        return msgspec.json.decode(answer, type=_Answer)
    except msgspec.MsgspecError as error:
        message = f"{worker.url} does not say what has become of it ({error}): is it a worker of this release?"
        raise UpstreamError.lost(worker.mode.value, worker.url, 502, message) from error
