"""Attacks of `splitserve bench abuse`, in a separate process so that they do not slow the measured clients.

An attack is a function that returns connections, and one line in ATTACKS. All its connections are opened at once,
unless they have a time.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

_PIECE_BYTES = 1 << 16
_CLOSE = b"Connection: close\r\n"
_JUNK = (b"\x00" * 64, b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64)
_AMBIGUOUS_GRAMMAR = """
root ::= (a | b | a a | b b | root root)
a ::= "a" | "aa" | root "a"
b ::= "b" | "a" | "ab"
"""


@dataclass(frozen=True, slots=True)
class AttackOrder:
    """Input of one run of an attack."""

    # Key of ATTACKS.
    name: str
    # The router's URL first, then those of the workers.
    urls: Sequence[str]
    model: str
    # Ports on 127.0.0.1 on which the workers' processes listen, without those of HTTP.
    internal_ports: Sequence[int]
    # Seconds during which an attack without an answer goes on.
    duration: float


@dataclass(frozen=True, slots=True)
class AttackConnection:
    """One connection and what it sends."""

    url: str
    data: bytes
    # Seconds after which it is closed if the server does not answer.
    seconds: float
    # Sent after `data`. Connections share it, because it may be large.
    body: bytes = b""
    # Seconds from the start of the attack until it is opened.
    opens_after: float = 0.0
    # Whether it stays open to the end of the answer, and whether it is closed at the first event of a stream.
    reads_to_end: bool = False
    aborts_at_event: bool = False

    async def outcome(self) -> str:
        """Return the status of the answer, or whether the server closed the connection or left it open."""
        await asyncio.sleep(self.opens_after)
        address = urlsplit(self.url)
        try:
            async with asyncio.timeout(self.seconds):
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
                # The server may answer, or close, before it has read all data.
                sending = asyncio.create_task(self._write(writer))
                try:
                    return await self._read(reader)
                finally:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
                    writer.close()
        except TimeoutError:
            return "open"
        except ConnectionRefusedError:
            return "refused"
        except OSError:
            return "closed"

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        writer.write(self.data)
        view = memoryview(self.body)
        for start in range(0, len(view), _PIECE_BYTES):
            writer.write(view[start : start + _PIECE_BYTES])
            await writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> str:
        if self.aborts_at_event:
            async for line in reader:
                if line.startswith(b"data:"):
                    return "aborted"
            return "closed"
        answer = await reader.read(_PIECE_BYTES)
        if not answer.startswith(b"HTTP/"):
            return "closed"
        if self.reads_to_end:
            with suppress(ConnectionError):
                while await reader.read(_PIECE_BYTES):
                    pass
        return f"HTTP {answer.split()[1].decode()}"


Attack = Callable[[AttackOrder], Iterable[AttackConnection]]
Body = dict[str, object]


def _head(url: str, path: str, length: int, headers: bytes = b"") -> bytes:
    lines = (
        f"POST {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
    )
    return lines.encode() + headers + b"\r\n"


def _post(order: AttackOrder, url: str, path: str, body: bytes, headers: bytes = _CLOSE) -> AttackConnection:
    head = _head(url, path, len(body), headers)
    return AttackConnection(url, head, order.duration, body=body, reads_to_end=True)


def _to_all(path: str, body: Callable[[], Body]) -> Attack:
    """Send one body to the router and to every worker."""

    def attack(order: AttackOrder) -> Iterator[AttackConnection]:
        content = json.dumps(body() | {"model": order.model}).encode()
        return (_post(order, url, path, content) for url in order.urls)

    return attack


def _to_router(count: int, path: str, body: Callable[[int], Body]) -> Attack:
    """Send `count` requests to the router, all at once."""

    def attack(order: AttackOrder) -> Iterator[AttackConnection]:
        bodies = (json.dumps(body(i) | {"model": order.model}).encode() for i in range(count))
        return (_post(order, order.urls[0], path, content) for content in bodies)

    return attack


def _raw_body(body: bytes) -> Attack:
    paths = ("/v1/completions", "/v1/chat/completions", "/generate")
    return lambda order: (_post(order, url, path, body) for url in order.urls for path in paths)


def _completion(**fields: object) -> Body:
    return {"prompt": "hi", "max_tokens": 4, **fields}


def _long_prompt(num_bytes: int) -> Attack:
    return _to_all("/v1/completions", lambda: _completion(prompt="hello " * (num_bytes // 6), max_tokens=2))


def _ambiguous(number: int) -> Body:
    sampling = {"max_new_tokens": 100, "temperature": 1.0, "seed": number, "ebnf": _AMBIGUOUS_GRAMMAR}
    return {"text": "aab", "sampling_params": sampling}


def _bomb(number: int) -> Body:
    """Return a grammar with an automaton much larger than its text."""
    size = 1_000 * (number + 1)
    sampling = {"max_new_tokens": 16, "temperature": 0.0, "ebnf": f'root ::= (("a" | "b"){{0,{size}}} "c"){{1,1000}}'}
    return {"text": "go", "sampling_params": sampling}


def _silent_connections(order: AttackOrder) -> Iterator[AttackConnection]:
    """Open 200 connections to each HTTP port and send nothing."""
    return (AttackConnection(url, b"", order.duration) for url in order.urls for _ in range(200))


def _half_bodies(order: AttackOrder) -> Iterator[AttackConnection]:
    """Announce a body on 50 connections to each HTTP port and send half of it."""
    for url in order.urls:
        data = _head(url, "/v1/completions", 10_000) + b'{"prompt": "' + b"x" * 5_000
        yield from (AttackConnection(url, data, order.duration) for _ in range(50))


def _huge_content_length(order: AttackOrder) -> Iterator[AttackConnection]:
    for url in order.urls:
        data = _head(url, "/v1/completions", 10**15) + b"{"
        yield from (AttackConnection(url, data, order.duration) for _ in range(10))


def _huge_headers(order: AttackOrder) -> Iterator[AttackConnection]:
    """Send headers of 1, 10 and 50 MB."""
    lines = [b"X-Filler: " + b"x" * size + b"\r\n" for size in (1_000_000, 10_000_000, 50_000_000)]
    return (_post(order, url, "/v1/completions", b"{}", line) for url in order.urls for line in lines)


def _silent_peers(order: AttackOrder) -> Iterator[AttackConnection]:
    """Open 60 connections per second to each internal port and send nothing."""
    for second in range(max(1, round(order.duration))):
        for url in _internal_urls(order):
            yield from (AttackConnection(url, b"", order.duration, opens_after=second) for _ in range(60))


def _junk_frames(order: AttackOrder) -> Iterator[AttackConnection]:
    """Send bytes that are no frame to each internal port."""
    seconds = min(5.0, order.duration)
    return (AttackConnection(url, frame, seconds) for url in _internal_urls(order) for frame in _JUNK * 25)


def _aborted_streams(order: AttackOrder) -> Iterator[AttackConnection]:
    """Start 100 streams and close each connection at its first event."""
    for number in range(100):
        body = _completion(prompt=[number + 1] * 32, max_tokens=500, stream=True, ignore_eos=True, model=order.model)
        content, url = json.dumps(body).encode(), order.urls[0]
        data = _head(url, "/v1/completions", len(content), _CLOSE) + content
        yield AttackConnection(url, data, order.duration, aborts_at_event=True)


def _internal_urls(order: AttackOrder) -> list[str]:
    return [f"tcp://127.0.0.1:{port}" for port in order.internal_ports]


# Attacks by name, in the order in which they run. "none" is the baseline: gaps without an attack.
ATTACKS: dict[str, Attack] = {
    "none": lambda order: (),
    "prompt-1mb": _long_prompt(1_000_000),
    "prompt-5mb": _long_prompt(5_000_000),
    "prompt-10mb": _long_prompt(10_000_000),
    "prompt-15mb": _long_prompt(15_000_000),
    "prompt-180mb": _long_prompt(180_000_000),
    "chat-100000-messages": _to_all(
        "/v1/chat/completions", lambda: {"messages": [{"role": "user", "content": "hi"}] * 100_000, "max_tokens": 2}
    ),
    "ambiguous-grammar": _to_router(4, "/generate", _ambiguous),
    "35-ambiguous-grammars": _to_router(35, "/generate", _ambiguous),
    "grammar-bombs": _to_router(35, "/generate", _bomb),
    "stop-token-ids": _to_all("/v1/completions", lambda: _completion(stop_token_ids=list(range(1_000_000)))),
    "logit-bias": _to_all("/v1/completions", lambda: _completion(logit_bias={str(i): 1 for i in range(1_000_000)})),
    "stop-strings": _to_all("/v1/completions", lambda: _completion(stop=[f"stop{i}" for i in range(200_000)])),
    "long-rid": _to_all(
        "/generate", lambda: {"text": "hi", "rid": "r" * 1_000_000, "sampling_params": {"max_new_tokens": 4}}
    ),
    "deep-json": _raw_body(b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "invalid-utf8": _raw_body(b'{"model": "smollm2", "prompt": "\xff\xfe\xc3("}'),
    "silent-connections": _silent_connections,
    "half-bodies": _half_bodies,
    "huge-content-length": _huge_content_length,
    "huge-headers": _huge_headers,
    "silent-peers": _silent_peers,
    "junk-frames": _junk_frames,
    "aborted-streams": _aborted_streams,
}


async def run_attack(order: AttackOrder) -> Counter[str]:
    connections = [connection.outcome() for connection in ATTACKS[order.name](order)]
    if not connections:
        await asyncio.sleep(order.duration)
    return Counter(await asyncio.gather(*connections))


def send_attack(connection: Connection, order: AttackOrder) -> None:
    """Run an attack and send its outcomes, e.g. "HTTP 413", "closed" or "open" -> number of connections."""
    connection.send(dict(asyncio.run(run_attack(order))))
