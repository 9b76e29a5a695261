"""Routes for operators and routers: health, description, load, metrics, aborts, prefix cache, role of the worker."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from splitserve import __version__
from splitserve.api.openapi import (
    BOOLEAN,
    INDEX,
    INTEGER,
    OBJECT,
    OPERATIONS,
    TEXT,
    fields,
    index,
    list_of,
    operation,
    or_null,
)
from splitserve.api.responses import json_response
from splitserve.api.samples import FanOut, fan_out, random_rid
from splitserve.api.schemas import AbortBody, Dispatch, RoleBody
from splitserve.api.validation import check_integer, worker_limits
from splitserve.core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    MemoryReleasedError,
    OnlyAtRouterError,
    SplitserveError,
    WorkerUnavailableError,
)
from splitserve.core.messages import GenerateRequest, SchedulerState
from splitserve.core.request import FAKE_BOOTSTRAP_HOST, BootstrapInfo, DisaggregationMode, RoomKey
from splitserve.core.sampling import ResolvedSampling
from splitserve.core.steps import MAX_STEPS
from splitserve.server.front_end import FrontEnd, RoleChange, RoleReport, read_body
from splitserve.server.generation import Generation

logger = logging.getLogger(__name__)

# Seconds in which /health_generate must get one token.
HEALTH_DEADLINE = 20.0

_LINKS = ("/health", "/server_info", "/v1/models", "/metrics")
_READY = fields(status=TEXT)
_INFO = operation("Describe the worker: settings, limits, load", answer=OBJECT)
_FLUSH = operation("Drop cached prefixes that are not in use", answer=fields(success=BOOLEAN, num_pages_freed=INTEGER))
_STEPS = operation(
    "List the last steps of a rank: batch, tokens, why requests waited",
    answer=fields(clock=OBJECT, steps=list_of(OBJECT)),
    errors=(400,),
)
_ABORT = operation(
    "Abort a request", body=AbortBody, answer=fields(success=BOOLEAN, num_aborted=INTEGER), errors=(400,)
)

# Routes that `splitserve trace` and `splitserve top` read at a router.
ROUTER_ROUTES = ("/v1/live", "/v1/charts", "/v1/traces", "/v1/trace/{rid:path}")
# Longest timeout of a switch, seconds.
MAX_SWITCH_SECONDS = 86400.0
_ROLE = fields(role=TEXT, switching_to=or_null(TEXT), bootstrap_port=or_null(INTEGER))
_SWITCH = operation("Change the role", body=RoleBody, answer=_ROLE, errors=(400, 409, 500, 504))


def admin_routes(front: FrontEnd) -> APIRouter:
    router = APIRouter()
    _add_description_routes(router, front)
    _add_cache_routes(router, front)
    _add_load_routes(router, front)
    _add_router_routes(router, front)
    return router


def _add_router_routes(router: APIRouter, front: FrontEnd) -> None:
    """Add the routes of traces and of the live view, with an error that names the router."""

    async def only_at_router(request: Request) -> Response:
        urls = ", ".join(front.config.server.router_urls)
        raise OnlyAtRouterError(
            f"{request.method} {request.url.path} is a route of routers, and this is a worker: give the URL of its "
            f"router{urls and f' ({urls})'}"
        )

    for path in ROUTER_ROUTES:
        router.add_api_route(path, only_at_router, methods=["GET"], include_in_schema=False)


def _add_description_routes(router: APIRouter, front: FrontEnd) -> None:
    @router.get("/", **operation("Name the worker, its model and its main routes", answer=INDEX))
    async def root() -> Response:
        details = {"model": front.config.served_model_name, "role": str(front.mode)}
        return json_response(index("Splitserve worker", __version__, _LINKS, **details))

    @router.get("/health", **operation("Return 200 if the worker takes requests", answer=_READY))
    async def health() -> Response:
        _check_ready(front)
        return json_response({"status": "ready"})

    @router.get("/live", **operation("Return 200 unless the worker must be restarted", answer=_READY))
    async def live() -> Response:
        if (reason := front.dead_reason()) is not None:
            raise WorkerUnavailableError(reason)
        return json_response({"status": "live"})

    @router.get("/health_generate", **operation("Generate one token", answer=_READY, errors=(500,)))
    async def health_generate() -> Response:
        _check_ready(front)
        await _generate_one_token(front)
        return json_response({"status": "ready"})

    @router.get("/server_info", **_INFO)
    @router.get("/get_server_info", **_INFO)
    async def server_info() -> Response:
        return json_response(await describe(front))

    @router.get("/model_info", **OPERATIONS["/model_info"])
    @router.get("/get_model_info", **OPERATIONS["/model_info"])
    async def model_info() -> Response:
        return json_response(
            {
                "model_path": front.weights_path or front.model_path,
                "tokenizer_path": front.model_path,
                "served_model_name": front.config.served_model_name,
                "is_generation": True,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "max_model_len": front.info.max_total_tokens_per_request,
            }
        )


def _add_cache_routes(router: APIRouter, front: FrontEnd) -> None:
    @router.get("/flush_cache", **_FLUSH)
    @router.post("/flush_cache", **_FLUSH)
    async def flush_cache() -> Response:
        return json_response({"success": True, "num_pages_freed": await front.scheduler.flush_cache()})

    @router.get("/kv_index", **operation("List the cached blocks of a rank", answer=OBJECT, errors=(400,)))
    async def kv_index(dp_rank: str = "0") -> Response:
        rank = _kv_rank(front, dp_rank)
        return Response(await front.scheduler.kv_index(rank), media_type="application/json")

    @router.post("/abort_request", **_ABORT)
    async def abort_request(request: Request) -> Response:
        body = await read_body(front, request, AbortBody)
        return json_response({"success": True, "num_aborted": _abort(front, body)})


def _add_load_routes(router: APIRouter, front: FrontEnd) -> None:
    @router.get("/get_load", **operation("Return the load of each rank", answer=list_of(OBJECT)))
    async def get_load() -> Response:
        loads = [
            {
                "dp_rank": rank,
                "num_reqs": state.num_running_reqs + state.num_waiting_reqs,
                "num_waiting_reqs": state.num_waiting_reqs,
                "num_tokens": state.num_tokens_held,
            }
            for rank, state in enumerate(await front.states())
        ]
        return json_response(loads)

    @router.get("/v1/loads", **operation("Return the load of each rank", answer=fields(loads=list_of(OBJECT))))
    async def loads() -> Response:
        loads = [_load(rank, state) for rank, state in enumerate(await front.states())]
        return json_response({"version": __version__, "dp_rank_count": len(loads), "loads": loads})

    @router.get("/v1/steps", **_STEPS)
    async def steps(since: int | None = None, limit: int = 1000, dp_rank: str = "0") -> Response:
        rank, limit = _rank(front, dp_rank), min(max(limit, 0), MAX_STEPS)
        check_integer(since, "since", range(1 << 63), "an integer in [0, 2^63)")
        return json_response(await front.scheduler.steps(rank, since, limit))

    @router.get("/metrics", **operation("Return metrics (Prometheus)", answer=TEXT, media_type="text/plain"))
    async def metrics(request: Request) -> Response:
        try:
            await front.states(timeout=2.0)
        except SplitserveError as error:
            logger.warning("metrics show the last snapshot: %s", error)
        text = front.metrics.render(request.headers.get("accept"))
        return Response(text.content, headers={"content-type": text.content_type})


async def describe(front: FrontEnd) -> dict[str, Any]:
    """Return the body of /server_info."""
    info = front.info
    config = front.config.disaggregation
    is_prefill = config.mode is DisaggregationMode.PREFILL
    return {
        "model_path": front.weights_path or front.model_path,
        "tokenizer_path": front.model_path,
        "served_model_name": front.config.served_model_name,
        "nnodes": front.config.parallel.nnodes,
        "tp_size": front.config.parallel.tp_size,
        "dp_size": front.config.dp_size,
        "pp_size": front.config.parallel.pp_size,
        "disaggregation_mode": str(config.mode),
        "disaggregation_bootstrap_port": front.bootstrap_port if is_prefill else None,
        "disaggregation_transfer_backend": config.transfer_backend,
        "version": __version__,
        "max_total_num_tokens": info.pages_total * info.page_size,
        "max_req_input_len": info.max_total_tokens_per_request - 1,
        "context_length": info.max_total_tokens_per_request,
        "page_size": info.page_size,
        "dtype": info.dtype,
        "quantization": info.weights_quantization,
        "kernels": info.kernels or "torch",
        "batch_invariant": info.batch_invariant,
        "device": info.device,
        "status": _status(front),
        "pid": os.getpid(),
        "scheduler_pids": front.scheduler_pids,
        "internal_states": [_internal_state(front, state) for state in await front.states()],
        "kv_events": _describe_kv_events(front),
        "limits": worker_limits(front.config, front.context_length),
    }


def _internal_state(front: FrontEnd, state: SchedulerState) -> dict[str, Any]:
    """Return one scheduler's state with the fields that SGLang's clients read."""
    num_drafts = state.spec_decode_num_drafts_total
    accepted = 1.0 + state.spec_decode_num_accepted_tokens_total / num_drafts if num_drafts else None
    return {
        **msgspec.to_builtins(state),
        "avg_spec_accept_length": accepted,
        "effective_max_running_requests_per_dp": front.config.scheduler.max_running_requests,
        "dp_size": front.config.dp_size,
        "memory_usage": {"token_capacity": state.pages_total * state.page_size},
    }


def _status(front: FrontEnd) -> str:
    if front.switching_to is not None:
        return "switching"
    if front.memory is not None and front.memory.released:
        return "memory_released"
    return "draining" if front.requests.is_draining else "ready"


def _describe_kv_events(front: FrontEnd) -> dict[str, Any] | None:
    """Describe the KV events in routers' format. `publishers` is an extension for ports that are not consecutive."""
    config, info = front.config.kv_events, front.info
    if config.publisher == "null":
        return None
    endpoints, replays = info.kv_events_endpoints, info.kv_replay_endpoints
    host, port = _base_of(endpoints)
    return {
        "publisher": config.publisher,
        "endpoint_host": host,
        "endpoint_port_base": port,
        "topic": config.topic,
        "block_size": info.page_size,
        "dp_size": front.config.dp_size,
        "replay_endpoint_port_base": _base_of(replays)[1],
        "publishers": [
            {"dp_rank": rank, "endpoint": endpoint, "replay_endpoint": replay}
            for rank, (endpoint, replay) in enumerate(zip(endpoints, replays, strict=True))
        ],
    }


def _base_of(endpoints: Sequence[str]) -> tuple[str | None, int | None]:
    """Return the first rank's host and port. The port is None unless the other ranks have the ports that follow."""
    matches = [re.fullmatch(r"tcp://(.+):(\d+)", endpoint) for endpoint in endpoints]
    places = [(match[1], int(match[2])) for match in matches if match is not None]
    host, port = places[0] if places else (None, None)
    is_counted = port is not None and places == [(host, port + rank) for rank in range(len(endpoints))]
    return host, port if is_counted else None


def _kv_rank(front: FrontEnd, dp_rank: str) -> int:
    """Return the rank of a KV index. Raises InvalidRequestError if there is no such index."""
    if front.config.kv_events.publisher == "null":
        raise InvalidRequestError("this worker keeps no index of its blocks: start it with --kv-events-config")
    return _rank(front, dp_rank)


def _rank(front: FrontEnd, dp_rank: str) -> int:
    """Return the data parallel rank. Raises InvalidRequestError if there is no such rank."""
    dp_size = front.config.dp_size
    if not (dp_rank.isdecimal() and int(dp_rank) < dp_size):
        raise InvalidRequestError(f"dp_rank {dp_rank!r}: this worker has the ranks 0 to {dp_size - 1}", param="dp_rank")
    return int(dp_rank)


def _load(rank: int, state: SchedulerState) -> dict[str, Any]:
    return {
        "dp_rank": rank,
        "num_running_reqs": state.num_running_reqs,
        "num_waiting_reqs": state.num_waiting_reqs,
        "num_total_reqs": state.num_running_reqs + state.num_waiting_reqs,
        "num_used_tokens": state.num_tokens_held,
        "num_tokens_pre_allocated": state.num_tokens_pre_allocated,
        "max_total_num_tokens": state.pages_total * state.page_size,
        "token_usage": state.kv_usage,
    }


def _check_ready(front: FrontEnd) -> None:
    reason = front.unready_reason()
    if reason is not None:
        has_released = front.memory is not None and front.memory.released
        raise MemoryReleasedError(reason) if has_released else WorkerUnavailableError(reason)


async def _generate_one_token(front: FrontEnd) -> None:
    """Generate one token on each scheduler. Raises WorkerUnavailableError if one yields no token in time."""
    generations = [
        Generation(front, _health_request(front, rank), front.clock.now()) for rank in range(front.config.dp_size)
    ]
    try:
        async with asyncio.timeout(HEALTH_DEADLINE):
            await asyncio.gather(*(generation.complete() for generation in generations))
    except TimeoutError:
        raise WorkerUnavailableError(
            f"no token within {HEALTH_DEADLINE:g} s (stage: health generation): look at the worker's load and log"
        ) from None
    except DeadlineExceededError as error:
        raise WorkerUnavailableError(error.message) from error


def _health_request(front: FrontEnd, dp_rank: int) -> FanOut:
    params = ResolvedSampling(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    spec = GenerateRequest(rid="", prompt_ids=[0], params=params)
    bootstrap = None
    if front.mode is not DisaggregationMode.NULL:
        bootstrap = BootstrapInfo(FAKE_BOOTSTRAP_HOST, 0, RoomKey(secrets.randbits(63)))
    fanout = fan_out([spec], 1, f"health-{random_rid()}", [bootstrap], dispatch=Dispatch(probe=True))
    return dataclasses.replace(fanout, dp_rank=dp_rank)


def _abort(front: FrontEnd, body: AbortBody) -> int:
    """Return the number of samples ordered to end. It is no error if they have already ended."""
    if body.abort_all:
        rids = tuple(front.requests.rids)
    elif body.rid:
        rids = front.requests.samples_of(body.rid)
    else:
        raise InvalidRequestError("send the rid of the request to abort, or abort_all: true", param="rid")
    front.requests.ordered_to_end.update(rids)
    for rid in rids:
        front.scheduler.abort(rid, "aborted through /abort_request")
    return len(rids)


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
        if front.switch_role is None:
            raise WorkerUnavailableError(front.unready_reason() or "this worker's role is fixed")
        return json_response(_describe_switch(front, await front.switch_role(order)))

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
