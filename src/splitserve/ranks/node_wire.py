"""Connection between node 0 of a worker and each other node: handshake and messages.

  hello      magic, version, nonce            node -> node 0
  challenge  magic, version, nonce, proof     node 0 -> node
  answer     proof                            node -> node 0
  then frames, both ways: length, seal | message (msgpack)

A proof is an HMAC-SHA256 under the cluster token over both nonces and the end that sends it. A seal is an HMAC under a
key of this connection over the sending end and the frame's number. Without the token, frames cannot be forged, dropped,
repeated or reordered. Nothing is encrypted, because no message is secret.

Each end sends a heartbeat every few seconds. Silence, like the end of the connection, means that the other end is gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import struct
from contextlib import suppress
from typing import Self

import msgspec

from splitserve.core.errors import SplitserveError
from splitserve.transfer.challenge import TOKENS_DIFFER
from splitserve.transfer.pending import HANDSHAKE_SECONDS

MAGIC = b"SSNW"
VERSION = 1
# Seconds between two heartbeats, and seconds of silence after which the other end is lost.
HEARTBEAT_INTERVAL = 2.0
SILENCE_TIMEOUT = 15.0
# Seconds that a node waits for node 0's answer to its hello. Node 0 itself waits for `HANDSHAKE_SECONDS`.
GREETING_TIMEOUT = 10.0
MAX_FRAME_BYTES = 1 << 20

_NONCE_BYTES, _MAC_BYTES = 16, 32
_GREETING = struct.Struct(f"<4sH{_NONCE_BYTES}s")
_FRAME = struct.Struct(f"<I{_MAC_BYTES}s")
_HEAD, _NODE = b"node 0", b"node"


class NodeHello(msgspec.Struct, frozen=True, tag=True):
    """First message of a node."""

    node_rank: int
    # Settings that must be the same on all nodes, by name.
    settings: dict[str, str]
    # Endpoints at which its ranks receive orders, and frames about rooms, by data parallel rank and index.
    pipes: dict[str, tuple[str, str]]


class NodeStart(msgspec.Struct, frozen=True, tag=True):
    """Order to start the ranks of a node: all nodes have joined."""

    # Random number of this start of the worker.
    instance: int
    bootstrap_url: str | None
    # torch.distributed init methods, by data parallel rank.
    init_methods: list[str]
    # Endpoints at which the drivers receive frames about rooms, by data parallel rank and index.
    from_rank: dict[str, str]


class NodeServes(msgspec.Struct, frozen=True, tag=True):
    """Notice that the worker is ready, at this URL."""

    url: str


class NodeEnd(msgspec.Struct, frozen=True, tag=True):
    """Last message of node 0: order to end all ranks."""

    reason: str
    # True for a planned end, False after a failure.
    in_order: bool = False


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """Last error of a rank of that node, which ends."""

    message: str


class NodeEnding(msgspec.Struct, frozen=True, tag=True):
    """Notice of what has ended on that node, and how. The worker must end."""

    what: str


class NodeLeaving(msgspec.Struct, frozen=True, tag=True):
    """Notice that the node got a shutdown signal. The worker must drain."""


class _Alive(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat."""


Message = NodeHello | NodeStart | NodeServes | NodeEnd | RankFailed | NodeEnding | NodeLeaving
_DECODER: msgspec.msgpack.Decoder[Message | _Alive] = msgspec.msgpack.Decoder(Message | _Alive)


class NodeLostError(SplitserveError):
    """Error for a connection to another node that ended or cannot be trusted."""


def pipe_name(dp_rank: int, index: int) -> str:
    """Return the name of a rank in messages."""
    return f"{dp_rank}.{index}"


class NodeConnection:
    """Open connection to a peer that holds the token. `close` it."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, sides: tuple[bytes, bytes]
    ) -> None:
        """`sides`: this end, the other end."""
        self._reader = reader
        self._writer = writer
        self._key = key
        self._own_side, self._other_side = sides
        self._num_sent = 0
        self._num_received = 0
        self._alive = asyncio.create_task(self._say_alive(), name="node-alive")

    @classmethod
    async def call(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes) -> Self:
        """Do the handshake as a node. Raises NodeLostError."""
        try:
            async with asyncio.timeout(GREETING_TIMEOUT):
                ours = secrets.token_bytes(_NONCE_BYTES)
                writer.write(_GREETING.pack(MAGIC, VERSION, ours))
                theirs = _nonce(await reader.readexactly(_GREETING.size))
                proof = await reader.readexactly(_MAC_BYTES)
                if not hmac.compare_digest(proof, _proof(token, _HEAD, ours, theirs)):
                    raise NodeLostError(TOKENS_DIFFER)
                writer.write(_proof(token, _NODE, ours, theirs))
        except (OSError, EOFError, TimeoutError) as error:
            raise NodeLostError(f"it does not speak to us ({error or 'it is silent'})") from error
        return cls(reader, writer, _proof(token, b"frames", ours, theirs), (_NODE, _HEAD))

    @classmethod
    async def answer(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes) -> Self:
        """Do the handshake as node 0. Raises NodeLostError."""
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                theirs = _nonce(await reader.readexactly(_GREETING.size))
                ours = secrets.token_bytes(_NONCE_BYTES)
                writer.write(_GREETING.pack(MAGIC, VERSION, ours) + _proof(token, _HEAD, theirs, ours))
                if not hmac.compare_digest(await reader.readexactly(_MAC_BYTES), _proof(token, _NODE, theirs, ours)):
                    raise NodeLostError(TOKENS_DIFFER)
        except asyncio.IncompleteReadError as error:
            # A peer that finds our proof wrong closes the connection.
            raise NodeLostError(f"it went before it had shown who it is; perhaps {TOKENS_DIFFER}") from error
        except (OSError, TimeoutError) as error:
            raise NodeLostError(f"it did not show who it is ({error or 'it is silent'})") from error
        return cls(reader, writer, _proof(token, b"frames", theirs, ours), (_HEAD, _NODE))

    @property
    def peer(self) -> str:
        """Return the peer's address."""
        return str(self._writer.get_extra_info("peername", ("?",))[0])

    def send(self, message: Message) -> None:
        """Send a message without waiting. If it cannot be delivered, `receive` reports the end of the connection."""
        self._send(message)

    async def receive(self) -> Message:
        """Return the next message. Raises NodeLostError if the connection has ended."""
        while isinstance(message := await self._receive(), _Alive):
            pass
        return message

    async def close(self) -> None:
        """Close the connection after delivery of sent messages, if that is possible. Idempotent."""
        self._alive.cancel()
        self._writer.close()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(HEARTBEAT_INTERVAL):
                await self._writer.wait_closed()

    def _send(self, message: Message | _Alive) -> None:
        if self._writer.is_closing():
            return
        payload = msgspec.msgpack.encode(message)
        seal = _seal(self._key, self._own_side, self._num_sent, payload)
        self._writer.write(_FRAME.pack(len(payload), seal) + payload)
        self._num_sent += 1

    async def _receive(self) -> Message | _Alive:
        try:
            async with asyncio.timeout(SILENCE_TIMEOUT):
                size, seal = _FRAME.unpack(await self._reader.readexactly(_FRAME.size))
                if size > MAX_FRAME_BYTES:
                    raise NodeLostError(f"a message of {size} bytes: it is no node of ours")
                payload = await self._reader.readexactly(size)
        except TimeoutError:
            raise NodeLostError(f"it was silent for {SILENCE_TIMEOUT:g} s") from None
        except (OSError, EOFError) as error:
            raise NodeLostError("its connection ended") from error
        if not hmac.compare_digest(seal, _seal(self._key, self._other_side, self._num_received, payload)):
            raise NodeLostError("a message was not sealed by it")
        self._num_received += 1
        try:
            return _DECODER.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise NodeLostError(f"it speaks otherwise ({error}): run one release of Splitserve on all nodes") from error

    async def _say_alive(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL)
            self._send(_Alive())


def _nonce(greeting: bytes) -> bytes:
    magic, version, nonce = _GREETING.unpack(greeting)
    if magic != MAGIC:
        raise NodeLostError("it is no node of a Splitserve worker")
    if version != VERSION:
        raise NodeLostError(
            f"it speaks version {version} between nodes, this one {VERSION}: run one release of Splitserve on all"
        )
    return bytes(nonce)


def _proof(token: bytes, what: bytes, of_node: bytes, of_head: bytes) -> bytes:
    return hmac.digest(token, b"splitserve nodes\0" + what + b"\0" + of_node + of_head, hashlib.sha256)


def _seal(key: bytes, side: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, side + b"\0" + number.to_bytes(8, "little") + payload, hashlib.sha256)
