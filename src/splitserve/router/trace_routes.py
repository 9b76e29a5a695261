"""Routes that return traces of finished requests. Operators get all traces, clients those of their own key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated
from urllib.parse import urlencode

from fastapi import FastAPI, Query, Request, Response

from splitserve.api.api_keys import caller_of, is_operator
from splitserve.api.openapi import OBJECT, UPSTREAM_ERRORS, fields, list_of, operation
from splitserve.api.responses import json_response, wait_while
from splitserve.core.errors import InvalidRequestError, UnknownTraceError
from splitserve.router.balancer import MiniLoadBalancer
from splitserve.router.client_stream import ClientStream
from splitserve.router.exchange import LINGER_SECONDS
from splitserve.router.trace_store import SlowestBy
from splitserve.router.upstream import UpstreamError

# Prefix of the paths of single traces.
TRACE_PREFIX = "/v1/trace/"
TRACES_PATH = "/v1/traces"
MAX_TRACES = 10_000
_TRACES = operation("List finished requests with their times", answer=fields(traces=list_of(OBJECT)), errors=(400,))
_TRACE = operation("Show where the time of a finished request went", answer=OBJECT, errors=(404,))
_STEPS = operation(
    "List the last steps of a worker",
    answer=fields(clock=OBJECT, steps=list_of(OBJECT)),
    errors={400, 404, *UPSTREAM_ERRORS},
)
# The id of an OpenAI answer is one of these and the request id.
_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-")
# Longest wait for the end of a request after its client has the whole answer, seconds.
_END_SECONDS = LINGER_SECONDS + 1.0
# Parameters that are passed to the worker.
_STEPS_QUERY = ("since", "limit", "dp_rank")


def add_trace_routes(app: FastAPI, balancer: MiniLoadBalancer) -> None:
    """Add GET /v1/trace/{rid}, GET /v1/traces, and for operators GET /v1/steps."""
    store = balancer.traces

    def _running(request: Request, names: Sequence[str]) -> ClientStream | None:
        """Return the client of a running request that the caller may see."""
        sees_all, caller = is_operator(request.scope), caller_of(request.scope)
        for record, client in balancer.running.values():
            has_name = any(name in (record.name, record.request_id, client.request_id) for name in names)
            if has_name and (sees_all or record.caller == caller):
                return client
        return None

    @app.get(f"{TRACE_PREFIX}{{rid:path}}", **_TRACE)
    async def trace(rid: str, request: Request) -> Response:
        names = (rid, *(rid.removeprefix(prefix) for prefix in _ANSWER_PREFIXES if rid.startswith(prefix)))
        await wait_while(lambda: (client := _running(request, names)) is not None and client.finished, _END_SECONDS)
        found = next((trace for name in names if (trace := store.get(name)) is not None), None)
        if found is None and _running(request, names) is not None:
            raise UnknownTraceError(f"request {rid!r} is running: its trace is complete when it has ended", param="rid")
        if found is None or not (is_operator(request.scope) or found.caller == caller_of(request.scope)):
            remedy = "check the id; or it was not sampled (--trace-sample), or is too long ago (--trace-records)"
            raise UnknownTraceError(f"there is no trace of request {rid!r}: {remedy}", param="rid")
        return json_response(found.report(store.clocks))

    @app.get(TRACES_PATH, **_TRACES)
    async def traces(
        request: Request,
        slowest: Annotated[int | None, Query(ge=0, le=MAX_TRACES)] = None,
        by: SlowestBy = "ttft",
        errors: bool = False,
        since: float | None = None,
        limit: Annotated[int, Query(ge=0, le=MAX_TRACES)] = 100,
    ) -> Response:
        caller = None if is_operator(request.scope) else caller_of(request.scope)
        found = store.traces(slowest=slowest, by=by, errors=errors, since=since, limit=limit, caller=caller)
        return json_response({"traces": [item.summary for item in found]})

    @app.get("/v1/steps", **_STEPS)
    async def steps(request: Request, worker: str = "") -> Response:
        if not worker:
            raise InvalidRequestError("worker is missing: give its URL, as in GET /workers", param="worker")
        found = balancer.registry.get(worker)
        query = urlencode([item for item in request.query_params.multi_items() if item[0] in _STEPS_QUERY])
        status, answer, headers = await balancer.upstream.ask(found, "GET", f"/v1/steps?{query}")
        if status != 200:
            raise UpstreamError.answered(found, status, answer, headers)
        return Response(answer, media_type="application/json")
