"""Bodies and headers of answers that report an error."""

from __future__ import annotations

import math

import msgspec

from splitserve.api.error_text import shortened
from splitserve.core.errors import InvalidKeyError, RateLimitError, SplitserveError

Headers = dict[str, str]


def error_body(message: str, error_type: str, code: str | int, param: str | None = None) -> bytes:
    """Return an error in the shape of OpenAI's API, as JSON. Long texts are shortened."""
    param = None if param is None else shortened(param)
    error = {"message": shortened(message), "type": error_type, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def body_of(error: SplitserveError) -> bytes:
    """Return the body of the answer to a request that failed with `error`."""
    return error_body(error.message, error.openai_type, error.reason, error.param)


def headers_of(error: SplitserveError) -> Headers:
    """Return the headers of that answer: how to authenticate, or when to retry."""
    if isinstance(error, InvalidKeyError):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, RateLimitError):
        return {"retry-after": str(math.ceil(error.retry_after))}
    return {"retry-after": "1"} if error.http_status == 503 else {}
