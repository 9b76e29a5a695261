"""Attacks of `splitserve bench abuse`, in a separate process so that they do not slow the measured clients.

An attack is a function that returns connections, and one line in ATTACKS. All its connections are opened at once,
unless `opens_after` delays them.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

_READ_BYTES = 1 << 16
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
    # Seconds from the start of the attack until this connection is opened.
    opens_after: float = 0.0
    # Whether it stays open to the end of the answer, and whether it is closed at the first event of a stream.
    reads_to_end: bool = False
    aborts_at_event: bool = False
    # Whether it reads anything.
    reads: bool = True

    async def outcome(self) -> str:
        """Return the status of the answer, or whether the server closed the connection or left it open."""
        await asyncio.sleep(self.opens_after)
        address = urlsplit(self.url)
        try:
            async with asyncio.timeout(self.seconds):
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
                try:
                    # The server may answer, or close, before it has read all data: reading starts at once.
                    writer.writelines((self.data, self.body))
                    return await self._read(reader)
                finally:
                    writer.transport.abort()
        except TimeoutError:
            return "open"
        except ConnectionRefusedError:
            return "refused"
        except OSError:
            return "closed"

    async def _read(self, reader: asyncio.StreamReader) -> str:
        if not self.reads:
            # It ends with the time of the attack.
            await asyncio.Event().wait()
        if self.aborts_at_event:
            async for line in reader:
                if line.startswith(b"data:"):
                    return "aborted"
            return "closed"
        answer = await reader.read(_READ_BYTES)
        if not answer.startswith(b"HTTP/"):
            return "closed"
        if self.reads_to_end:
            with suppress(ConnectionError):
                while await reader.read(_READ_BYTES):
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


def _posts(path: str, body: Callable[[], Body]) -> Attack:
    """Send a body to the router and every worker."""

    def attack(order: AttackOrder) -> Iterator[AttackConnection]:
        content = _encode(body(), order)
        return (_post(order, url, path, content) for url in order.urls)

    return attack


def _numbered(count: int, path: str, body: Callable[[int], Body], *, aborts_at_event: bool = False) -> Attack:
    """Send the bodies of the numbers 0 to `count` - 1 to the router."""
    return lambda order: (
        replace(_post(order, order.urls[0], path, _encode(body(i), order)), aborts_at_event=aborts_at_event)
        for i in range(count)
    )


def _encode(body: Body, order: AttackOrder) -> bytes:
    return json.dumps(body | {"model": order.model}).encode()


def _raw_body(body: bytes) -> Attack:
    paths = ("/v1/completions", "/v1/chat/completions", "/generate")
    return lambda order: (_post(order, url, path, body) for url in order.urls for path in paths)


def _unfinished(count: int, data: Callable[[str], bytes]) -> Attack:
    """Send data that is no whole request on `count` connections to each HTTP port."""
    return lambda order: (AttackConnection(url, data(url), order.duration) for url in order.urls for _ in range(count))


def _completions(body: Callable[[], Body]) -> Attack:
    return _posts("/v1/completions", lambda: {"prompt": "hi", "max_tokens": 4} | body())


def _long_prompt(num_bytes: int) -> Attack:
    return _completions(lambda: {"prompt": "hello " * (num_bytes // 6), "max_tokens": 2})


def _ambiguous(number: int) -> Body:
    sampling = {"max_new_tokens": 100, "temperature": 1.0, "seed": number, "ebnf": _AMBIGUOUS_GRAMMAR}
    return {"text": "aab", "sampling_params": sampling}


def _bomb(number: int) -> Body:
    """Return a grammar with an automaton much larger than its text."""
    size = 1_000 * (number + 1)
    sampling = {"max_new_tokens": 16, "temperature": 0.0, "ebnf": f'root ::= (("a" | "b"){{0,{size}}} "c"){{1,1000}}'}
    return {"text": "go", "sampling_params": sampling}


def _similar_stop_strings() -> Body:
    """Return 64 samples of one letter, and stop strings that begin with hundreds of it."""
    stop = ["a" * 1024, *("a" * 511 + "b" + chr(200 + i) + "a" * 511 for i in range(63))]
    # The token "aaaa" of smollm2.
    return {"n": 64, "max_tokens": 250, "temperature": 0, "logit_bias": {"46880": 100}, "stop": stop}


def _prompt_logprobs() -> Body:
    prompt = [(i * 7919) % 40_000 + 100 for i in range(2_000)]
    return {"prompt": prompt, "n": 4, "echo": True, "logprobs": 128, "max_tokens": 1}


def _unread_streams(order: AttackOrder) -> Iterator[AttackConnection]:
    """Open 50 streams and read none."""
    unread: Body = {"max_tokens": 500, "stream": True, "ignore_eos": True, "logprobs": 20}
    attack = _numbered(50, "/v1/completions", lambda number: {"prompt": [number + 1] * 32} | unread)
    return (replace(connection, reads=False) for connection in attack(order))


def _stream(number: int) -> Body:
    return {"prompt": [number + 1] * 32, "max_tokens": 500, "stream": True, "ignore_eos": True}


def _huge_headers(order: AttackOrder) -> Iterator[AttackConnection]:
    """Send headers of 1, 10 and 50 MB."""
    lines = [b"X-Filler: " + b"x" * size + b"\r\n" for size in (1_000_000, 10_000_000, 50_000_000)]
    return (_post(order, url, "/v1/completions", b"{}", line) for url in order.urls for line in lines)


def _silent_peers(order: AttackOrder) -> Iterator[AttackConnection]:
    """Open 60 connections per second to each internal port and send nothing."""
    seconds = range(max(1, round(order.duration)))
    urls = _internal_urls(order) * 60
    return (AttackConnection(url, b"", order.duration, opens_after=second) for second in seconds for url in urls)


def _junk_frames(order: AttackOrder) -> Iterator[AttackConnection]:
    """Send bytes that are no frame to each internal port."""
    seconds = min(5.0, order.duration)
    return (AttackConnection(url, frame, seconds) for url in _internal_urls(order) for frame in _JUNK * 25)


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
    "chat-100000-messages": _posts(
        "/v1/chat/completions", lambda: {"messages": [{"role": "user", "content": "hi"}] * 100_000, "max_tokens": 2}
    ),
    "ambiguous-grammar": _numbered(4, "/generate", _ambiguous),
    "35-ambiguous-grammars": _numbered(35, "/generate", _ambiguous),
    "grammar-bombs": _numbered(35, "/generate", _bomb),
    "stop-token-ids": _completions(lambda: {"stop_token_ids": list(range(1_000_000))}),
    "logit-bias": _completions(lambda: {"logit_bias": {str(i): 1 for i in range(1_000_000)}}),
    "stop-strings": _completions(lambda: {"stop": [f"stop{i}" for i in range(200_000)]}),
    "similar-stop-strings": _completions(_similar_stop_strings),
    "prompt-logprobs": _completions(_prompt_logprobs),
    "long-rid": _posts(
        "/generate", lambda: {"text": "hi", "rid": "r" * 1_000_000, "sampling_params": {"max_new_tokens": 4}}
    ),
    "deep-json": _raw_body(b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "invalid-utf8": _raw_body(b'{"model": "smollm2", "prompt": "\xff\xfe\xc3("}'),
    "silent-connections": _unfinished(200, lambda url: b""),
    # The first half of an announced body.
    "half-bodies": _unfinished(50, lambda url: _head(url, "/v1/completions", 10_000) + b'{"prompt": "' + b"x" * 5_000),
    "huge-content-length": _unfinished(10, lambda url: _head(url, "/v1/completions", 10**15) + b"{"),
    "huge-headers": _huge_headers,
    "silent-peers": _silent_peers,
    "junk-frames": _junk_frames,
    "unread-streams": _unread_streams,
    # 100 streams, each with its connection closed at the first event.
    "aborted-streams": _numbered(100, "/v1/completions", _stream, aborts_at_event=True),
}


async def run_attack(order: AttackOrder) -> Counter[str]:
    connections = [connection.outcome() for connection in ATTACKS[order.name](order)]
    if not connections:
        await asyncio.sleep(order.duration)
    return Counter(await asyncio.gather(*connections))


def send_attack(connection: Connection, order: AttackOrder) -> None:
    """Run an attack and send its outcomes, e.g. "HTTP 413", "closed" or "open" -> number of connections."""
    connection.send(dict(asyncio.run(run_attack(order))))
