"""Attacks of `splitserve bench abuse`, in a separate process so that they do not slow the measured clients.

`python -m splitserve.tools.bench.abuse_attacks`: reads an AttackOrder as JSON from standard input, runs that attack and
writes an AttackResult as JSON to standard output. An attack is one function and one line in ATTACKS.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

_PIECE_BYTES = 1 << 16
_AMBIGUOUS_GRAMMAR = """
root ::= (a | b | a a | b b | root root)
a ::= "a" | "aa" | root "a"
b ::= "b" | "a" | "ab"
"""


class AttackOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Input of one run of an attack."""

    # Key of ATTACKS.
    name: str
    # The router's URL first, then those of the workers.
    urls: list[str]
    model: str
    # Ports on 127.0.0.1 on which the workers' processes listen, without those of HTTP.
    internal_ports: list[int]
    # Seconds during which an attack without an answer goes on.
    duration: float


class AttackResult(msgspec.Struct, frozen=True, kw_only=True):
    # Outcomes, e.g. "HTTP 413", "closed" or "open" -> number of requests or connections with that outcome.
    outcomes: dict[str, int]


Attack = Callable[[AttackOrder], Coroutine[None, None, Counter[str]]]


@dataclass(frozen=True, slots=True)
class _Message:
    """One HTTP/1.1 request as bytes."""

    url: str
    path: str
    body: bytes = b""
    # Bytes that Content-Length announces. None: the length of `body`.
    announced: int | None = None
    extra_headers: bytes = b""

    def head(self) -> bytes:
        length = len(self.body) if self.announced is None else self.announced
        lines = (
            f"POST {self.path} HTTP/1.1\r\nHost: {urlsplit(self.url).netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
        )
        return lines.encode() + self.extra_headers + b"\r\n"


async def _send(message: _Message, deadline: float) -> str:
    """Send a request and return its outcome within `deadline` seconds."""
    try:
        async with asyncio.timeout(deadline):
            return await _exchange(message)
    except TimeoutError:
        return "open"
    except OSError:
        return "closed"


async def _exchange(message: _Message) -> str:
    """Return the status of the answer. The server may answer, or close, before it has read the request."""
    address = urlsplit(message.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    sending = asyncio.create_task(_write(writer, message.head(), message.body))
    try:
        status = await reader.readline()
        if not status:
            return "closed"
        # Reads to the end of the answer. If less body was sent than announced, the server waits for the rest instead.
        if message.announced is None:
            with suppress(ConnectionError):
                while await reader.read(_PIECE_BYTES):
                    pass
        return f"HTTP {status.split()[1].decode()}"
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()


async def _write(writer: asyncio.StreamWriter, *parts: bytes) -> None:
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _PIECE_BYTES):
            writer.write(view[start : start + _PIECE_BYTES])
            await writer.drain()


async def _send_all(messages: Iterable[_Message], deadline: float) -> Counter[str]:
    return Counter(await asyncio.gather(*(_send(message, deadline) for message in messages)))


def _closing(body: object) -> tuple[bytes, bytes]:
    """Return a body as JSON and the header that ends the connection after the answer."""
    return json.dumps(body).encode(), b"Connection: close\r\n"


def _to_all(path: str, body: object) -> Attack:
    """Send one body to the router and to every worker."""

    async def attack(order: AttackOrder) -> Counter[str]:
        content, headers = _closing(body | {"model": order.model} if isinstance(body, dict) else body)
        messages = [_Message(url, path, content, extra_headers=headers) for url in order.urls]
        return await _send_all(messages, order.duration)

    return attack


def _long_prompt(num_bytes: int) -> Attack:
    async def attack(order: AttackOrder) -> Counter[str]:
        body = {"model": order.model, "prompt": "hello " * (num_bytes // 6), "max_tokens": 2}
        content, headers = _closing(body)
        messages = [_Message(url, "/v1/completions", content, extra_headers=headers) for url in order.urls]
        return await _send_all(messages, order.duration)

    return attack


def _raw_body(body: bytes) -> Attack:
    async def attack(order: AttackOrder) -> Counter[str]:
        paths = ("/v1/completions", "/v1/chat/completions", "/generate")
        close = b"Connection: close\r\n"
        messages = [_Message(url, path, body, extra_headers=close) for url in order.urls for path in paths]
        return await _send_all(messages, order.duration)

    return attack


def _many(count: int, path: str, body: Callable[[int], dict[str, object]]) -> Attack:
    """Send `count` requests to the router, all at once."""

    async def attack(order: AttackOrder) -> Counter[str]:
        messages = []
        for i in range(count):
            content, headers = _closing(body(i) | {"model": order.model})
            messages.append(_Message(order.urls[0], path, content, extra_headers=headers))
        return await _send_all(messages, order.duration)

    return attack


async def _silent_connections(order: AttackOrder) -> Counter[str]:
    """Open 200 connections to each HTTP port and send nothing."""
    targets = [_address(url) for url in order.urls for _ in range(200)]
    return Counter(await asyncio.gather(*(_hold(host, port, b"", order.duration) for host, port in targets)))


async def _half_bodies(order: AttackOrder) -> Counter[str]:
    """Announce a body on 50 connections to each HTTP port and send half of it."""
    half = b'{"prompt": "' + b"x" * 5_000
    heads = [(url, _Message(url, "/v1/completions", announced=10_000).head()) for url in order.urls]
    holds = [_hold(*_address(url), head + half, order.duration) for url, head in heads for _ in range(50)]
    return Counter(await asyncio.gather(*holds))


async def _huge_content_length(order: AttackOrder) -> Counter[str]:
    messages = [_Message(url, "/v1/completions", b"{", announced=10**15) for url in order.urls for _ in range(10)]
    return await _send_all(messages, order.duration)


async def _huge_headers(order: AttackOrder) -> Counter[str]:
    """Send headers of 1, 10 and 50 MB."""
    sizes = (1_000_000, 10_000_000, 50_000_000)
    lines = [b"X-Filler: " + b"x" * size + b"\r\n" for size in sizes]
    messages = [_Message(url, "/v1/completions", b"{}", extra_headers=line) for url in order.urls for line in lines]
    return await _send_all(messages, order.duration)


async def _silent_peers(order: AttackOrder) -> Counter[str]:
    """Open 60 connections per second to each internal port and send nothing."""
    holds = []
    for _ in range(max(1, round(order.duration))):
        for port in order.internal_ports:
            holds += [asyncio.create_task(_hold("127.0.0.1", port, b"", order.duration)) for _ in range(60)]
        await asyncio.sleep(1.0)
    return Counter(await asyncio.gather(*holds))


async def _junk_frames(order: AttackOrder) -> Counter[str]:
    """Send bytes that are no frame to each internal port."""
    junk = [b"\x00" * 64, b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64]
    holds = [
        _hold("127.0.0.1", port, frame, min(5.0, order.duration))
        for port in order.internal_ports
        for frame in junk * 25
    ]
    return Counter(await asyncio.gather(*holds))


async def _aborted_streams(order: AttackOrder) -> Counter[str]:
    """Start 100 streams and close each connection at its first event."""

    async def abort(number: int) -> str:
        body = {"model": order.model, "prompt": [number + 1] * 32, "max_tokens": 500, "stream": True}
        content, headers = _closing(body | {"ignore_eos": True})
        host, port = _address(order.urls[0])
        message = _Message(order.urls[0], "/v1/completions", content, extra_headers=headers)
        reader, writer = await asyncio.open_connection(host, port)
        try:
            await _write(writer, message.head(), content)
            async with asyncio.timeout(order.duration):
                async for line in reader:
                    if line.startswith(b"data:"):
                        return "aborted"
            return "closed"
        except TimeoutError:
            return "open"
        except OSError:
            return "closed"
        finally:
            writer.close()

    return Counter(await asyncio.gather(*(abort(number) for number in range(100))))


async def _nothing(order: AttackOrder) -> Counter[str]:
    """Do nothing, as the baseline: gaps without an attack."""
    await asyncio.sleep(order.duration)
    return Counter()


async def _hold(host: str, port: int, data: bytes, duration: float) -> str:
    """Keep a connection open. Return whether the server closed it, answered, or left it open for `duration` seconds."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return "refused"
    try:
        async with asyncio.timeout(duration):
            writer.write(data)
            answer = await reader.read(_PIECE_BYTES)
            return f"HTTP {answer.split()[1].decode()}" if answer.startswith(b"HTTP/") else "closed"
    except TimeoutError:
        return "open"
    except OSError:
        return "closed"
    finally:
        writer.close()


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or 80


def _bomb(number: int) -> dict[str, object]:
    """Return a grammar with an automaton much larger than its text."""
    size = 1_000 * (number + 1)
    sampling = {"max_new_tokens": 16, "temperature": 0.0, "ebnf": f'root ::= (("a" | "b"){{0,{size}}} "c"){{1,1000}}'}
    return {"text": "go", "sampling_params": sampling}


def _ambiguous(number: int) -> dict[str, object]:
    sampling = {"max_new_tokens": 100, "temperature": 1.0, "seed": number, "ebnf": _AMBIGUOUS_GRAMMAR}
    return {"text": "aab", "sampling_params": sampling}


def _completion(**fields: object) -> dict[str, object]:
    return {"prompt": "hi", "max_tokens": 4, **fields}


# Attacks by name, in the order in which they run.
ATTACKS: dict[str, Attack] = {
    "none": _nothing,
    "prompt-1mb": _long_prompt(1_000_000),
    "prompt-5mb": _long_prompt(5_000_000),
    "prompt-10mb": _long_prompt(10_000_000),
    "prompt-15mb": _long_prompt(15_000_000),
    "prompt-180mb": _long_prompt(180_000_000),
    "chat-100000-messages": _to_all(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}] * 100_000, "max_tokens": 2}
    ),
    "ambiguous-grammar": _many(4, "/generate", _ambiguous),
    "35-ambiguous-grammars": _many(35, "/generate", _ambiguous),
    "grammar-bombs": _many(35, "/generate", _bomb),
    "stop-token-ids": _to_all("/v1/completions", _completion(stop_token_ids=list(range(1_000_000)))),
    "logit-bias": _to_all("/v1/completions", _completion(logit_bias={str(i): 1 for i in range(1_000_000)})),
    "stop-strings": _to_all("/v1/completions", _completion(stop=[f"stop{i}" for i in range(200_000)])),
    "long-rid": _to_all("/generate", {"text": "hi", "rid": "r" * 1_000_000, "sampling_params": {"max_new_tokens": 4}}),
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


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=AttackOrder)
    outcomes = asyncio.run(ATTACKS[order.name](order))
    sys.stdout.buffer.write(msgspec.json.encode(AttackResult(outcomes=dict(outcomes))))


if __name__ == "__main__":
    main()
