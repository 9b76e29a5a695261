"""Error responses in OpenAI's format: {"error": {"message", "type", "param", "code"}} with a status, on every route."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from splitserve.api.error_text import shortened
from splitserve.core.errors import SplitserveError

logger = logging.getLogger(__name__)


def error_body(error: Exception) -> dict[str, Any]:
    """Return the body of an error. `code` is the stable reason code."""
    if isinstance(error, SplitserveError):
        param = None if error.param is None else shortened(error.param)
        fields = (shortened(error.message), error.openai_type, param, error.reason)
    else:
        fields = ("an internal error; the worker's log has the details", "server_error", None, SplitserveError.reason)
    return {"error": dict(zip(("message", "type", "param", "code"), fields, strict=True))}


def error_response(error: SplitserveError) -> Response:
    # The request may be retried at a worker that is full, loading or draining, or at another worker.
    headers = {"Retry-After": "1"} if error.http_status == 503 else None
    return _json(error_body(error), error.http_status, headers)


def json_response(content: object, status: int = 200) -> Response:
    return _json(content, status, None)


def install_error_handlers(app: FastAPI) -> None:
    async def on_known(_: Request, error: Exception) -> Response:
        assert isinstance(error, SplitserveError)
        return error_response(error)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        body = {
            "message": shortened(f"{request.method} {request.url.path}: {error.detail}"),
            "type": "invalid_request_error",
            "param": None,
            "code": "not_found" if error.status_code == 404 else "invalid_request",
        }
        return _json({"error": body}, error.status_code, dict(error.headers or {}))

    async def on_unknown(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        # After this response the server closes the connection: without the header a router would reuse it.
        return _json(error_body(error), 500, {"Connection": "close"})

    app.add_exception_handler(SplitserveError, on_known)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_unknown)


def _json(content: object, status: int, headers: dict[str, str] | None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
