"""Route GET /v1/sample: the state of the worker, which a router requests once a second.

The answer is small, and a long step of a scheduler does not delay it.
"""

from __future__ import annotations

from contextlib import suppress

from fastapi import APIRouter, Response

from splitserve.api.openapi import OBJECT, operation
from splitserve.api.responses import json_response
from splitserve.core.errors import SplitserveError
from splitserve.observe.live import SAMPLE_PATH, sample_of
from splitserve.server.front_end import FrontEnd

# Seconds to wait for the schedulers. If a scheduler is in a long step, its last snapshot is sent.
_SCHEDULER_SECONDS = 0.3


def sample_routes(front: FrontEnd) -> APIRouter:
    router = APIRouter()

    @router.get(SAMPLE_PATH, **operation("Return the state in short, for routers", answer=OBJECT))
    async def sample() -> Response:
        reason = front.unready_reason()
        if front.scheduler.failure is None and front.scheduler.info is not None:
            # Without an answer the last snapshot is sent, which is at most some seconds old.
            with suppress(SplitserveError):
                await front.states(timeout=_SCHEDULER_SECONDS)
        metrics = front.metrics
        found = sample_of(
            metrics.states,
            metrics.totals,
            role=str(front.mode),
            model=front.config.served_model_name,
            status=_status(front, reason),
            reason=reason or "",
        )
        return json_response(found)

    return router


def _status(front: FrontEnd, reason: str | None) -> str:
    if front.switching_to is not None:
        return "switching"
    if front.requests.is_draining:
        return "draining"
    return "ready" if reason is None else "unready"
