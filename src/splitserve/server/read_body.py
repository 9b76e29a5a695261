"""Conversion of a request's body to the values that its route needs, off the event loop if the body is large."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request, Response

from splitserve.api import validation
from splitserve.api.json_body import parse_object
from splitserve.api.schemas import GenerateBody, NativeSampling, RequestModel
from splitserve.api.validation import MAX_NAMED, WARNING_HEADER, unknown_fields, warning
from splitserve.core.errors import InvalidRequestError
from splitserve.server.front_end import FrontEnd

logger = logging.getLogger(__name__)

T = TypeVar("T")
B = TypeVar("B", bound=RequestModel)
# Warnings that were logged: each text once, up to this many texts.
_MAX_LOGGED = 256
_logged: set[str] = set()


async def read_object(front: FrontEnd, request: Request, prepare: Callable[[dict[str, Any]], T]) -> T:
    """Return the result of `prepare` for the body's JSON object. It may run in another thread.

    Raises InvalidRequestError, the errors of `prepare`, and WorkerUnavailableError if the role of the worker changed.
    """
    raw = await request.body()
    mode, limits = front.mode, front.config.server.limits
    prepared = await front.prompt_pool.run(len(raw), lambda: prepare(parse_object(raw, limits)))
    front.check_role(mode)
    return prepared


async def read_body(front: FrontEnd, request: Request, model: type[B]) -> B:
    """Return the body as `model`, for routes that do not warn about unknown fields. Raises like `read_object`."""
    return await read_object(front, request, lambda body: validation.parse(model, body))


def check_unknown(front: FrontEnd, found: dict[str, Any], model: type[RequestModel]) -> str:
    """Return a warning about unknown fields of a body, empty if there are none.

    Raises InvalidRequestError if the worker is configured to reject such fields.
    """
    unknown = unknown_fields(found, model.model_fields)
    parts = found.get("sampling_params") if model is GenerateBody else None
    for part in parts if isinstance(parts, list) else [parts]:
        if isinstance(part, dict):
            unknown += unknown_fields(part, NativeSampling.model_fields, "sampling_params.")
    unknown = list(dict.fromkeys(unknown))[:MAX_NAMED]
    if not unknown:
        return ""
    text = warning(unknown)
    if front.config.server.strict_fields:
        raise InvalidRequestError(f"{text} (--strict-fields): correct or remove", param=unknown[0].split(" ")[0])
    _log_once(text)
    return f"{text} ignored"


def with_warning(response: Response, text: str) -> Response:
    """Return the response, with a header for this warning if it is not empty."""
    if text:
        response.headers[WARNING_HEADER] = text
    return response


def _log_once(text: str) -> None:
    if text not in _logged and len(_logged) < _MAX_LOGGED:
        _logged.add(text)
        logger.warning("request has %s (logged once)", text)
