"""Routes of the live view: GET /v1/live (a stream of updates) and GET /v1/charts (the last hour).

If the router has keys of clients, both need a key. If it also has keys of operators, a client receives its own
requests, and workers without their addresses.
"""

from __future__ import annotations

import math

from fastapi import FastAPI, Request, Response

from splitserve.api.api_keys import caller_of, is_operator
from splitserve.api.openapi import OBJECT, TEXT, fields, list_of, operation
from splitserve.api.responses import raw_json, stream_response
from splitserve.router.balancer import MiniLoadBalancer
from splitserve.router.live import Viewer

LIVE_PATH = "/v1/live"
CHARTS_PATH = "/v1/charts"
_LIVE = operation(
    "Stream what router, workers and requests do now (Server-Sent Events)", answer=TEXT, media_type="text/event-stream"
)
_NUMBER = {"type": "number"}
_CHARTS = operation(
    "Return figures per second of the last hour",
    answer=fields(interval_s=_NUMBER, time=list_of(_NUMBER), series=OBJECT),
    errors=(400,),
)


def add_live_routes(app: FastAPI, balancer: MiniLoadBalancer) -> None:
    live = balancer.live

    @app.get(LIVE_PATH, **_LIVE)
    async def updates(request: Request) -> Response:
        return await stream_response(request, live.updates(_viewer(request)))

    @app.get(CHARTS_PATH, **_CHARTS)
    async def charts(request: Request, since: float = -math.inf) -> Response:
        rename = None if is_operator(request.scope) else live.client_name
        return raw_json(await live.charts.render(since, rename))


def _viewer(request: Request) -> Viewer:
    if is_operator(request.scope):
        return Viewer()
    return Viewer(caller_of(request.scope), is_operator=False)
