"""HTTP requests to one worker. Every failure is raised as an UpstreamError with the answer for the client.

This module does not know pairs.
"""

from __future__ import annotations

import ssl

from splitserve.api.error_response import Headers
from splitserve.api.schemas import ROLE_HEADER
from splitserve.api.validation import WARNING_HEADER
from splitserve.router.args import LBArgs
from splitserve.router.failure import UpstreamError
from splitserve.router.http_answer import BrokenConnectionError, ConnectError, UpstreamResponse
from splitserve.router.http_client import HttpClient
from splitserve.router.policies import SESSION_HEADER
from splitserve.router.registry import WorkerRegistry
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
    """Connections of the router to its workers. Open it inside a running event loop.

    `key_header`: header with the key of the workers. `tls`: for workers at https URLs. None: the certificates that the
    system trusts.
    """

    def __init__(
        self, args: LBArgs, registry: WorkerRegistry, key_header: Headers, tls: ssl.SSLContext | None = None
    ) -> None:
        self._args = args
        self._registry = registry
        # No limit on connections: the workers limit their queues, and a second limit here would hide that.
        self._client = HttpClient(args.connect_timeout, tls)
        self.key_header = key_header
        self.tls = tls

    async def close(self) -> None:
        await self._client.close()

    def post(self, worker: Worker, side: str, path: str, body: bytes, headers: Headers, seconds: float) -> WorkerCall:
        """Send a request, which must be answered within `seconds`. It is in flight when this returns; close it."""
        # The role of the worker may have changed since it was selected.
        answer = self._client.send(
            "POST",
            worker.url,
            path,
            body,
            {**_JSON, ROLE_HEADER: worker.mode.value, **headers, **self.key_header},
            seconds=seconds,
            idle_timeout=self._args.idle_timeout,
        )
        return WorkerCall(self, worker, side, answer)

    async def ask(
        self, worker: Worker, method: str, path: str, body: bytes | None = None, seconds: float = 5.0
    ) -> tuple[int, bytes, Headers]:
        """Send a short request. Return status, body and headers of the answer, whatever the status.

        Raises UpstreamError if the worker is lost or does not answer within `seconds`.
        """
        answer = self._client.send(
            method,
            worker.url,
            path,
            body,
            self.key_header if body is None else {**_JSON, ROLE_HEADER: worker.mode.value, **self.key_header},
            seconds=seconds,
            idle_timeout=seconds,
            connect_timeout=min(seconds, self._args.connect_timeout),
        )
        try:
            await answer.head()
            return answer.status, await answer.read(), answer_headers(answer)
        except (TimeoutError, BrokenConnectionError) as error:
            raise self.lost(worker, worker.mode.value, error) from error
        finally:
            answer.close()

    def lost(self, worker: Worker, side: str, error: Exception) -> UpstreamError:
        # The name is for clients, so it has no address. The log takes the address from the error's `url`.
        name = f"the {side} worker"
        if isinstance(error, ConnectError):
            self._registry.mark_unhealthy(worker)
            message = f"{name} cannot be reached: try again in a moment, or check that it runs"
            return UpstreamError.lost(side, worker.url, 503, message, is_worker_loss=False)
        if isinstance(error, TimeoutError) and worker.broken_off is not None:
            message = f"{name} {worker.broken_off}"
            return UpstreamError.lost(side, worker.url, 504, message, is_worker_loss=worker.is_hung)
        if isinstance(error, TimeoutError):
            message = f"{name} did not answer in time (--idle-timeout, --timeout): it is overloaded or stuck"
            return UpstreamError.lost(side, worker.url, 504, message)
        message = f"{name} went away while it served this request ({error}): see its log, then try again"
        return UpstreamError.lost(side, worker.url, 502, message)


class WorkerCall:
    """Request in flight at a worker. Closing it before its end closes the connection, and the worker aborts."""

    __slots__ = ("_answer", "_side", "_upstream", "_worker")

    def __init__(self, upstream: Upstream, worker: Worker, side: str, answer: UpstreamResponse) -> None:
        self._upstream = upstream
        self._worker = worker
        self._side = side
        self._answer = answer
        worker.calls.add(self)

    @property
    def status(self) -> int:
        return self._answer.status

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers, with names in lower case."""
        return self._answer.headers

    @property
    def is_event_stream(self) -> bool:
        return self._answer.headers.get("content-type", "").startswith("text/event-stream")

    async def head(self) -> None:
        """Wait for a 2xx answer. Raises UpstreamError for any other answer, and for a lost worker."""
        try:
            await self._answer.head()
            if not 200 <= self._answer.status < 300:
                text = await self._answer.read()
                raise UpstreamError.answered(
                    self._side, self._worker.url, self._answer.status, text, answer_headers(self._answer)
                )
        except (TimeoutError, BrokenConnectionError) as error:
            raise self._upstream.lost(self._worker, self._side, error) from error

    async def read(self) -> bytes:
        """Return the rest of the body."""
        try:
            return await self._answer.read()
        except (TimeoutError, BrokenConnectionError) as error:
            raise self._upstream.lost(self._worker, self._side, error) from error

    async def chunk(self) -> bytes:
        """Return the next piece of the body. Empty: its end."""
        try:
            data = await self._answer.chunk()
        except (TimeoutError, BrokenConnectionError) as error:
            raise self._upstream.lost(self._worker, self._side, error) from error
        if data:
            self._worker.give_sign()
        return data

    def broke_off(self) -> UpstreamError:
        """Return the error for a worker that closed a stream before its end."""
        return self._upstream.lost(self._worker, self._side, BrokenConnectionError("closed"))

    def break_off(self) -> None:
        """Abort the call from outside, see `Worker.break_off`."""
        self._answer.fail(TimeoutError())

    def close(self) -> None:
        """Close the call. Idempotent."""
        self._worker.calls.discard(self)
        self._answer.close()


def answer_headers(answer: UpstreamResponse | WorkerCall) -> Headers:
    return {name: answer.headers[name] for name in _ANSWER_HEADERS if name in answer.headers}
