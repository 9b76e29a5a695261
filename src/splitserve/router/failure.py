"""How one side of a pair failed, which of two failures is the cause, and how the client is told.

When one side fails the other soon fails too, for want of its partner. The client gets the cause: a request at fault
(4xx) before a worker that is gone, that before a worker's own error (5xx), and an abort (499) only if there is nothing
better. Between equals the first one counts.
"""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec

from splitserve.api.error_text import shortened
from splitserve.errors import (
    InvalidKeyError,
    PeerLostError,
    RateLimitError,
    SchedulerLostError,
    SplitserveError,
    clause,
)

Headers = dict[str, str]
# Codes of errors by which a worker reports the loss of its scheduler or its peer.
_LOSS_CODES = (PeerLostError.reason, SchedulerLostError.reason)
# Of an answer, in a line of the log.
_LOGGED_BYTES = 500


def in_log(body: bytes) -> str:
    """The beginning of an answer, as one line of text."""
    text = body[:_LOGGED_BYTES].decode(errors="replace")
    return "".join(character if character.isprintable() else " " for character in text)


class Cause(enum.IntEnum):
    """What a failure tells of the cause, most telling first."""

    REQUEST = 0  # the worker refused the request
    LOST = 1  # the worker cannot be reached, or went away
    WORKER = 2  # the worker reports an error of its own, or of its partner
    ABORTED = 3  # the worker stopped because somebody told it to


class UpstreamError(Exception):
    """A worker did not serve its half. Carries the answer for the client: status, body (JSON) and headers."""

    def __init__(self, side: str, url: str, status: int, body: bytes, cause: Cause, headers: Headers | None = None):
        super().__init__(f"{side} worker {url}: {status}")
        self.side = side
        self.url = url
        self.status = status
        self.body = body
        self.cause = cause
        self.headers = headers or {}
        # True: the worker or its peer hung or died while it processed the request.
        self.is_worker_loss = self.code in _LOSS_CODES

    @property
    def code(self) -> str:
        """The reason code in the body; empty where there is none."""
        try:
            body = msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return ""
        error = body.get("error") if isinstance(body, dict) else None
        return str(error.get("code") or "") if isinstance(error, dict) else ""

    def explained(self, context: str, outcome: str, code: str | None = None) -> UpstreamError:
        """The same failure, told in full: which request, at what stage, and what became of it. `code`: another one."""
        try:
            body = msgspec.json.decode(self.body)
            body["error"]["message"] = f"{context}: {clause(body['error']['message'])}; {outcome}"
            body["error"]["code"] = code or body["error"]["code"]
        except (msgspec.DecodeError, KeyError, TypeError):
            return self
        return UpstreamError(self.side, self.url, self.status, msgspec.json.encode(body), self.cause, self.headers)

    @property
    def is_conclusive(self) -> bool:
        """No later report of the other side can explain more."""
        return self.cause <= Cause.LOST

    @classmethod
    def answered(cls, side: str, url: str, status: int, body: bytes, headers: Headers | None = None) -> UpstreamError:
        """The worker answered with an error status."""
        if status == 499:
            cause = Cause.ABORTED
        elif 400 <= status < 500:
            cause = Cause.REQUEST
        else:
            cause = Cause.WORKER
        return cls(side, url, status, body, cause, headers)

    @classmethod
    def lost(cls, side: str, url: str, status: int, message: str, *, is_worker_loss: bool = True) -> UpstreamError:
        """Return the failure of a worker that could not be reached, ended, or sent nothing any more.

        `is_worker_loss`: False if it cannot have received the request, or if an operator ended its requests.
        """
        headers = {"retry-after": "1"} if status == 503 else {}
        body = error_body(message, "server_error", "worker_unavailable")
        error = cls(side, url, status, body, Cause.LOST, headers)
        error.is_worker_loss = is_worker_loss
        return error


def error_body(message: str, error_type: str, code: str | int, param: str | None = None) -> bytes:
    """An error in OpenAI's shape."""
    param = None if param is None else shortened(param)
    error = {"message": shortened(message), "type": error_type, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def body_of(error: SplitserveError) -> bytes:
    return error_body(error.message, error.openai_type, error.reason, error.param)


def headers_of(error: SplitserveError) -> Headers:
    """What goes with the status: how to come in, or when to come again."""
    if isinstance(error, InvalidKeyError):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, RateLimitError):
        return {"retry-after": str(math.ceil(error.retry_after))}
    return {"retry-after": "1"} if error.http_status == 503 else {}


def error_frames(body: bytes, *, mid_frame: bool) -> bytes:
    """The end of a stream that failed: one event with the error, then [DONE].

    `mid_frame`: the stream broke off inside an event, which is closed first.
    """
    line = b" ".join(body.split(b"\n"))
    return (b"\n\n" if mid_frame else b"") + b"data: " + line + b"\n\ndata: [DONE]\n\n"


def _statuses(error: type[SplitserveError]) -> dict[str, int]:
    codes = {error.reason: error.http_status}
    for kind in error.__subclasses__():
        codes |= _statuses(kind)
    return codes


# The status that an error would have had before the stream began, by its code, else by its type.
_STATUS_OF_CODE = _statuses(SplitserveError)
_STATUS_OF_TYPE = {"invalid_request_error": 400, "aborted": 499}


def error_in_event(event: Any) -> tuple[int, bytes] | None:
    """Status and body of the error that an SSE event reports, or None: streams fail inside a 200."""
    if not isinstance(event, dict) or not isinstance(event.get("error"), dict):
        return None
    error = event["error"]
    code = error.get("code")
    if isinstance(code, int) and 400 <= code < 600:
        status = code
    else:
        status = _STATUS_OF_CODE.get(str(code)) or _STATUS_OF_TYPE.get(str(error.get("type")), 500)
    return status, msgspec.json.encode({"error": error})
