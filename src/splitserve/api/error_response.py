"""Error responses of router and workers in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
import math

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from splitserve.core.errors import InvalidKeyError, RateLimitError, SplitserveError

logger = logging.getLogger(__name__)

Headers = dict[str, str]

_MAX_CHARS = 1_500
# Codes of errors that have a status and no SplitserveError.
_CODES = {
    404: "not_found",
    408: "request_timeout",
    413: "request_too_large",
    431: "headers_too_large",
    503: "over_capacity",
}


def shortened(text: str, max_chars: int = _MAX_CHARS) -> str:
    """Return the text, or its beginning and its end if it is longer than `max_chars`."""
    if len(text) <= max_chars:
        return text
    half = (max_chars - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def error_json(message: str, error_type: str, code: str | int, param: str | None = None) -> bytes:
    """Return an error in OpenAI's format. Long texts are shortened, whatever the request contained."""
    param = None if param is None else shortened(param)
    return msgspec.json.encode(
        {"error": {"message": shortened(message), "type": error_type, "param": param, "code": code}}
    )


def status_error(status: int, message: str) -> bytes:
    """Return the body of an error of the HTTP edge, which has a status and no SplitserveError."""
    error_type = "server_error" if status >= 500 else "invalid_request_error"
    return error_json(message, error_type, _CODES.get(status, "invalid_request"))


def error_body(error: Exception) -> bytes:
    """Return the body of an error. `code` is the stable reason code."""
    if isinstance(error, SplitserveError):
        return error_json(error.message, error.openai_type, error.reason, error.param)
    return error_json("an internal error; the server's log has the details", "server_error", SplitserveError.reason)


def error_headers(error: SplitserveError) -> Headers:
    """Return the headers of a response: how to authenticate, or when to retry."""
    if isinstance(error, InvalidKeyError):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, RateLimitError):
        return {"retry-after": str(math.ceil(error.retry_after))}
    # The request may be retried at a worker that is full, loading or draining, or at another worker.
    return {"retry-after": "1"} if error.http_status == 503 else {}


def error_response(error: SplitserveError) -> Response:
    return raw_json(error_body(error), error.http_status, error_headers(error))


def json_response(content: object, status: int = 200) -> Response:
    return raw_json(msgspec.json.encode(content), status)


def raw_json(body: bytes, status: int = 200, headers: Headers | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


def install_error_handlers(app: Starlette) -> None:
    async def on_known(_: Request, error: Exception) -> Response:
        assert isinstance(error, SplitserveError)
        return error_response(error)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        body = status_error(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        return raw_json(body, error.status_code, dict(error.headers or {}))

    async def on_unknown(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        # After this response the server closes the connection: without the header a router would reuse it.
        return raw_json(error_body(error), 500, {"connection": "close"})

    app.add_exception_handler(SplitserveError, on_known)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_unknown)
