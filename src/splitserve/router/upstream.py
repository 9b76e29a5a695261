"""HTTP requests to one worker. Every failure is raised as an UpstreamError with the answer for the client.

This module does not know pairs.
"""

from __future__ import annotations

import ssl

from splitserve.api.responses import Headers
from splitserve.api.schemas import ROLE_HEADER
from splitserve.api.validation import WARNING_HEADER
from splitserve.router.args import LBArgs
from splitserve.router.failure import UpstreamError
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

    def post(self, worker: Worker, path: str, body: bytes, headers: Headers, seconds: float) -> WorkerCall:
        """Send a request, which must be answered within `seconds`. It is in flight when this returns; close it."""
        # The role of the worker may have changed since it was selected.
        fields = {**_JSON, ROLE_HEADER: worker.mode.value, **headers, **self.key_header}
        call = WorkerCall(worker, seconds, self._args.idle_timeout)
        return self._client.send("POST", worker.url, path, body, fields, call)

    async def ask(
        self, worker: Worker, method: str, path: str, body: bytes | None = None, seconds: float = 5.0
    ) -> tuple[int, bytes, Headers]:
        """Send a short request. Return status, body and headers of the answer, whatever the status.

        Raises UpstreamError if the worker is lost or does not answer within `seconds`.
        """
        fields = self.key_header if body is None else {**_JSON, ROLE_HEADER: worker.mode.value, **self.key_header}
        connect_timeout = min(seconds, self._args.connect_timeout)
        answer = UpstreamResponse(seconds, seconds)
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
        self._worker = worker
        worker.calls.add(self)

    @property
    def is_event_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    async def head(self) -> None:
        """Wait for a 2xx answer. Raises UpstreamError for any other answer, too."""
        await super().head()
        if not 200 <= self.status < 300:
            body = await self.read()
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
        lost = _lost(self._worker, error)
        lost.__cause__ = error
        return lost


def answer_headers(answer: UpstreamResponse) -> Headers:
    return {name: answer.headers[name] for name in _ANSWER_HEADERS if name in answer.headers}


def _lost(worker: Worker, error: Exception) -> UpstreamError:
    """Return the failure of a worker after its connection failed or timed out with `error`."""
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
        return UpstreamError.lost(worker, 504, f"{name} {worker.broken_off}", is_worker_loss=worker.is_hung)
    message = f"{name} did not answer in time (--idle-timeout, --timeout): it is overloaded or stuck"
    return UpstreamError.lost(worker, 504, message)
