"""One HTTP request to one worker. Every way it can go wrong comes out as UpstreamError with the right answer in it.

It knows nothing of pairs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from splitserve.router.args import LBArgs
from splitserve.router.failure import Headers, UpstreamError
from splitserve.router.policies import SESSION_HEADER
from splitserve.router.registry import WorkerRegistry
from splitserve.router.worker import Worker
from splitserve.server.dispatch import ROLE_HEADER

# Of a worker's answer, these reach the client; of the client's request, these reach the workers.
_ANSWER_HEADERS = ("content-type", "retry-after", "x-request-id", "cache-control")
REQUEST_HEADERS = (
    "authorization",
    "x-request-id",
    "x-request-timeout",
    "traceparent",
    "tracestate",
    SESSION_HEADER,
)


class Upstream:
    """The router's HTTP client. Owns the connections to all workers; open it inside a running event loop."""

    def __init__(self, args: LBArgs, registry: WorkerRegistry) -> None:
        self._args = args
        self._registry = registry
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=args.connect_timeout, sock_read=args.idle_timeout
        )
        # No limit on connections: the workers bound their queues, a second bound here would only hide it.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False, timeout=self._timeout)

    async def close(self) -> None:
        await self._session.close()

    @asynccontextmanager
    async def post(
        self, worker: Worker, side: str, path: str, body: bytes, headers: Headers, seconds: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The worker's 2xx answer, its body still to be read. Leaving early closes the connection: the worker aborts.

        All of it must happen within `seconds`.

        Raises UpstreamError for any other answer and for a worker that is lost, also while the body is read.
        """
        # It may have become something else since it was chosen.
        headers = {"content-type": "application/json", ROLE_HEADER: worker.mode.value, **headers}
        call = asyncio.timeout(seconds)
        try:
            async with call:
                worker.calls.add(call)
                async with self._session.post(worker.url + path, data=body, headers=headers) as response:
                    if not 200 <= response.status < 300:
                        text = await response.read()
                        raise UpstreamError.answered(side, worker.url, response.status, text, answer_headers(response))
                    yield response
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._lost(worker, side, error) from error
        finally:
            worker.calls.discard(call)

    async def ask(
        self, worker: Worker, method: str, path: str, body: bytes | None = None, seconds: float = 5.0
    ) -> tuple[int, bytes, Headers]:
        """A short question: status, body and headers of the answer, whatever the status. Raises UpstreamError: lost, or
        nothing within `seconds`.
        """
        headers = {"content-type": "application/json"} if body is not None else {}
        limit = aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, self._args.connect_timeout))
        try:
            async with self._session.request(
                method, worker.url + path, data=body, headers=headers, timeout=limit
            ) as response:
                return response.status, await response.read(), answer_headers(response)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._lost(worker, worker.mode.value, error) from error

    def broke_off(self, worker: Worker, side: str) -> UpstreamError:
        """The worker closed a stream before its end."""
        return self._lost(worker, side, EOFError())

    def _lost(self, worker: Worker, side: str, error: BaseException) -> UpstreamError:
        name = f"the {side} worker {worker.url}"
        # Before TimeoutError: a connection that took too long is both.
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            self._registry.mark_unhealthy(worker)
            message = f"{name} cannot be reached: try again in a moment, or look whether it runs"
            return UpstreamError.lost(side, worker.url, 503, message)
        if isinstance(error, asyncio.TimeoutError) and worker.broken_off is not None:
            return UpstreamError.lost(side, worker.url, 504, f"{name} {worker.broken_off}")
        if isinstance(error, asyncio.TimeoutError):
            message = f"{name} did not answer in time (--idle-timeout, --timeout): it is overloaded or stuck"
            return UpstreamError.lost(side, worker.url, 504, message)
        message = f"{name} went away while it served this request ({type(error).__name__}): see its log, then try again"
        return UpstreamError.lost(side, worker.url, 502, message)


def answer_headers(response: aiohttp.ClientResponse) -> Headers:
    return {name: response.headers[name] for name in _ANSWER_HEADERS if name in response.headers}
