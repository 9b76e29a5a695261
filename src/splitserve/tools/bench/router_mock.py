"""Prefill and decode worker in one process that answer at once, behind the routers of `bench router`.

`python -m splitserve.tools.bench.router_mock --fds PREFILL DECODE ACKS` inherits three listening sockets.
- Every POST is a request to generate, every GET a status request. GET /pairs returns the requests so far.
- A stream's next event is sent when the load generator acknowledges the one before on the third socket: four bytes with
  the number of the request. So no two events of a stream are sent together, as with a model.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import httptools
import msgspec
import uvloop

from splitserve.api.schemas import JOURNAL_HEADER
from splitserve.process.lifecycle import Lifecycle
from splitserve.process.ready_file import ReadyInfo, write_ready_file
from splitserve.tools.bench.router_messages import ASKED, DONE, Asked, chunk, journal_line, whole_answer

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


class Pairs(msgspec.Struct):
    """Requests with a bootstrap room. Both workers must receive each room once."""

    prefill: int = 0
    decode: int = 0
    # Exclusive or of all rooms that either worker received.
    rooms: int = 0

    @property
    def all_match(self) -> bool:
        return self.prefill == self.decode and self.rooms == 0


@dataclass(slots=True)
class _Stream:
    """One answer in flight."""

    transport: asyncio.WriteTransport
    number: int
    num_chunks: int
    has_journal: bool
    num_sent: int = 0

    def send_next(self) -> bool:
        """Send the next event and return whether more follow."""
        i = self.num_sent
        self.num_sent += 1
        data = chunk(self.number, i, self.num_chunks) + (journal_line(i) if self.has_journal else b"")
        is_last = self.num_sent == self.num_chunks
        self.transport.write(_framed(data + DONE) + b"0\r\n\r\n" if is_last else _framed(data))
        return not is_last


class _Mock:
    def __init__(self) -> None:
        self.pairs = Pairs()
        self.streams: dict[int, _Stream] = {}


class _Worker(asyncio.Protocol):
    """One connection of a router to a worker."""

    def __init__(self, mock: _Mock, *, is_prefill: bool) -> None:
        self._mock = mock
        self._is_prefill = is_prefill

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have asyncio's methods, but not its types.
        self._transport = cast(asyncio.WriteTransport, transport)
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._body = b"", b""

    def connection_lost(self, error: Exception | None) -> None:
        streams = self._mock.streams
        for number in [n for n, stream in streams.items() if stream.transport is self._transport]:
            del streams[number]

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
            self._answer(msgspec.json.encode(self._mock.pairs if url == b"/pairs" else _FACTS))
        elif url == b"/flush_cache":
            self._answer(b"{}")
        else:
            self._generate(ASKED.decode(body))

    def _generate(self, asked: Asked) -> None:
        pairs = self._mock.pairs
        if asked.bootstrap_room is not None:
            pairs.rooms ^= asked.bootstrap_room
            if self._is_prefill:
                pairs.prefill += 1
            else:
                pairs.decode += 1
        if self._is_prefill:
            self._answer(_HANDED_OVER)
        elif asked.stream:
            self._begin_stream(asked)
        else:
            self._answer(whole_answer(asked.number))

    def _begin_stream(self, asked: Asked) -> None:
        journal = f"{JOURNAL_HEADER}: 1\r\n" if asked.wants_journal else ""
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{journal}transfer-encoding: chunked\r\n\r\n"
        self._transport.write(head.encode())
        stream = _Stream(self._transport, asked.number, asked.max_tokens, asked.wants_journal)
        if stream.send_next():
            self._mock.streams[asked.number] = stream

    def _answer(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)


class _Acks(asyncio.Protocol):
    """Connection with the load generator's acknowledgements of events."""

    def __init__(self, mock: _Mock) -> None:
        self._streams = mock.streams
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        end = len(data) - len(data) % 4
        self._rest = data[end:]
        for (number,) in struct.iter_unpack("<I", data[:end]):
            stream = self._streams.get(number)
            if stream is not None and not stream.send_next():
                del self._streams[number]


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _serve(fds: list[int], ready_file: Path | None, exit_with_parent: bool) -> None:
    mock, loop, lifecycle = _Mock(), asyncio.get_running_loop(), Lifecycle()
    prefill, decode, acks = (socket.socket(fileno=fd) for fd in fds)
    with lifecycle.watch(exit_with_parent=exit_with_parent):
        servers = [
            await loop.create_server(lambda: _Worker(mock, is_prefill=True), sock=prefill),
            await loop.create_server(lambda: _Worker(mock, is_prefill=False), sock=decode),
            await loop.create_server(lambda: _Acks(mock), sock=acks),
        ]
        if ready_file is not None:
            port = int(decode.getsockname()[1])
            write_ready_file(ready_file, ReadyInfo(pid=0, port=port, url=f"http://127.0.0.1:{port}"))
        await lifecycle.draining.wait()
        for server in servers:
            server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fds", type=int, nargs=3, required=True)
    parser.add_argument("--ready-file", type=Path)
    parser.add_argument("--exit-with-parent", action="store_true")
    args = parser.parse_args()
    uvloop.run(_serve(args.fds, args.ready_file, args.exit_with_parent))


if __name__ == "__main__":
    main()
