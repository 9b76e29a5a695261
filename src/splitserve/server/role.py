"""Routes for the role of this worker: query and switch."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from splitserve.api.error_response import json_response
from splitserve.api.openapi import INTEGER, TEXT, fields, operation, or_null
from splitserve.api.schemas import RoleBody
from splitserve.core.errors import InvalidRequestError, WorkerUnavailableError
from splitserve.core.request import DisaggregationMode
from splitserve.server.front_end import FrontEnd, RoleChange, RoleReport
from splitserve.server.read_body import read_body

# Longest timeout of a switch, seconds.
MAX_SWITCH_SECONDS = 86400.0

_ROLE = fields(role=TEXT, switching_to=or_null(TEXT), bootstrap_port=or_null(INTEGER))
_SWITCH = operation("Change the role", body=RoleBody, answer=_ROLE, errors=(400, 409, 500, 504))


def role_routes(front: FrontEnd) -> APIRouter:
    router = APIRouter()

    @router.get("/role", **operation("Return the role", answer=_ROLE))
    async def get_role() -> Response:
        return json_response(_describe_role(front))

    @router.post("/role", **_SWITCH)
    async def switch_role(request: Request) -> Response:
        order = _role_order(await read_body(front, request, RoleBody))
        if order.mode is front.mode and front.switching_to is None:
            return json_response(_describe_switch(front, RoleReport(front.mode, front.mode, 0.0)))
        if front.role_switch is None:
            raise WorkerUnavailableError(front.unready_reason() or "this worker's role is fixed")
        return json_response(_describe_switch(front, await front.role_switch.switch(order)))

    return router


def _describe_role(front: FrontEnd) -> dict[str, Any]:
    return {
        "role": str(front.mode),
        "switching_to": None if front.switching_to is None else str(front.switching_to),
        "bootstrap_port": front.bootstrap_port if front.mode is DisaggregationMode.PREFILL else None,
    }


def _describe_switch(front: FrontEnd, report: RoleReport) -> dict[str, Any]:
    return {**_describe_role(front), "old_role": str(report.old), "role": str(report.new), "seconds": report.seconds}


def _role_order(body: RoleBody) -> RoleChange:
    """Return the order of a body. Raises InvalidRequestError."""
    if body.role not in list(DisaggregationMode):
        raise InvalidRequestError(f"role {body.role!r}: choose one of {', '.join(DisaggregationMode)}", param="role")
    if body.drain not in ("complete", "migrate"):
        raise InvalidRequestError(f"drain {body.drain!r}: choose complete or migrate", param="drain")
    if not 0 < body.timeout <= MAX_SWITCH_SECONDS:
        raise InvalidRequestError(f"timeout must be in (0, {MAX_SWITCH_SECONDS:g}] seconds", param="timeout")
    if body.bootstrap_port is not None and not 0 <= body.bootstrap_port < 65536:
        raise InvalidRequestError("bootstrap_port must be in [0, 65535]; 0: any free one", param="bootstrap_port")
    mode = DisaggregationMode(body.role)
    return RoleChange(mode, body.drain == "migrate", body.timeout, body.bootstrap_port)
