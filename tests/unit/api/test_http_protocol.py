"""Connections of router and workers over real sockets: limits of headers, time and number, HTTP/1.0, upgrades."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from splitserve.api.http_protocol import EdgeProtocol
from splitserve.api.http_server import HttpServer, bind, port_of
from splitserve.api.intake import Intake, RequestMemory
from splitserve.api.tls import TlsFiles
from splitserve.core.limits import LimitsConfig

Talk = Callable[[int], Awaitable[None]]
# Seconds in which everything here happens, but for hangs.
DEADLINE = 60.0
# Seconds of the response to a body "slow", longer than the header timeout of its test.
SLOW = 0.5
# Bytes of a large response, more than the buffers of the kernel take.
LARGE = 64 << 20
TLS = Path(__file__).parents[1] / "worker" / "tls"
CERT, KEY = TLS / "cert.pem", TLS / "key.pem"


async def stream(scope: Scope, receive: Receive, send: Send) -> None:
    """Read the body, then answer with its length in two pieces, without Content-Length.

    Bodies "large" and "endless": answer with LARGE bytes, or without an end.
    """
    if scope["type"] == "lifespan":
        for kind in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{kind}.complete"})
        return
    message = await receive()
    headers = [(b"x-method", scope["method"].encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"got ", "more_body": True})
    if message["body"] == b"slow":
        await asyncio.sleep(SLOW)
    if message["body"] == b"large":
        for _ in range(LARGE >> 20):
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        await send({"type": "http.response.body"})
        return
    if message["body"] == b"endless":
        gone = asyncio.ensure_future(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
            await asyncio.sleep(0)
        assert gone.result() == {"type": "http.disconnect"}
        return
    await send({"type": "http.response.body", "body": b"%d" % len(message["body"])})


def serve(
    talk: Talk, after: Callable[[], Awaitable[None]] | None = None, tls: TlsFiles | None = None, **limits: float
) -> None:
    """Serve with these limits while `talk` runs with the port, then stop and run `after`."""
    config = LimitsConfig(**limits)  # type: ignore[arg-type]
    app = Intake(stream, max_body_bytes=lambda: 1_000, timeout=config.body_timeout, memory=RequestMemory())

    async def run() -> None:
        sock = bind("127.0.0.1", 0)
        server = HttpServer(app, sock, tls, config, router_header="x-router")
        await server.start()
        try:
            async with asyncio.timeout(DEADLINE):
                await talk(port_of(sock))
        finally:
            await server.stop(DEADLINE)
        if after is not None:
            async with asyncio.timeout(DEADLINE):
                await after()

    uvloop.run(run())


async def send(port: int, data: bytes, *, more: bytes = b"") -> bytes:
    """Send data, and then `more` whatever happens; return everything up to the server's end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        writer.write(more)
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def request(body: bytes = b"", *headers: bytes, version: bytes = b"1.1", length: int | None = None) -> bytes:
    lines = [b"POST / HTTP/" + version, b"Host: x", b"Content-Length: %d" % (len(body) if length is None else length)]
    return b"\r\n".join([*lines, *headers, b"", body])


CLOSE = b"Connection: close"


def hold_header_timers(monkeypatch: pytest.MonkeyPatch, num_connections: int) -> None:
    """Let header timers end only after this many connections have received bytes: on a busy machine that takes time."""
    heard: set[EdgeProtocol] = set()
    data_received, time_out = EdgeProtocol.data_received, EdgeProtocol._time_out

    def note(connection: EdgeProtocol, data: bytes) -> None:
        data_received(connection, data)
        heard.add(connection)

    def time_out_later(connection: EdgeProtocol) -> None:
        if len(heard) < num_connections:
            connection._header_timer = connection.loop.call_later(0.01, time_out_later, connection)
        else:
            time_out(connection)

    monkeypatch.setattr(EdgeProtocol, "data_received", note)
    monkeypatch.setattr(EdgeProtocol, "_time_out", time_out_later)


def test_a_request_within_the_limits_is_served_in_chunks() -> None:
    async def talk(port: int) -> None:
        answer = await send(port, request(b"abc", CLOSE))
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"transfer-encoding: chunked" in answer
        assert answer.endswith(b"4\r\ngot \r\n1\r\n3\r\n0\r\n\r\n")

    serve(talk)


def test_a_client_of_http_1_0_gets_a_body_that_ends_with_the_connection() -> None:
    async def talk(port: int) -> None:
        for keep_alive in ((), (b"Connection: keep-alive",)):
            head, _, body = (await send(port, request(b"abc", *keep_alive, version=b"1.0"))).partition(b"\r\n\r\n")
            assert b"chunked" not in head
            assert b"connection: close" in head
            assert body == b"got 3"

    serve(talk)


def test_a_head_request_gets_the_headers_of_get_although_its_body_has_no_end() -> None:
    async def talk(port: int) -> None:
        head = b"HEAD / HTTP/1.%d\r\nHost: x\r\nContent-Length: 7\r\n%s\r\n"
        answer = await send(port, head % (1, b"") + b"endless" + head % (1, b"Connection: close\r\n") + b"endless")
        answers = [
            *answer.split(b"\r\n\r\n")[:-1],
            *(await send(port, head % (0, b"") + b"endless")).split(b"\r\n\r\n"),
        ]
        assert answers.pop() == b""
        assert len(answers) == 3
        assert all(answer.startswith(b"HTTP/1.") and b"x-method: GET" in answer for answer in answers)

    serve(talk)


def test_large_headers_are_rejected_before_they_are_complete() -> None:
    async def talk(port: int) -> None:
        filler = b"X-Filler: " + b"x" * 3_000
        assert (await send(port, request(b"", filler, CLOSE))).startswith(b"HTTP/1.1 431")
        many = [b"X-%d: y" % i for i in range(1_000)]
        assert (await send(port, request(b"", *many, CLOSE))).startswith(b"HTTP/1.1 431")
        # Never ends: without a bound the server would read on.
        assert (await send(port, b"GET / HTTP/1.1\r\nX: ", more=b"x" * 5_000_000)).startswith(b"HTTP/1.1 431")
        assert (await send(port, request(b"a", b"X: " + b"x" * 1_000, CLOSE))).startswith(b"HTTP/1.1 200")

    serve(talk, max_header_bytes=2_000)


def test_a_request_that_is_not_http_gets_the_json_error_of_all_others() -> None:
    async def talk(port: int) -> None:
        length = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n"
        for data in (length, b"\0\r\n\r\n", b"GET / HTTP/1.1\r\nno header\r\n\r\n"):
            head, _, body = (await send(port, data)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400"), data
            assert b"content-type: application/json" in head
            assert json.loads(body)["error"]["code"] == "invalid_request"

    serve(talk)


def test_a_client_that_still_sends_can_read_why_its_body_was_rejected() -> None:
    async def talk(port: int) -> None:
        for length in (10**15, 20_000_000):
            answer = await send(port, request(b"", length=length), more=b"x" * 20_000_000)
            assert answer.startswith(b"HTTP/1.1 413"), answer[:200]
            assert b"request_too_large" in answer

    serve(talk)


def test_incomplete_requests_end_after_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # The silent ones receive none.
    hold_header_timers(monkeypatch, 41)

    async def talk(port: int) -> None:
        answers = await asyncio.gather(
            *(send(port, b"") for _ in range(20)),
            *(send(port, b"POST / HTTP/1.1\r\nHost:") for _ in range(20)),
            *(send(port, request(b"ab", length=10)) for _ in range(20)),
            send(port, request(b"ab") + b"\r\n"),
        )
        assert set(answers[:20]) == {b""}
        assert all(answer.startswith(b"HTTP/1.1 408") and b"headers" in answer for answer in answers[20:40])
        assert all(answer.startswith(b"HTTP/1.1 408") and b"body" in answer for answer in answers[40:60])
        assert answers[60].startswith(b"HTTP/1.1 200")

    serve(talk, header_timeout=0.2, body_timeout=0.2, keep_alive_timeout=0.2)


@pytest.mark.parametrize("empty_line", [b"", b"\r\n"])
def test_a_response_may_take_longer_than_the_headers_of_its_request(
    monkeypatch: pytest.MonkeyPatch, empty_line: bytes
) -> None:
    hold_header_timers(monkeypatch, 1)

    async def talk(port: int) -> None:
        answer = await send(port, request(b"slow", CLOSE) + empty_line, more=b"\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"0\r\n\r\n")

    serve(talk, header_timeout=0.2)


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[EdgeProtocol]:
    """Return a queue of the connections of which much is unsent."""
    queue: asyncio.Queue[EdgeProtocol] = asyncio.Queue()
    pause_writing = EdgeProtocol.pause_writing

    def note(connection: EdgeProtocol) -> None:
        pause_writing(connection)
        queue.put_nowait(connection)

    monkeypatch.setattr(EdgeProtocol, "pause_writing", note)
    return queue


def test_a_client_that_does_not_read_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lost: asyncio.Queue[EdgeProtocol] = asyncio.Queue()
    connection_lost = EdgeProtocol.connection_lost

    def note(connection: EdgeProtocol, error: Exception | None) -> None:
        connection_lost(connection, error)
        lost.put_nowait(connection)

    monkeypatch.setattr(EdgeProtocol, "connection_lost", note)

    async def talk(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(request(b"endless"))
        connection = await lost.get()
        assert caplog.text.count("does not read its response") == 1
        assert connection._send_timer is None
        # The bytes in the buffers of the kernel, then the end of an aborted connection.
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(1 << 40)
        writer.close()

    with caplog.at_level(logging.WARNING):
        serve(talk, send_timeout=0.1)


@pytest.mark.parametrize("tls", [None, TlsFiles(CERT, KEY)], ids=["plain", "tls"])
def test_a_client_that_reads_slowly_keeps_its_connection(
    paused: asyncio.Queue[EdgeProtocol], tls: TlsFiles | None
) -> None:
    async def talk(port: int) -> None:
        context = None if tls is None else ssl.create_default_context(cafile=CERT)
        client = socket.socket()
        # Linux may let it grow to more than is read between two checks: then nothing would be sent meanwhile.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        client.connect(("127.0.0.1", port))
        name = None if context is None else "127.0.0.1"
        reader, writer = await asyncio.open_connection(sock=client, ssl=context, server_hostname=name)
        writer.write(request(b"large"))
        connection = await paused.get()
        assert connection._send_timer is not None
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        num_read = 0
        for _ in range(3):
            # Enough for Linux to send more. The server may have set its timer anew at the end of it.
            progress = connection._progress
            num_read += len(await reader.readexactly(8 << 20))
            connection._progress = progress
            connection._check_reader()
            assert not connection._raw_transport.is_closing()
        await reader.readexactly(LARGE - num_read)
        writer.close()

    serve(talk, tls=tls)


def test_a_router_that_waits_for_its_own_client_keeps_its_connection(paused: asyncio.Queue[EdgeProtocol]) -> None:
    async def talk(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(request(b"large", b"x-router: 1"))
        connection = await paused.get()
        assert connection._send_timer is None
        await reader.readexactly(LARGE)
        writer.close()

    serve(talk)


UPGRADE = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAIAAAAB")


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_a_request_for_another_protocol_is_served_with_its_body(step: int) -> None:
    """Clients of Java send such requests by default. The body must not be read as a request."""
    inner = b"GET /inner HTTP/1.1\r\nHost: b\r\n\r\n"
    chunked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + b"\r\n".join(UPGRADE)
    chunked += b"\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    websocket = (b"Connection: keep-alive, upgrade", b"Upgrade: websocket")

    async def talk(port: int) -> None:
        sent = request(inner, *UPGRADE) + chunked + request(b"ab", *websocket)
        sent += request(b"", b"Connection: upgrade, close", b"Upgrade: h2c", version=b"1.1")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for start in range(0, len(sent), step):
            writer.write(sent[start : start + step])
            await writer.drain()
        answer = await reader.read()
        writer.close()
        assert answer.count(b"HTTP/1.1 200") == answer.count(b"got ") == 4
        lengths = [part.split(b"\r\n")[2] for part in answer.split(b"got ")[1:]]
        assert lengths == [b"%d" % len(inner), b"3", b"2", b"0"]

    serve(talk)


def test_the_headers_of_a_request_for_another_protocol_have_their_limit() -> None:
    async def talk(port: int) -> None:
        answer = await send(port, request(b"ab", *UPGRADE, b"x: " + b"y" * 2_000))
        assert answer.startswith(b"HTTP/1.1 431"), answer

    serve(talk, max_header_bytes=1_000)


def test_a_tunnel_is_refused() -> None:
    async def talk(port: int) -> None:
        answer = await send(port, b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 405")
        assert answer.count(b"HTTP/1.1") == 1

    serve(talk)


def test_an_idle_connection_ends_after_its_time_and_serves_before() -> None:
    async def talk(port: int) -> None:
        answer = await send(port, request(b"a") + request(b"bc"))
        assert answer.count(b"HTTP/1.1 200") == 2

    serve(talk, keep_alive_timeout=0.2)


def test_the_oldest_idle_connection_is_closed_when_an_address_has_too_many() -> None:
    async def talk(port: int) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        # It is served though the table is full, and the oldest pending connection was closed.
        assert (await send(port, request(b"abc", CLOSE))).startswith(b"HTTP/1.1 200")
        assert await silent[0][0].read() == b""
        for reader, writer in silent[1:]:
            writer.write(request(b"abcd", CLOSE))
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
        for _, writer in silent:
            writer.close()

    serve(talk, max_idle_connections=3)


def test_a_server_stops_at_once_though_connections_are_idle_or_half_open() -> None:
    clients = []

    async def talk(port: int) -> None:
        for data in (b"", b"POST / HTTP/1.1\r\nHost:", request(b"abc")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            if data.endswith(b"abc"):
                await reader.readuntil(b"0\r\n\r\n")
            clients.append((reader, writer))

    async def after() -> None:
        for reader, writer in clients:
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()

    serve(talk, after)
    assert len(clients) == 3
