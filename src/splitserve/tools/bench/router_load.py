"""Load generator of `bench router`, a process of its own: a closed loop on a number of connections.

`python -m splitserve.tools.bench.router_load` reads a Load from standard input and writes its RouterLoadResult. Every
answer is compared with what the mock worker must have sent.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import sys
import time
from collections.abc import Iterator
from typing import cast

import httptools
import msgspec
import uvloop

from splitserve.tools.bench import router_messages as messages
from splitserve.tools.bench.stats import percentile

# Seconds beyond the duration of the load after which a router counts as stuck.
_PATIENCE = 30.0
# Maximum number of recorded wrong answers.
_MAX_WRONG = 3
_HEAD = "POST {} HTTP/1.1\r\nhost: 127.0.0.1:{}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    port: int
    # Port where the mock worker receives acknowledgements of events.
    ack_port: int
    connections: int
    # Events of a streamed answer. 0: answers in one piece.
    num_chunks: int = 0
    # No request is sent after this many seconds, or after this many requests.
    seconds: float
    max_requests: int | None = None
    # No two requests of a benchmark have the same number.
    first_number: int


class RouterLoadResult(msgspec.Struct, frozen=True, kw_only=True):
    num_requests: int
    num_chunks: int
    # Seconds from the first request to the end of the last answer.
    seconds: float
    # Seconds from a request to the end of its answer. 0: there is no answer.
    latency_p50: float
    latency_p99: float
    num_wrong: int
    # Problems of the first wrong answers.
    wrong: list[str]


class _Run:
    """State shared by all connections."""

    def __init__(self, load: Load, acks: asyncio.WriteTransport) -> None:
        self.load = load
        self._acks = acks
        self._unsent_acks: list[int] = []
        self._numbers: Iterator[int] = itertools.count(load.first_number)
        self._began = time.perf_counter()
        self._ends_at = self._began + load.seconds
        self._num_open = load.connections
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_chunks = 0
        self.num_wrong = 0
        self.wrong: list[str] = []
        self.latencies: list[float] = []

    def next_number(self) -> int | None:
        """Return the number of the next request. None: there are no more requests."""
        number = next(self._numbers)
        limit = self.load.max_requests
        is_over = limit is not None and number >= self.load.first_number + limit
        if not is_over and time.perf_counter() < self._ends_at:
            return number
        self._num_open -= 1
        if self._num_open == 0 and not self.done.done():
            self.done.set_result(None)
        return None

    def ack(self, number: int) -> None:
        """Acknowledge an event of a stream. Acknowledgements of one turn of the event loop are sent together."""
        if not self._unsent_acks:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent_acks.append(number)

    def _flush(self) -> None:
        numbers, self._unsent_acks = self._unsent_acks, []
        self._acks.write(struct.pack(f"<{len(numbers)}I", *numbers))

    def note_wrong(self, what: str) -> None:
        self.num_wrong += 1
        if len(self.wrong) < _MAX_WRONG:
            self.wrong.append(what)

    def fail(self, what: str) -> None:
        """End the load, because a connection is unusable."""
        self.note_wrong(what)
        if not self.done.done():
            self.done.set_result(None)

    def result(self) -> RouterLoadResult:
        return RouterLoadResult(
            num_requests=len(self.latencies),
            num_chunks=self.num_chunks,
            seconds=time.perf_counter() - self._began,
            latency_p50=percentile(self.latencies, 50) if self.latencies else 0.0,
            latency_p99=percentile(self.latencies, 99) if self.latencies else 0.0,
            num_wrong=self.num_wrong,
            wrong=self.wrong,
        )


class _Client(asyncio.Protocol):
    """One connection: a request, its whole answer, the next request."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        # Number of the request in flight. None: there is none.
        self._number: int | None = None
        # Received part of its answer, and how much of it was scanned.
        self._body = bytearray()
        self._num_seen = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have asyncio's methods, but not its types.
        self._transport = cast(asyncio.WriteTransport, transport)
        self._send_next()

    def connection_lost(self, error: Exception | None) -> None:
        if self._number is not None:
            self._run.fail(f"request {self._number}: the connection broke ({error or 'closed'})")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._run.fail(f"request {self._number}: no HTTP: {error}")
            self._transport.abort()

    def on_body(self, data: bytes) -> None:
        self._body += data
        num_chunks = self._run.load.num_chunks
        if num_chunks == 0 or self._number is None:
            return
        # A blank line may arrive in two pieces.
        num_new = self._body.count(b"\n\n", max(0, self._num_seen - 1))
        self._num_seen = len(self._body)
        for _ in range(num_new):
            self._run.ack(self._number)

    def on_message_complete(self) -> None:
        assert self._number is not None
        self._run.latencies.append(time.perf_counter() - self._sent_at)
        self._check(self._number, self._parser.get_status_code(), bytes(self._body))
        if self._parser.should_keep_alive():
            self._send_next()
        else:
            self._run.fail(f"request {self._number}: the router closes the connection after its answer")

    def _check(self, number: int, status: int, body: bytes) -> None:
        num_chunks = self._run.load.num_chunks
        if num_chunks:
            is_right = body == messages.stream_answer(number, num_chunks)
            self._run.num_chunks += num_chunks
        else:
            is_right = messages.is_same(body, messages.whole_answer(number))
        if status != 200 or not is_right:
            self._run.note_wrong(f"request {number}: status {status}, {body[:300]!r}")

    def _send_next(self) -> None:
        load = self._run.load
        self._number = number = self._run.next_number()
        if number is None:
            self._transport.close()
            return
        self._parser = httptools.HttpResponseParser(self)
        self._body, self._num_seen = bytearray(), 0
        path = messages.STREAM_ROUTE if load.num_chunks else messages.WHOLE_ROUTE
        body = messages.stream_body(number, load.num_chunks) if load.num_chunks else messages.whole_body(number)
        head = _HEAD.format(path, load.port, len(body))
        self._sent_at = time.perf_counter()
        self._transport.write(head.encode() + body)


async def run_load(load: Load) -> RouterLoadResult:
    loop = asyncio.get_running_loop()
    acks, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", load.ack_port)
    run = _Run(load, acks)
    clients = [loop.create_connection(lambda: _Client(run), "127.0.0.1", load.port) for _ in range(load.connections)]
    connections = await asyncio.gather(*clients)
    try:
        async with asyncio.timeout(load.seconds + _PATIENCE):
            await run.done
    except TimeoutError:
        run.note_wrong(f"requests were not answered within {_PATIENCE:g} s")
    result = run.result()
    for transport, client in connections:
        client._number = None
        transport.abort()
    acks.close()
    return result


def main() -> None:
    load = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(run_load(load))))


if __name__ == "__main__":
    main()
