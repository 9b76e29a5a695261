"""HTTP requests to one worker. Every failure is raised as an UpstreamError with the answer for the client.

If one worker of a pair fails, the other soon fails too, because it lost its partner. The client gets the cause. An
invalid request (4xx) has priority over a lost worker, a lost worker over a worker's own error (5xx), that over the end
of the request's time (504), and any of them over an abort (499). Among equals the first one counts.
"""

from __future__ import annotations

import enum
import math
import re
import ssl
from collections.abc import Iterable
from typing import Any

import msgspec

from splitserve.api.responses import Headers, error_json, shortened, split_trace
from splitserve.api.schemas import ROLE_HEADER
from splitserve.api.validation import WARNING_HEADER
from splitserve.core.errors import (
    UNREADABLE,
    DeadlineExceededError,
    IncompatiblePeerError,
    PeerLostError,
    SchedulerLostError,
    SplitserveError,
    WorkerDrainingError,
    WorkerUnavailableError,
    clause,
)
from splitserve.router.args import LBArgs
from splitserve.router.http_client import BrokenConnectionError, ConnectError, HttpClient, UpstreamResponse
from splitserve.router.policies import SESSION_HEADER
from splitserve.router.worker import Worker

# Headers of a worker's answer that are forwarded to the client; headers of a client's request forwarded to workers.
_ANSWER_HEADERS = ("content-type", "retry-after", "x-request-id", "cache-control", WARNING_HEADER)
REQUEST_HEADERS = (
    "authorization",
    "x-request-id",
    "x-request-timeout",
    "traceparent",
    "tracestate",
    SESSION_HEADER,
)
_JSON = {"content-type": "application/json"}
# Codes of errors by which a worker reports the loss of its scheduler or its peer.
_LOSS_CODES = (PeerLostError.reason, SchedulerLostError.reason)
# Bytes of an answer in a log line.
_LOGGED_BYTES = 500
# Largest answer to a short request, and to a health check or for a sample, bytes.
_MAX_ANSWER = 64 << 20
MAX_CHECK_ANSWER = 1 << 20
# Maximum length of an error's message in a trace.
_TRACED_CHARACTERS = 300
# The worker's message begins with the address of its peer, which is for operators only.
_REASON = re.compile(r"prefill at bootstrap address \S+?(?:, data parallel rank \d+)?: (?P<reason>.+)", re.DOTALL)
_MAX_CHARACTERS = 500
# Errors of workers may name their peers, and clients must not learn addresses inside the cluster.
_ADDRESS_PLACEHOLDER = "(address: see the router's log)"
_URL = r"\b(?:https?|tcp|ipc)://[^\s,;'\")]*[^\s,;:.'\")]"
_IP_AND_PORT = r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}:\d{1,5}\b|\[[0-9a-fA-F:.]+\]:\d{1,5}\b"


class FailureCause(enum.IntEnum):
    """Kind of a failure, the most specific cause first."""

    REQUEST = 0  # the worker rejected the request
    LOST = 1  # the worker is unreachable, or was lost
    WORKER = 2  # the worker reports an error of its own, or of its partner
    OVERDUE = 3  # the time of the request is over
    ABORTED = 4  # the worker was instructed to abort


class UpstreamError(Exception):
    """Failure of one worker at its part of a request, and the answer for the client: status, body (JSON), headers."""

    def __init__(self, worker: Worker, status: int, body: bytes, cause: FailureCause, headers: Headers | None = None):
        super().__init__(f"{worker.side} worker {worker.url}: {status}")
        self.worker = worker
        self.status = status
        self.body = body
        self.cause = cause
        self.headers = headers or {}
        # True: the worker or its peer hung or died while it processed the request.
        self.is_worker_loss = self.code in _LOSS_CODES

    @property
    def code(self) -> str:
        """Return the reason code in the body, or an empty string."""
        return str(error_object(self.body).get("code") or "")

    @property
    def is_final(self) -> bool:
        """Return whether no other worker could help: the request was aborted, or the worker reports its deadline."""
        is_deadline = self.cause is FailureCause.WORKER and self.code == DeadlineExceededError.reason
        return is_deadline or self.cause is FailureCause.ABORTED

    def explained(self, context: str, outcome: str, code: str | None = None) -> UpstreamError:
        """Return the same failure with request, stage and outcome in its message. `code`: replaces the code."""
        error = error_object(self.body)
        if not {"message", "code"} <= error.keys():
            return self
        message = f"{context}: {clause(error['message'])}; {outcome}"
        body = {"error": error | {"message": message, "code": code or error["code"]}}
        return UpstreamError(self.worker, self.status, msgspec.json.encode(body), self.cause, self.headers)

    def redacted(self, hosts: Iterable[str]) -> bytes:
        """Return the body for the client: a message without addresses, or unchanged if the request was rejected."""
        error = error_object(self.body)
        if self.cause is FailureCause.REQUEST or not isinstance(error.get("message"), str):
            return self.body
        return msgspec.json.encode({"error": error | {"message": without_addresses(error["message"], hosts)}})

    @property
    def is_conclusive(self) -> bool:
        """Return whether no later report of the other worker can explain more."""
        return self.cause <= FailureCause.LOST

    @classmethod
    def answered(cls, worker: Worker, status: int, body: bytes, headers: Headers | None = None) -> UpstreamError:
        """Return the failure of a worker that answered with an error status."""
        if status == 499:
            cause = FailureCause.ABORTED
        elif 400 <= status < 500:
            cause = FailureCause.REQUEST
        else:
            cause = FailureCause.WORKER
        return cls(worker, status, body, cause, headers)

    @classmethod
    def lost(
        cls, worker: Worker, status: int, message: str, *, is_worker_loss: bool = True, is_draining: bool = False
    ) -> UpstreamError:
        """Return the failure of a worker that could not be reached, ended, or sent nothing any more.

        `is_worker_loss`: False if it cannot have received the request, if it may be alive, or if an operator ended its
        requests (`is_draining`).
        """
        headers = {"retry-after": "1"} if status == 503 else {}
        kind = WorkerDrainingError if is_draining else WorkerUnavailableError
        body = error_json(message, "server_error", kind.reason)
        error = cls(worker, status, body, FailureCause.LOST, headers)
        error.is_worker_loss = is_worker_loss and not is_draining
        return error


class Upstream:
    """Connections of the router to its workers. Use it in one event loop.

    `key_header`: header with the key of the workers. `tls`: for workers at https URLs. None: the certificates that the
    system trusts.
    """

    def __init__(self, args: LBArgs, key_header: Headers, tls: ssl.SSLContext | None = None) -> None:
        self._args = args
        # No limit on connections: the workers limit their queues, and a second limit here would hide that.
        self._client = HttpClient(args.connect_timeout, tls)
        self.key_header = key_header
        self.tls = tls

    async def close(self) -> None:
        await self._client.close()

    def post(
        self, worker: Worker, path: str, body: bytes, headers: Headers, seconds: float, *, is_stream: bool
    ) -> WorkerCall:
        """Send a request, which must be answered within `seconds`. It is in flight when this returns; close it.

        `is_stream`: its answer may not be silent for `idle_timeout`. Other answers are silent until they are complete.
        """
        # The role of the worker may have changed since it was selected.
        fields = {**_JSON, ROLE_HEADER: worker.mode.value, **headers, **self.key_header}
        call = WorkerCall(worker, seconds, self._args.idle_timeout if is_stream else math.inf)
        return self._client.send("POST", worker.url, path, body, fields, call)

    async def ask(
        self,
        worker: Worker,
        method: str,
        path: str,
        body: bytes | None = None,
        seconds: float = 5.0,
        headers: Headers | None = None,
        max_bytes: int = _MAX_ANSWER,
    ) -> tuple[int, bytes, Headers]:
        """Send a short request. Return status, body and headers of the answer, whatever the status.

        `headers`: more headers of the request.

        Raises UpstreamError if the worker is lost, does not answer within `seconds`, or sends more than `max_bytes`.
        """
        fields = self.key_header if body is None else {**_JSON, ROLE_HEADER: worker.mode.value, **self.key_header}
        fields = {**(headers or {}), **fields}
        connect_timeout = min(seconds, self._args.connect_timeout)
        answer = UpstreamResponse(seconds, seconds, max_bytes=max_bytes)
        self._client.send(method, worker.url, path, body, fields, answer, connect_timeout)
        try:
            await answer.head()
            return answer.status, await answer.read(), answer_headers(answer)
        except (TimeoutError, BrokenConnectionError) as error:
            raise _lost(worker, error) from error
        finally:
            answer.close()


class WorkerCall(UpstreamResponse):
    """Request in flight at a worker. Methods that wait raise UpstreamError if the worker is lost.

    Closing it before its end closes the connection, and the worker aborts.
    """

    def __init__(self, worker: Worker, seconds: float, idle_timeout: float) -> None:
        super().__init__(seconds, idle_timeout)
        # JSON of the worker's trace after a whole answer. Empty: it has not arrived, or there is none.
        self.report = b""
        self._worker = worker
        worker.calls.add(self)

    @property
    def is_event_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    async def head(self) -> None:
        """Wait for a 2xx answer. Raises UpstreamError for any other answer, too."""
        await super().head()
        if not 200 <= self.status < 300:
            body, self.report = split_trace(await self.read())
            raise UpstreamError.answered(self._worker, self.status, body, answer_headers(self))

    async def chunk(self) -> bytes:
        data = await super().chunk()
        if data:
            self._worker.heartbeat()
        return data

    def broken_off(self) -> UpstreamError:
        """Return the error for a worker that closed a stream before its end."""
        return _lost(self._worker, BrokenConnectionError("closed"))

    def close(self) -> None:
        self._worker.calls.discard(self)
        super().close()

    def _translated(self, error: Exception) -> Exception:
        worker = self._worker
        if isinstance(error, TimeoutError) and self.is_overdue and worker.broken_off is None:
            # Its checks find a worker that hangs. One that is slow is not at fault.
            message = f"the {worker.side} worker had not finished its answer"
            body = error_json(message, "server_error", DeadlineExceededError.reason)
            failure = UpstreamError(worker, DeadlineExceededError.http_status, body, FailureCause.OVERDUE)
        else:
            failure = _lost(worker, error, " (--idle-timeout)")
        failure.__cause__ = error
        return failure


def answer_headers(answer: UpstreamResponse) -> Headers:
    return {name: answer.headers[name] for name in _ANSWER_HEADERS if name in answer.headers}


def _lost(worker: Worker, error: Exception, option: str = "") -> UpstreamError:
    """Return the failure of a worker after its connection failed or timed out with `error`. `option`: of the time."""
    # The name is for clients, so it has no address. The log takes the address from the error's `worker`.
    name = f"the {worker.side} worker"
    if isinstance(error, ConnectError):
        worker.mark_unhealthy()
        message = f"{name} cannot be reached: try again in a moment, or check that it runs"
        return UpstreamError.lost(worker, 503, message, is_worker_loss=False)
    if not isinstance(error, TimeoutError):
        message = f"{name} went away while it served this request ({error}): see its log, then try again"
        return UpstreamError.lost(worker, 502, message)
    if worker.broken_off is not None:
        return UpstreamError.lost(worker, 504, f"{name} {worker.broken_off}", is_draining=not worker.is_hung)
    message = f"{name} did not answer in time: it is overloaded or stuck{option}"
    return UpstreamError.lost(worker, 504, message, is_worker_loss=False)


def in_log(body: bytes) -> str:
    """Return the beginning of an answer as one line of text."""
    return _one_line(body[:_LOGGED_BYTES].decode(errors="replace"))


def message_in(body: bytes) -> str:
    """Return the message of an error as one short line, for its trace. A body in another format is a message."""
    message = error_object(body).get("message")
    return _one_line(shortened(message if isinstance(message, str) else in_log(body), _TRACED_CHARACTERS))


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


def error_object(body: bytes) -> dict[str, Any]:
    """Return the object `error` in the body of an answer. Empty: there is none."""
    try:
        parsed = msgspec.json.decode(body)
    except UNREADABLE:
        return {}
    error = parsed.get("error") if isinstance(parsed, dict) else None
    return error if isinstance(error, dict) else {}


def _statuses(error: type[SplitserveError]) -> dict[str, int]:
    codes = {error.reason: error.http_status}
    for kind in error.__subclasses__():
        codes |= _statuses(kind)
    return codes


# Status that an error would have had before the stream began, by its code, otherwise by its type.
_STATUS_OF_CODE = _statuses(SplitserveError)
_STATUS_OF_TYPE = {"invalid_request_error": 400, "aborted": 499}


def error_in_event(event: Any) -> tuple[int, bytes] | None:
    """Return status and body of the error that an SSE event reports, or None. Streams fail after a status of 200."""
    if not isinstance(event, dict) or not isinstance(event.get("error"), dict):
        return None
    error = event["error"]
    code = error.get("code")
    if isinstance(code, int) and 400 <= code < 600:
        status = code
    else:
        status = _STATUS_OF_CODE.get(str(code)) or _STATUS_OF_TYPE.get(str(error.get("type")), 500)
    return status, msgspec.json.encode({"error": error})


class Misfit(str):
    """Difference between two workers, with both values."""

    __slots__ = ()


def misfit_in(body: bytes) -> Misfit | None:
    """Return the difference that an error reports. None: the error is another one."""
    error = error_object(body)
    if error.get("code") != IncompatiblePeerError.reason:
        return None
    found = _REASON.search(str(error.get("message")))
    return Misfit(found["reason"][:_MAX_CHARACTERS] if found else "versions, layouts or models differ")


def without_addresses(text: str, hosts: Iterable[str]) -> str:
    """Replace URLs, IP addresses with a port, and `hosts` with a port."""
    names = "|".join(re.escape(host) for host in sorted(set(hosts), key=len, reverse=True) if host)
    pattern = f"{_URL}|{_IP_AND_PORT}" + (rf"|(?<![\w.-])(?:{names}):\d{{1,5}}\b" if names else "")
    return re.sub(pattern, _ADDRESS_PLACEHOLDER, text)
