"""The targets of `test_frames.py`: each takes one attack on a port, and can check whether that port still serves."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self
from unittest import mock

import httpx
import msgspec
import psutil
import zmq
from hypothesis import strategies as st

from splitserve.observe.events import publisher
from splitserve.observe.events.publisher import END_OF_REPLAY, ZmqEventPublisher
from splitserve.observe.events.schema import BlockStored
from splitserve.process.authentication import FrameSeals
from splitserve.ranks import node_wire
from splitserve.ranks.node_wire import NODE_PROTOCOL, NodeConnection, NodeHello, NodeLostError, NodeServes
from splitserve.transfer.bootstrap import KVBootstrapServer
from splitserve.transfer.copies import copy_table
from splitserve.transfer.directory import ClusterAuth
from splitserve.transfer.state import KVPoll
from splitserve.transfer.transports.base import WriteState
from splitserve.transfer.transports.frames import DATA_PROTOCOL, initiate, write_frame
from splitserve.transfer.transports.sockets import Deadline
from splitserve.transfer.wire import MAGIC, PROTOCOL_VERSION
from support.kv_world import KVWorld
from support.transfer_peer import End

DEADLINE = 60.0
TOKEN = b"a token of the cluster"
# Bytes that a process may hold more after a run, for caches and fragmentation.
MAX_GROWTH = 32 << 20
_NUMBERS = (0, 1, -1, 2**15, 2**31 - 1, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64 - 1)


@st.composite
def mutations(draw: st.DrawFn, samples: Sequence[bytes]) -> bytes:
    """Random bytes, or valid frames with some bytes changed, repeated, left out or cut off."""
    if draw(st.integers(0, 7)) == 0:
        return draw(st.binary(max_size=2048))
    sample = draw(st.sampled_from(samples))
    if draw(st.booleans()):
        sample = draw(_changed_fields(sample))
    data = bytearray(sample)
    for _ in range(draw(st.sampled_from([0, 0, 1, 2, 4]))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["flip", "number", "insert", "delete", "repeat", "cut"])):
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "number":
                width = draw(st.sampled_from([1, 2, 4, 8]))
                value = draw(st.sampled_from(_NUMBERS)) & (1 << 8 * width) - 1
                data[at : at + width] = value.to_bytes(width, draw(st.sampled_from(["little", "big"])))
            case "insert":
                data[at:at] = draw(st.binary(max_size=64))
            case "delete":
                del data[at : at + draw(st.integers(1, 16))]
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 64))]
            case "cut":
                del data[at:]
    return bytes(data)


@st.composite
def _changed_fields(draw: st.DrawFn, sample: bytes) -> bytes:
    """The same message with a few values replaced by others, where it is MessagePack."""
    try:
        message = msgspec.msgpack.decode(sample)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return sample
    for _ in range(draw(st.integers(1, 3))):
        holder, key, value = draw(st.sampled_from(list(_leaves(message)) or [([0], 0, 0)]))
        others = st.sampled_from([*_NUMBERS, None, "", "x" * 300, b"", [], {}, True, 0.5])
        same = {int: st.sampled_from(_NUMBERS), list: st.just(value * 2 if isinstance(value, list) else [])}
        holder[key] = draw(st.one_of(same.get(type(value), others), others))
    return msgspec.msgpack.encode(message)


def _leaves(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(holder, key or index, value) of all that a message contains."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(inner):
        yield value, key, item
        yield from _leaves(item)


def until(is_true: Callable[[], Any], what: str) -> None:
    limit = time.monotonic() + DEADLINE
    while not is_true():
        assert time.monotonic() < limit, what
        time.sleep(0.001)


class Target:
    """A port with its owner. Use as a context manager."""

    name: str
    # Valid inputs.
    samples: Sequence[bytes]

    def __enter__(self) -> Self:
        self._before = self._holds()
        self.open()
        # What is allocated once, and stays, is there.
        self.check()
        self._bytes = psutil.Process().memory_info().rss
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        until(lambda: self._holds() <= self._before, f"threads and descriptors: {self._before}, now {self._holds()}")

    def open(self) -> None: ...

    def attack(self, data: bytes) -> None:
        """Send `data`, and wait until it has been dealt with."""
        raise NotImplementedError

    def check(self) -> None:
        """A peer that behaves is served."""
        raise NotImplementedError

    def check_nothing_is_left(self) -> None:
        gc.collect()
        growth = psutil.Process().memory_info().rss - self._bytes
        assert growth <= MAX_GROWTH, f"{growth} bytes more than before"

    def close(self) -> None: ...

    def _holds(self) -> tuple[int, ...]:
        return (threading.active_count(),)


def exchange(address: tuple[str, int], data: bytes, prefix: Callable[[socket.socket], object] | None = None) -> None:
    """Send `data` behind a valid prefix, and nothing more; returns when the other end has ended the connection."""
    began = time.monotonic()
    with socket.create_connection(address, timeout=DEADLINE) as sock, contextlib.suppress(OSError):
        if prefix is not None:
            prefix(sock)
        sock.settimeout(DEADLINE)
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
    assert time.monotonic() - began < DEADLINE, "the connection was not ended"


class DataPort(Target):
    """The handshake of a data connection."""

    name = "data"
    _hello = struct.pack("<4sH16sH", DATA_PROTOCOL.magic, DATA_PROTOCOL.version, bytes(16), 7) + b"session"
    samples = (_hello, _hello + bytes(32), _hello[:10])

    def open(self) -> None:
        self.receiver = End("tcp", [4096], token=TOKEN)
        self.sender = End("tcp", [4096], token=TOKEN)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.receiver.transport._listener.endpoint.split(":")
        return host, int(port)

    def attack(self, data: bytes) -> None:
        exchange(self.address, data)

    def check(self) -> None:
        session = self.receiver.transport.open_session()
        ticket = self.sender.transport.write(session, copy_table([(0, 0, 0, 0, 4096)]))
        status = self.sender.outcome(ticket)
        assert status.state is WriteState.DONE, status
        self.receiver.transport.drain(session.session_id)
        self.sender.transport.drain(session.session_id)

    def check_nothing_is_left(self) -> None:
        super().check_nothing_is_left()
        listener = self.receiver.transport._listener
        until(lambda: not listener.pending and not listener.connections, "a connection is left")

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


class DataFrames(DataPort):
    """Writes over a data connection that has authenticated."""

    name = "tcp"
    _write = write_frame(7, copy_table([(0, 0, 0, 0, 16), (0, 0, 0, 100, 4)])) + bytes(range(20))
    samples = (_write, _write * 3, write_frame(1, copy_table([])))

    def attack(self, data: bytes) -> None:
        session = self.receiver.transport.open_session()
        exchange(self.address, data, lambda sock: initiate(sock, session.session_id, TOKEN, Deadline(DEADLINE)))
        self.receiver.transport.drain(session.session_id)
        assert self.receiver.transport.is_fenced(session.session_id)


class ControlPort(Target):
    """Messages to a prefill worker's manager, of a peer with the token: with the header of a frame and without."""

    name = "control-prefill"
    _from, _to = "decode", "prefill"
    _header = struct.pack("<4sH", MAGIC, PROTOCOL_VERSION)

    def __init__(self) -> None:
        self.samples = tuple(self._envelopes())

    def _envelopes(self) -> list[bytes]:
        """Of a session from its beginning to its end."""
        world = KVWorld()
        frames: list[bytes] = []
        deliver = world.wires.deliver

        def recording(pair: tuple[str, str], *, drop: bool = False) -> None:
            if pair == (self._from, self._to):
                frames.append(world.wires.under_way[pair][0])
            deliver(pair, drop=drop)

        world.wires.deliver = recording  # type: ignore[method-assign]
        sender, receiver = world.paired()
        world.set_row(1)
        sender.send([1, 2, 3], is_last=True, metadata_index=0)
        world.land()
        world.tick()
        assert receiver.poll() is KVPoll.SUCCESS
        world.paired(2)[1].abort("no longer wanted")
        world.pass_time(10)
        return [frame[len(self._header) :] for frame in frames]

    def attack(self, data: bytes) -> None:
        world = KVWorld()
        world.paired()
        world.wires.inboxes[self._to].extend([data, self._header + data])
        world.tick()
        self._serves(world)

    def check(self) -> None:
        self._serves(KVWorld())

    @staticmethod
    def _serves(world: KVWorld) -> None:
        # A peer that breaks its session shakes hands again.
        world.pass_time(60)
        world.paired(99, target=(8, 9))


class ControlPortOfDecode(ControlPort):
    """Messages to a decode worker's manager."""

    name = "control-decode"
    _from, _to = "prefill", "decode"


class Bootstrap(Target):
    """HTTP requests to the bootstrap server."""

    name = "bootstrap"
    samples = (
        b"GET /route?version=1&dp_rank=0 HTTP/1.1\r\nHost: x\r\n\r\n",
        b'PUT /route HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nAuthorization: Splitserve nonce="'
        + b"0" * 32
        + b'", proof="'
        + b"0" * 64
        + b'"\r\n\r\n{}',
        b"GET /health HTTP/1.0\r\n\r\nGET /health HTTP/1.1\r\n\r\n",
        b'{"version": 5, "epoch": 1, "args": {"layout": {"components": []}}}',
    )

    def open(self) -> None:
        self.server = KVBootstrapServer("127.0.0.1", 0, TOKEN)
        self.server.run()
        # Loading certificates for every request would take most of the time.
        self.client = httpx.Client(auth=ClusterAuth(TOKEN), trust_env=False, verify=False, timeout=DEADLINE)
        self.url = f"http://127.0.0.1:{self.server.port}/route"

    def attack(self, data: bytes) -> None:
        exchange(("127.0.0.1", self.server.port), data)
        # As a registration of a peer that holds the token.
        response = self.client.put(self.url, content=data)
        assert response.status_code == 400, response.text

    def check(self) -> None:
        response = self.client.get(self.url, params={"version": PROTOCOL_VERSION, "dp_rank": 0})
        # Nothing has registered.
        assert response.status_code == 503

    def close(self) -> None:
        self.client.close()
        self.server.close()


class NodePort(Target):
    """The handshake of a node with node 0, and frames behind it."""

    name = "node"
    _hello = struct.pack("<4sH16sH", NODE_PROTOCOL.magic, NODE_PROTOCOL.version, bytes(16), 0)
    _messages = (NodeHello(1, {"version": "1"}, {"0.0": ("a", "b")}), NodeServes("http://10.0.0.1:30000"))
    samples = (_hello, _hello + bytes(32), *(msgspec.msgpack.encode(message) for message in _messages))

    def attack(self, data: bytes) -> None:
        asyncio.run(self._attack(data))

    def check(self) -> None:
        asyncio.run(self._check())

    @staticmethod
    def _seals(own: bytes, other: bytes) -> FrameSeals:
        return FrameSeals(b"key", own, other)

    async def _attack(self, data: bytes) -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        with contextlib.suppress(NodeLostError):
            await NodeConnection.answer(reader, _Writer(), TOKEN)  # type: ignore[arg-type]
            raise AssertionError("a node without the token was admitted")
        sealed = node_wire._FRAME.pack(len(data), self._seals(b"node", b"node 0").seal(data)) + data
        for frames in (data, sealed):
            await self._receive(frames)

    async def _receive(self, frames: bytes) -> list[object]:
        reader = asyncio.StreamReader()
        reader.feed_data(frames)
        reader.feed_eof()
        connection = NodeConnection(reader, _Writer(), self._seals(b"node 0", b"node"))  # type: ignore[arg-type]
        received: list[object] = []
        try:
            async with asyncio.timeout(DEADLINE):
                while True:
                    received.append(await connection.receive())
        except NodeLostError:
            return received
        finally:
            await connection.close()

    async def _check(self) -> None:
        data = msgspec.msgpack.encode(self._messages[0])
        sealed = node_wire._FRAME.pack(len(data), self._seals(b"node", b"node 0").seal(data)) + data
        assert await self._receive(sealed) == [self._messages[0]]


class _Writer:
    """A StreamWriter that sends nothing."""

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...

    def is_closing(self) -> bool:
        return False

    async def wait_closed(self) -> None: ...

    def get_extra_info(self, name: str, default: object) -> object:
        return default


class Replay(Target):
    """Requests to the replay port of a KV event publisher."""

    name = "replay"
    samples = (bytes(8), END_OF_REPLAY, b"", (3).to_bytes(8, "big"))

    def open(self) -> None:
        # Time between two checks of the publisher for requests without events. 100 ms would take most of the time.
        self._shorter = mock.patch.object(publisher, "_POLL_SECONDS", 0.001)
        self._shorter.start()
        self.publisher = ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
        self.publisher.publish([BlockStored([1], None, [1, 2], 2)])
        self.context = zmq.Context()

    def attack(self, data: bytes) -> None:
        host, port = self.publisher.replay_endpoint.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE) as sock:
            sock.sendall(data)
        with self.context.socket(zmq.DEALER) as client:
            client.setsockopt(zmq.LINGER, 0)
            client.connect(self.publisher.replay_endpoint)
            client.send_multipart([data, data[:8]])
            client.send_multipart([data])
            self._replay(client)

    def check(self) -> None:
        with self.context.socket(zmq.DEALER) as client:
            client.setsockopt(zmq.LINGER, 0)
            client.connect(self.publisher.replay_endpoint)
            self._replay(client)

    def _replay(self, client: zmq.Socket[bytes]) -> None:
        """The answer to a request for all; before it may come others."""
        client.send(bytes(8))
        number = None
        while True:
            assert client.poll(DEADLINE * 1000), "no replay"
            frames = client.recv_multipart()
            if frames[-2] == END_OF_REPLAY and number == bytes(8):
                return
            number = frames[-2] if frames[-2] != END_OF_REPLAY else None

    def close(self) -> None:
        self.publisher.shutdown()
        self.context.destroy(linger=0)
        self._shorter.stop()


TARGETS: dict[str, Callable[[], Target]] = {
    target.name: target
    for target in (DataPort, DataFrames, ControlPort, ControlPortOfDecode, Bootstrap, NodePort, Replay)
}
