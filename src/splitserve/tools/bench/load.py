"""Load generator: requests to /v1/completions in a closed or an open loop.

closed loop   `concurrency` clients. Each sends its next request after the last token of the one before.
open loop     Each request is sent at its own time, whatever is in flight. A slow server does not slow down its load.

Failed requests are counted, and the load goes on. The caller decides what they mean for the figures.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile

import aiohttp

from splitserve.api.api_keys import key_header
from splitserve.tools.bench.prompts import Prompt
from splitserve.tools.bench.stats import StreamRecord
from splitserve.tools.bench.stream import Endpoint, LoadError, MeasuredStream, wait_closed
from splitserve.tools.bench.workload import LoadRequest
from splitserve.tools.streaming import api_key

# Seconds for one stream from sending to its end.
STREAM_TIMEOUT = 900.0


@dataclass(frozen=True, slots=True)
class StreamLoadResult:
    # Records in the order of the ends of their requests.
    records: list[StreamRecord]
    # Messages of failed requests -> number of requests.
    errors: Counter[str]
    # Seconds from the start to the end of the last request.
    elapsed: float

    @property
    def num_failed(self) -> int:
        return self.errors.total()

    def complete(self) -> list[StreamRecord]:
        """Return all records. Raises LoadError if a request failed."""
        if self.errors:
            error, _ = self.errors.most_common(1)[0]
            raise LoadError(f"{self.num_failed} of {self.num_failed + len(self.records)} requests failed: {error}")
        return self.records


def client_session(timeout: float = STREAM_TIMEOUT) -> aiohttp.ClientSession:
    # The buffer must hold one frame, and a frame may be longer than the default of 64 KiB.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout),
        headers=key_header(api_key()),
        read_bufsize=2**20,
    )


async def run_load(
    endpoint: Endpoint,
    requests: Iterable[LoadRequest],
    *,
    concurrency: int | None = None,
    duration: float | None = None,
    timeout: float = STREAM_TIMEOUT,
) -> StreamLoadResult:
    """Run requests in a closed loop of `concurrency`, or with None at the `send_at` of each.

    `duration`: seconds after which no request is sent; those in flight continue to their end. `timeout`: seconds of a
    stream.
    """
    async with client_session(timeout) as session:
        load = _Load(endpoint, session, duration)
        await (load.closed(iter(requests), concurrency) if concurrency else load.open(requests))
    return StreamLoadResult(load.records, load.errors, time.perf_counter() - load.began)


def ask(
    endpoint: Endpoint, prompts: Iterable[Prompt], max_tokens: int, *, timeout: float = STREAM_TIMEOUT
) -> list[StreamRecord]:
    """Send all prompts at once and return their records. Raises LoadError if one fails."""
    requests = [LoadRequest(prompt, max_tokens) for prompt in prompts]
    return asyncio.run(run_load(endpoint, requests, concurrency=len(requests), timeout=timeout)).complete()


class _Load:
    """One run of a load, with its results."""

    def __init__(self, endpoint: Endpoint, session: aiohttp.ClientSession, duration: float | None) -> None:
        self._endpoint = endpoint
        self._session = session
        self._duration = duration
        self.began = time.perf_counter()
        self.records: list[StreamRecord] = []
        self.errors: Counter[str] = Counter()

    async def closed(self, requests: Iterator[LoadRequest], concurrency: int) -> None:
        async def client() -> None:
            # Clients share the iterator: the next free one takes the next request.
            for request in requests:
                if self._is_over(time.perf_counter() - self.began):
                    return
                await self._send(request)

        await _all([asyncio.create_task(client()) for _ in range(concurrency)])

    async def open(self, requests: Iterable[LoadRequest]) -> None:
        async def send_in_time(request: LoadRequest) -> None:
            await asyncio.sleep(self.began + request.send_at - time.perf_counter())
            await self._send(request)

        in_time = list(takewhile(lambda request: not self._is_over(request.send_at), requests))
        # Restart the clock: preparing the requests took time.
        self.began = time.perf_counter()
        await _all([asyncio.create_task(send_in_time(request)) for request in in_time])

    def _is_over(self, seconds: float) -> bool:
        return self._duration is not None and seconds >= self._duration

    async def _send(self, request: LoadRequest) -> None:
        try:
            self.records.append(await MeasuredStream(self._endpoint, request).run(self._session))
        except LoadError as error:
            self.errors[error.message] += 1


async def _all(tasks: list[asyncio.Task[None]]) -> None:
    try:
        await asyncio.gather(*tasks)
    finally:
        await wait_closed(tasks)
