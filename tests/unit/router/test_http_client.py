"""The router's HTTP client against servers that send raw bytes: every form of an answer, and missing answers."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.router.http_client import (
    BrokenConnectionError,
    ConnectError,
    HttpClient,
    HttpConnection,
    UpstreamResponse,
)
from support.loop_clock import advance

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


class Server:
    """Each connection reads requests and lets `answer` write, until that returns False."""

    def __init__(self, answer: Callable[[Server, bytes, Writer], Awaitable[bool | None]]) -> None:
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.lost = asyncio.Event()
        self._answer = answer
        self.url = ""

    async def handle(self, reader: Reader, writer: Writer) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                sizes = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(sizes[0].split(b":")[1])) if sizes else b""
                self.requests.append(head + body)
                if await self._answer(self, head + body, writer) is False:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            self.lost.set()
        finally:
            writer.close()


@asynccontextmanager
async def served(answer: Callable[[Server, bytes, Writer], Awaitable[bool | None]]) -> AsyncIterator[Server]:
    server = Server(answer)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()


@asynccontextmanager
async def opened() -> AsyncIterator[HttpClient]:
    client = HttpClient(connect_timeout=60.0)
    try:
        yield client
    finally:
        await client.close()


def post(
    client: HttpClient, url: str, body: bytes = b"{}", *, seconds: float = 60.0, idle: float = 60.0
) -> UpstreamResponse:
    return client.send("POST", url, "/generate", body, {"x-a": "b"}, UpstreamResponse(seconds, idle))


async def read(answer: UpstreamResponse) -> tuple[int, bytes]:
    try:
        await answer.head()
        return answer.status, await answer.read()
    finally:
        answer.close()


def says(*pieces: bytes, close: bool = False) -> Any:
    async def answer(server: Server, request: bytes, writer: Writer) -> bool:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return not close

    return answer


async def test_a_request_is_whole_and_its_connection_serves_the_next() -> None:
    async with served(says(OK)) as server, opened() as client:
        for number in range(3):
            assert await read(post(client, server.url, b"%d" % number)) == (200, b"hi")
        assert server.num_connections == 1
        head, _, body = server.requests[2].partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        assert (lines[0], body) == (b"POST /generate HTTP/1.1", b"2")
        assert {b"host: " + server.url[7:].encode(), b"x-a: b", b"content-length: 1"} < set(lines)


async def test_a_question_has_no_body_and_a_url_may_have_a_path() -> None:
    async with served(says(OK)) as server, opened() as client:
        answer = client.send("GET", server.url + "/base", "/health", None, {}, UpstreamResponse(5, 5))
        assert await read(answer) == (200, b"hi")
        assert server.requests[0].startswith(b"GET /base/health HTTP/1.1\r\n")
        assert b"content-length" not in server.requests[0]


async def test_requests_at_once_have_connections_of_their_own_and_each_its_answer() -> None:
    async def echo(server: Server, request: bytes, writer: Writer) -> None:
        body = request.partition(b"\r\n\r\n")[2]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async with served(echo) as server, opened() as client:
        for _ in range(2):
            answers = [post(client, server.url, b"body %d" % i) for i in range(20)]
            assert [await read(a) for a in answers] == [(200, b"body %d" % i) for i in range(20)]
        assert server.num_connections == 20


@settings(max_examples=30, deadline=None)
@given(body=st.binary(max_size=300), cuts=st.lists(st.integers(1, 60), max_size=12), how=st.integers(0, 3))
def test_an_answer_is_the_same_however_it_is_framed_and_cut(body: bytes, cuts: list[int], how: int) -> None:
    rng = random.Random(len(body))
    head = b"HTTP/1.1 200 OK\r\nX-One: 1\r\n"
    if how == 0:
        raw = head + b"content-length: %d\r\n\r\n" % len(body) + body
    elif how == 1:
        parts = [body[i : i + 7] for i in range(0, len(body), 7)]
        framed = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts)
        raw = head + b"transfer-encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"
    elif how == 2:
        raw = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + head + b"content-length: %d\r\n\r\n" % len(body) + body
    else:
        raw = head + b"\r\n" + body
    places = sorted({min(len(raw), sum(cuts[: i + 1])) for i in range(len(cuts))} | {rng.randrange(len(raw) + 1)})
    pieces = [raw[a:b] for a, b in zip([0, *places], [*places, len(raw)], strict=True)]

    async def ask() -> None:
        async with served(says(*pieces, close=how == 3)) as server, opened() as client:
            answer = post(client, server.url)
            assert await read(answer) == (200, body)
            assert answer.headers["x-one"] == "1"

    asyncio.run(ask())


async def test_chunks_come_as_they_are_sent_and_the_end_is_empty() -> None:
    seen = asyncio.Event()

    async def in_two(server: Server, request: bytes, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n")
        await seen.wait()
        writer.write(b"3\r\ntwo\r\n0\r\n\r\n")

    async with served(in_two) as server, opened() as client:
        answer = post(client, server.url)
        await answer.head()
        assert await answer.chunk() == b"one"
        seen.set()
        assert [await answer.chunk(), await answer.chunk(), await answer.chunk()] == [b"two", b"", b""]
        answer.close()


async def test_a_reader_that_is_slow_holds_the_server_up_and_loses_nothing() -> None:
    size, num_sent = 1 << 16, 0

    async def large(server: Server, request: bytes, writer: Writer) -> None:
        nonlocal num_sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (size * 512))
        for i in range(512):
            writer.write(b"%c" % (i % 256) * size)
            await writer.drain()
            num_sent += 1

    async with served(large) as server, opened() as client:
        answer = post(client, server.url)
        await answer.head()
        previous = -1
        # Until the server gets no further.
        while num_sent != previous:
            previous = num_sent
            for _ in range(200):
                await asyncio.sleep(0)
        assert num_sent < 512
        got = bytearray()
        while chunk := await answer.chunk():
            got += chunk
        assert got == b"".join(b"%c" % (i % 256) * size for i in range(512))
        answer.close()


async def test_an_answer_that_is_closed_early_takes_its_connection_along() -> None:
    async with served(says(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nha")) as server, opened() as client:
        answer = post(client, server.url)
        assert await answer.chunk() == b"ha"
        answer.close()
        await asyncio.wait_for(server.lost.wait(), 60)


@pytest.mark.parametrize(
    ("raw", "close"),
    [
        (b"", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", True),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n", True),
        (b"HTTP/1.1 200", True),
        (b"this is no HTTP\r\n\r\n", False),
    ],
    ids=["nothing", "short", "no last chunk", "half a head", "no HTTP"],
)
async def test_an_answer_that_does_not_come_to_its_end_is_an_error(raw: bytes, close: bool) -> None:
    async with served(says(raw, close=close)) as server, opened() as client:
        with pytest.raises(BrokenConnectionError):
            await read(post(client, server.url))


async def test_what_came_before_the_connection_broke_comes_before_the_error() -> None:
    raw = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"
    async with served(says(raw, close=True)) as server, opened() as client:
        answer = post(client, server.url)
        await answer.head()
        assert await answer.chunk() == b"half"
        with pytest.raises(BrokenConnectionError):
            await answer.chunk()
        answer.close()


async def test_where_nobody_listens_there_is_no_connection() -> None:
    async with served(says(OK)) as server:
        url = server.url
    async with opened() as client:
        with pytest.raises(ConnectError):
            await read(post(client, url))


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
async def test_to_an_impossible_host_name_there_is_no_connection(host: str) -> None:
    async with opened() as client:
        with pytest.raises(ConnectError):
            await read(post(client, f"http://{host}:80"))


async def test_a_body_beyond_its_limit_ends_the_response_before_the_server_does() -> None:
    async def endless(server: Server, request: bytes, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x" * 10_000)
            await writer.drain()

    async with served(endless) as server, opened() as client:
        answer = UpstreamResponse(60.0, 60.0, max_bytes=1 << 20)
        client.send("GET", server.url, "/health", None, {}, answer)
        with pytest.raises(BrokenConnectionError, match="its answer has more than 1048576 bytes"):
            await read(answer)
        await server.lost.wait()
        exact = UpstreamResponse(60.0, 60.0, max_bytes=2)
        async with served(says(OK)) as other:
            client.send("GET", other.url, "/health", None, {}, exact)
            assert await read(exact) == (200, b"hi")


@pytest.mark.parametrize("limits", [{"seconds": 30.0}, {"idle": 30.0}], ids=str)
async def test_silence_and_slowness_have_their_limits(limits: dict[str, float]) -> None:
    async with served(says(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nha")) as server, opened() as client:
        answer = post(client, server.url, **limits)
        await answer.head()
        # Bytes that arrive after the advance would begin the time of silence anew.
        assert await answer.chunk() == b"ha"
        waiting = asyncio.create_task(answer.chunk())
        await asyncio.sleep(0)
        advance(30.0)
        with pytest.raises(TimeoutError):
            await waiting
        answer.close()
        await asyncio.wait_for(server.lost.wait(), 60)


class ManualLoop:
    """Time passes by `advance` alone."""

    def __init__(self) -> None:
        self._now = 100.0
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[[], None]) -> MagicMock:
        self._timers.append((when, callback))
        return MagicMock()

    def create_future(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    def advance(self, seconds: float) -> None:
        self._now += seconds
        due = [timer for timer in self._timers if timer[0] <= self._now]
        self._timers = [timer for timer in self._timers if timer[0] > self._now]
        for _, callback in due:
            callback()


@pytest.mark.parametrize(("pause", "num_signs"), [(6.0, 16), (9.0, 11)])
async def test_signs_of_life_move_the_limit_of_silence_and_not_that_of_the_whole(pause: float, num_signs: int) -> None:
    loop: Any = ManualLoop()
    answer, connection = UpstreamResponse(100.0, 10.0, loop), HttpConnection(loop, set(), deque())
    connection.connection_made(MagicMock())
    connection.send(b"", answer)
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n")
    for _ in range(num_signs):
        loop.advance(pause)
        connection.data_received(b".")
        assert await answer.chunk() == b"."
    # The whole has its limit, however lively it is.
    loop.advance(pause)
    with pytest.raises(TimeoutError):
        await answer.chunk()


async def test_a_connection_that_the_server_ends_or_spoils_is_not_used_again() -> None:
    answers = iter(
        [
            b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nhi",
            OK + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nmore",
            OK,
        ]
    )

    async def next_one(server: Server, request: bytes, writer: Writer) -> None:
        writer.write(next(answers))

    async with served(next_one) as server, opened() as client:
        assert [await read(post(client, server.url)) for _ in range(3)] == [(200, b"hi")] * 3
        assert server.num_connections == 3


async def test_a_connection_that_was_lost_while_idle_is_replaced() -> None:
    async with served(says(OK, close=True)) as server, opened() as client:
        for _ in range(3):
            assert await read(post(client, server.url)) == (200, b"hi")
            # The server's goodbye is on its way.
            await _until(lambda: not client._all)
        assert server.num_connections == 3


async def test_whoever_gives_an_answer_up_decides_what_its_reader_hears() -> None:
    async with served(says(b"")) as server, opened() as client:
        answer = post(client, server.url)
        waiting = asyncio.create_task(read(answer))
        await _until(lambda: bool(server.requests))
        answer.fail(TimeoutError("given up"))
        with pytest.raises(TimeoutError, match="given up"):
            await waiting
        await asyncio.wait_for(server.lost.wait(), 60)


async def test_closing_the_client_breaks_what_is_under_way() -> None:
    async with served(says(b"")) as server:
        async with opened() as client:
            waiting = asyncio.create_task(read(post(client, server.url)))
            await _until(lambda: bool(server.requests))
        with pytest.raises(BrokenConnectionError):
            await waiting


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0)
