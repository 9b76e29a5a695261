"""Routes that release a worker's memory and replace its weights; paths and fields as in SGLang.

Errors have the usual shape, and beside it `success: false` and `message`.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

import msgspec
from fastapi import APIRouter, Request, Response

from splitserve.api.openapi import BOOLEAN, TEXT, fields, list_of, operation
from splitserve.api.responses import error_body, error_headers, json_response, raw_json
from splitserve.api.schemas import ChangeBody, MemoryBody, ResumeBody, SharedWeightsBody, WeightsBody
from splitserve.core.errors import InvalidRequestError, SplitserveError, WorkerUnavailableError
from splitserve.core.memory import WeightsSource
from splitserve.server.front_end import FrontEnd, read_body
from splitserve.server.memory import MemoryControl, RunningRequests, running_requests, tags_of

_FORMATS = ("auto", "safetensors")
_ERRORS = (400, 409, 500, 504)
_RELEASED = fields(success=BOOLEAN, message=TEXT, released=list_of(TEXT))
_UPDATED = fields(success=BOOLEAN, message=TEXT)
_RELEASE = operation("Return memory to the system", body=MemoryBody, answer=_RELEASED, errors=_ERRORS)
_RESUME = operation("Make released memory usable again", body=ResumeBody, answer=_RELEASED, errors=_ERRORS)
_FROM_DISK = operation("Replace the weights by a model's", body=WeightsBody, answer=_UPDATED, errors=_ERRORS)
_FROM_MEMORY = operation(
    "Replace the weights by those in shared memory", body=SharedWeightsBody, answer=_UPDATED, errors=_ERRORS
)


def _with_success(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Return `handler` with `success` and `message` added to its answers to errors."""

    @functools.wraps(handler)
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except SplitserveError as error:
            body = {"success": False, "message": error.message, **msgspec.json.decode(error_body(error))}
            return raw_json(msgspec.json.encode(body), error.http_status, error_headers(error))

    return answer


def memory_routes(front: FrontEnd) -> APIRouter:
    router = APIRouter()

    @router.post("/release_memory_occupation", **_RELEASE)
    @_with_success
    async def release(request: Request) -> Response:
        body = await read_body(front, request, MemoryBody)
        control = _control(front)
        await control.release(tags_of(body.tags), _running(body))
        return _released(control, "released")

    @router.post("/resume_memory_occupation", **_RESUME)
    @_with_success
    async def resume(request: Request) -> Response:
        body = await read_body(front, request, ResumeBody)
        control = _control(front)
        await control.resume(tags_of(body.tags))
        return _released(control, "resumed")

    @router.post("/update_weights_from_disk", **_FROM_DISK)
    @_with_success
    async def from_disk(request: Request) -> Response:
        body = await read_body(front, request, WeightsBody)
        _check_update(body)
        await _control(front).update(WeightsSource(body.model_path), _running(body))
        return _updated(body.model_path)

    @router.post("/update_weights_from_shared_memory", **_FROM_MEMORY)
    @_with_success
    async def from_shared_memory(request: Request) -> Response:
        body = await read_body(front, request, SharedWeightsBody)
        await _control(front).update(WeightsSource(body.name, is_shared_memory=True), _running(body))
        return _updated(body.name)

    return router


def _control(front: FrontEnd) -> MemoryControl:
    if front.memory is None:
        raise WorkerUnavailableError(front.unready_reason() or "this worker cannot change its memory")
    return front.memory


def _running(body: ChangeBody) -> RunningRequests:
    abort = body.abort or (isinstance(body, WeightsBody) and body.abort_all_requests)
    return running_requests(abort=abort, drain=body.drain, timeout=body.timeout)


def _check_update(body: WeightsBody) -> None:
    """Raise InvalidRequestError for a missing model, and for SGLang's fields with an effect there and none here."""
    if not body.model_path.strip():
        raise InvalidRequestError("model_path is empty: give the folder or name of a model", param="model_path")
    if body.load_format not in (None, *_FORMATS):
        raise InvalidRequestError(
            f"load_format {body.load_format!r}: weights are safetensors, give {' or '.join(_FORMATS)}",
            param="load_format",
        )
    if body.flush_cache is False:
        raise InvalidRequestError(
            "flush_cache false: KV of old weights is never reused, leave the field out", param="flush_cache"
        )


def _released(control: MemoryControl, verb: str) -> Response:
    left = sorted(control.released)
    message = f"memory is {verb}" + (f", {' and '.join(left)} not in use" if left else ", the worker serves")
    return json_response({"success": True, "message": message, "released": left})


def _updated(name: str) -> Response:
    return json_response({"success": True, "message": f"weights are those of {name}"})
