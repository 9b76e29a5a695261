"""Mock workers and the load of `bench router`, on one event loop in a thread.

- The prefill and the decode worker answer at once. Every POST is a request to generate, every GET a status request.
- A request has a number at the start of its prompt. Its answer depends on the number alone, so that every answer can be
  checked. A router may encode JSON again.
- The next event of a stream is sent when the client has the one before. So no two events of a stream are sent together,
  as with a model.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, cast

import httptools
import msgspec
import uvloop

from splitserve.api.responses import trace_comment, with_trace
from splitserve.api.schemas import JOURNAL_HEADER
from splitserve.core.errors import SplitserveError
from splitserve.core.timeline import Span, encode_trace

# Seconds beyond the duration of the load after which a router counts as stuck, and until both workers have a request.
_STUCK_TIMEOUT = 30.0
_PAIRS_TIMEOUT = 5.0
# Maximum number of recorded wrong answers.
_MAX_WRONG = 3
_NUM_DIGITS = 10
# Tail of a prompt of about 128 tokens.
_PROMPT_TAIL = " and so on, word by word, for as long as a short question takes" * 8
_NUM_ANSWER_TOKENS = 16
_DONE = b"data: [DONE]\n\n"
# Answer to every status request: enough for any router.
_FACTS = {
    "model_path": "mock",
    "served_model_name": "mock",
    "tokenizer_path": "",
    "is_generation": True,
    "tp_size": 1,
    "dp_size": 1,
    "load": 0,
}
_HANDED_OVER = b'{"text":"","output_ids":[],"meta_info":{"id":"","finish_reason":null}}'


# Spans of a prompt of two chunks, as workers of a pair recorded them, in seconds since the request arrived.
_PREFILL_SPANS = """[["tokenize",0,0.000991],["to_scheduler",0.000933,0.001236],["bootstrap",0.001262,0.003652],
["waiting",0.003652,0.013718,{"reason":"budget"}],["between_steps",0.013718,0.062941],
["prefill_chunk",0.014278,0.038888,{"tokens":256,"batch_tokens":512,"step":1033}],
["prefill_chunk",0.039919,0.062754,{"tokens":232,"batch_tokens":488,"step":1034}],
["transfer",0.038962,0.042823,{"bytes":5898240,"writes":60,"gb_s":1.527645687,"exposed_ms":0.0}],
["transfer",0.062785,0.065913,{"bytes":5348032,"writes":61,"gb_s":1.709728900,"exposed_ms":3.1280002}],
["transfer_done",0.062941,0.066134],["to_front_end",0.066313,0.066728],["detokenize",0.066728,0.067015]]"""
_DECODE_SPANS = """[["tokenize",0,0.000974],["to_scheduler",0.000927,0.001669],["handshake",0.0017,0.001825],
["prealloc",0.001825,0.002993],["metadata",0.066875,0.067009],["kv_wait",0.002993,0.067009],
["prebuilt",0.067009,0.067126],["decode",0.069861,0.418955,
{"steps":15,"step_seconds":0.348713061,"share_seconds":0.087178265,"first_step":1193,"last_step":1207}],
["between_steps",0.067126,0.41933],["to_front_end",0.067352,0.067759],["detokenize",0.067759,0.068063]]"""
# Reports of both workers. The name of the clock is as long as a boot id.
_PREFILL_TRACE, _DECODE_TRACE = (
    encode_trace(mode, "0" * 36, (0.0, spans[-1].end), [(0, spans)])
    for mode, recorded in (("prefill", _PREFILL_SPANS), ("decode", _DECODE_SPANS))
    for spans in [msgspec.json.decode(recorded, type=list[Span])]
)


class MockRequest(msgspec.Struct):
    """Fields of a request's body that the workers use."""

    text: str | None = None
    prompt: str | None = None
    stream: bool = False
    max_tokens: int = 0
    bootstrap_room: int | None = None
    dispatch: dict[str, Any] = {}

    @property
    def number(self) -> int:
        return int((self.text or self.prompt or "")[:_NUM_DIGITS])


_REQUEST = msgspec.json.Decoder(MockRequest)


def request_body(number: int, num_chunks: int) -> bytes:
    """Return the body of a request for a stream of `num_chunks` events. 0: an answer in one piece."""
    prompt = f"{number:0{_NUM_DIGITS}d}{_PROMPT_TAIL}"
    if not num_chunks:
        params = {"temperature": 0.0, "max_new_tokens": _NUM_ANSWER_TOKENS}
        return msgspec.json.encode({"text": prompt, "sampling_params": params})
    body = {"model": "mock", "prompt": prompt, "temperature": 0.0, "max_tokens": num_chunks, "stream": True}
    return msgspec.json.encode(body)


def whole_answer(number: int) -> bytes:
    meta = {
        "id": f"request-{number}",
        "finish_reason": {"type": "length", "length": _NUM_ANSWER_TOKENS},
        "prompt_tokens": 128,
        "completion_tokens": _NUM_ANSWER_TOKENS,
        "cached_tokens": 0,
        "e2e_latency": 0.125,
    }
    ids = [(number + i) % 50_000 for i in range(_NUM_ANSWER_TOKENS)]
    return msgspec.json.encode({"text": f"answer {number}", "output_ids": ids, "meta_info": meta})


def _event(number: int, index: int, num_chunks: int) -> bytes:
    """Return one event of a stream, for its token `index`."""
    finish = "length" if index == num_chunks - 1 else None
    choice = {"index": 0, "text": f" {number}-{index}", "logprobs": None, "finish_reason": finish}
    event = {"id": f"cmpl-{number}", "object": "text_completion", "created": 1, "model": "mock", "choices": [choice]}
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def is_right(answer: bytes, number: int, num_chunks: int) -> bool:
    """Return whether this is the whole answer that the workers gave. Its JSON may be encoded in another way."""
    if num_chunks:
        return answer == b"".join(_event(number, i, num_chunks) for i in range(num_chunks)) + _DONE
    expected = whole_answer(number)
    try:
        return answer == expected or bool(msgspec.json.decode(answer) == msgspec.json.decode(expected))
    except msgspec.DecodeError:
        return False


def _stream_chunks(number: int, num_chunks: int, *, has_journal: bool, has_trace: bool) -> Iterator[bytes]:
    """Yield the chunks of a streamed answer, one per event."""
    for i in range(num_chunks):
        data = _event(number, i, num_chunks)
        if has_journal:
            data += b': {"index":0,"token_ids":[%d]}\n\n' % i
        if i < num_chunks - 1:
            yield b"%x\r\n%b\r\n" % (len(data), data)
        else:
            data += (trace_comment(_DECODE_TRACE) if has_trace else b"") + _DONE
            yield b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)


class _Worker(asyncio.Protocol):
    """One connection of a router to a worker."""

    def __init__(self, mock: MockWorkers, *, is_prefill: bool) -> None:
        self._mock = mock
        self._is_prefill = is_prefill
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._body = b"", b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have asyncio's methods, but not its types.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        url, body = self._url, self._body
        self._url, self._body = b"", b""
        if self._parser.get_method() == b"GET":
            self._answer(msgspec.json.encode(_FACTS))
        elif url == b"/flush_cache":
            self._answer(b"{}")
        else:
            self._generate(_REQUEST.decode(body))

    def _generate(self, request: MockRequest) -> None:
        if request.bootstrap_room is not None:
            self._mock.add_room(request.bootstrap_room, is_prefill=self._is_prefill)
        has_trace = bool(request.dispatch.get("report"))
        if self._is_prefill or not request.stream:
            body = _HANDED_OVER if self._is_prefill else whole_answer(request.number)
            self._answer(body, has_trace=has_trace)
            return
        has_journal = bool(request.dispatch.get("journal"))
        journal = f"{JOURNAL_HEADER}: 1\r\n" if has_journal else ""
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{journal}transfer-encoding: chunked\r\n\r\n"
        self._transport.write(head.encode())
        chunks = _stream_chunks(request.number, request.max_tokens, has_journal=has_journal, has_trace=has_trace)

        def send(count: int) -> None:
            self._transport.writelines(itertools.islice(chunks, count))

        self._mock.streams[request.number] = send
        send(1)

    def _answer(self, body: bytes, *, has_trace: bool = False) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        if has_trace:
            body = with_trace(body, _PREFILL_TRACE if self._is_prefill else _DECODE_TRACE)
        self._transport.write(head % len(body) + body)


@dataclass(slots=True)
class RouterLoad:
    """Closed loop on a number of connections, and its results."""

    port: int
    connections: int
    # Events of a streamed answer. 0: answers in one piece.
    num_chunks: int
    # No request is sent after this many seconds, or after this many requests.
    seconds: float
    max_requests: int | None = None
    # Seconds from the first request to the end of the last answer, and from each request to the end of its answer.
    elapsed: float = 0.0
    latencies: list[float] = field(default_factory=list)
    num_wrong: int = 0
    # Problems of the first wrong answers.
    wrong: list[str] = field(default_factory=list)

    def note_wrong(self, what: str) -> None:
        self.num_wrong += 1
        if len(self.wrong) < _MAX_WRONG:
            self.wrong.append(what)


class _Client(asyncio.Protocol):
    """One connection with one request at a time."""

    # Answer in flight. Result: clock time at which it was complete, and whether the connection stays open.
    _answer: asyncio.Future[tuple[float, bool]] | None = None

    def __init__(self, mock: MockWorkers, load: RouterLoad) -> None:
        self._mock = mock
        self._load = load

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the connection broke ({error or 'closed'})")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"no HTTP: {error}")

    def on_body(self, data: bytes) -> None:
        # A blank line may arrive in two pieces.
        num_events = (self._body[-1:] + data).count(b"\n\n") if self._load.num_chunks else 0
        self._body += data
        if num_events and (send := self._mock.streams.get(self._number)):
            send(num_events)

    def on_message_complete(self) -> None:
        assert self._answer is not None
        self._answer.set_result((time.perf_counter(), self._parser.should_keep_alive()))

    def _fail(self, problem: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(f"request {self._number}: {problem}"))

    async def ask(self, number: int) -> None:
        """Send a request, await its answer and record it. Raises ConnectionError if the connection is unusable."""
        load, self._number = self._load, number
        self._parser, self._body = httptools.HttpResponseParser(self), bytearray()
        self._answer = asyncio.get_running_loop().create_future()
        body = request_body(number, load.num_chunks)
        head = (
            f"POST {'/v1/completions' if load.num_chunks else '/generate'} HTTP/1.1\r\nhost: 127.0.0.1:{load.port}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        if self._transport.is_closing():
            self._fail("the connection broke after the answer before")
        sent_at = time.perf_counter()
        self._transport.write(head.encode() + body)
        answered_at, stays_open = await self._answer
        load.latencies.append(answered_at - sent_at)
        self._mock.streams.pop(number, None)
        status, answer = self._parser.get_status_code(), bytes(self._body)
        if status != 200 or not is_right(answer, number, load.num_chunks):
            load.note_wrong(f"request {number}: status {status}, {answer[:300]!r}")
        if not stays_open:
            raise ConnectionError(f"request {number}: the router closes the connection after its answer")


class MockWorkers:
    """Servers of both workers, and the client of the routers in front of them. Use as a context manager."""

    prefill_port: int
    decode_port: int
    _servers: list[asyncio.Server]

    def __init__(self) -> None:
        # Functions that send the next events, by the number of the request in flight. Numbers are unique.
        self.streams: dict[int | None, Callable[[int], None]] = {}
        self.numbers = itertools.count(1)
        # Requests with a room at prefill minus those at decode, and the exclusive or of all rooms that either received.
        self._excess = self._rooms = 0
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mock workers", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._finish(self._listen())
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._servers:
            self._loop.call_soon_threadsafe(server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _finish(self, work: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def run(self, load: RouterLoad) -> None:
        """Run a load to its end. Raises SplitserveError if nothing listens at its port."""
        try:
            self._finish(self._run(load))
        except OSError as error:
            raise SplitserveError(f"port {load.port}: no router accepts connections: {error}") from error

    def add_room(self, room: int, *, is_prefill: bool) -> None:
        """Count a request with a bootstrap room. Both workers must receive each room once."""
        self._rooms ^= room
        self._excess += 1 if is_prefill else -1

    def all_pairs_match(self, timeout: float = _PAIRS_TIMEOUT) -> bool:
        """Wait for the second request of the last pair, and return whether all pairs since the last call match."""
        deadline = time.monotonic() + timeout
        while (self._excess or self._rooms) and time.monotonic() < deadline:
            time.sleep(0.05)
        matches = self._excess == self._rooms == 0
        self._excess = self._rooms = 0
        return matches

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._servers = [
            await loop.create_server(partial(_Worker, self, is_prefill=is_prefill), "127.0.0.1", 0)
            for is_prefill in (True, False)
        ]
        self.prefill_port, self.decode_port = (server.sockets[0].getsockname()[1] for server in self._servers)

    async def _run(self, load: RouterLoad) -> None:
        loop = asyncio.get_running_loop()
        connect = partial(loop.create_connection, partial(_Client, self, load), "127.0.0.1", load.port)
        connections = await asyncio.gather(*(connect() for _ in range(load.connections)))
        left = itertools.islice(self.numbers, load.max_requests)
        began = time.perf_counter()

        async def ask_on(client: _Client) -> None:
            while time.perf_counter() - began < load.seconds and (number := next(left, None)):
                await client.ask(number)

        try:
            async with asyncio.timeout(load.seconds + _STUCK_TIMEOUT):
                await asyncio.gather(*(ask_on(client) for _, client in connections))
        except TimeoutError:
            load.note_wrong(f"requests were not answered within {_STUCK_TIMEOUT:g} s")
        except ConnectionError as error:
            load.note_wrong(str(error))
        load.elapsed = time.perf_counter() - began
        for transport, _ in connections:
            transport.abort()
