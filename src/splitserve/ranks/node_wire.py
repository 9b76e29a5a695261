"""Connection between node 0 of a worker and each other node: handshake and messages.

The node authenticates as the initiator (`authentication.py`). Then both ends send frames: length, seal | message
(msgpack). Without the token, frames cannot be forged, dropped, repeated or reordered. Nothing is encrypted, because no
message is secret.

Each end sends a heartbeat every few seconds. Silence, like the end of the connection, means that the other end is gone.
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from typing import Self

import msgspec

from splitserve.core.errors import SplitserveError
from splitserve.process.authentication import (
    CHALLENGE_BYTES,
    PROOF_BYTES,
    TOKENS_DIFFER,
    AuthenticationError,
    FrameSeals,
    InitiatorHandshake,
    ResponderHandshake,
    StreamProtocol,
)
from splitserve.transfer.pending import HANDSHAKE_SECONDS

NODE_PROTOCOL = StreamProtocol("node", b"SSNW", 2)
# Seconds between two heartbeats, and seconds of silence after which the other end is lost.
HEARTBEAT_INTERVAL = 2.0
SILENCE_TIMEOUT = 15.0
# Seconds that a node waits for node 0's answer to its hello. Node 0 itself waits for `HANDSHAKE_SECONDS`.
GREETING_TIMEOUT = 10.0
MAX_FRAME_BYTES = 1 << 20

_FRAME = struct.Struct(f"<I{PROOF_BYTES}s")


class NodeHello(msgspec.Struct, frozen=True, tag=True):
    """First message of a node."""

    node_rank: int
    # Settings that must be the same on all nodes, by name.
    settings: dict[str, str]
    # Two endpoints of each rank, one for orders and one for frames about rooms, by data parallel rank and index.
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
    # Exit code of the failure.
    exit_code: int = 1

    def error(self) -> NodeLostError:
        """Return the error of a node that receives this after a failure."""
        return NodeLostError(f"node 0 reports: {self.reason}", exit_code=self.exit_code)


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """Last error of a rank of that node, which ends, and its exit code."""

    message: str
    exit_code: int = 1


class NodeEnding(msgspec.Struct, frozen=True, tag=True):
    """Notice of what has ended on that node, and how. The worker must end."""

    what: str


class NodeLeaving(msgspec.Struct, frozen=True, tag=True):
    """Notice that the node got a shutdown signal. The worker must drain."""


class _Alive(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat."""


Message = NodeHello | NodeStart | NodeServes | NodeEnd | RankFailed | NodeEnding | NodeLeaving | _Alive
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class NodeLostError(SplitserveError):
    """Error for a connection to another node that ended or cannot be trusted."""


def pipe_name(dp_rank: int, index: int) -> str:
    """Return the name of a rank in messages."""
    return f"{dp_rank}.{index}"


class NodeConnection:
    """Open connection to a peer that holds the token. `close` it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seals: FrameSeals) -> None:
        self._reader = reader
        self._writer = writer
        self._seals = seals
        self._alive = asyncio.create_task(self._send_heartbeats(), name="node-alive")

    @classmethod
    async def call(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes) -> Self:
        """Do the handshake as a node. Raises NodeLostError."""
        handshake = InitiatorHandshake(NODE_PROTOCOL, token)
        try:
            async with asyncio.timeout(GREETING_TIMEOUT):
                writer.write(handshake.hello)
                writer.write(handshake.answer(await reader.readexactly(CHALLENGE_BYTES)))
        except AuthenticationError as error:
            raise NodeLostError(str(error)) from None
        except (OSError, EOFError, TimeoutError) as error:
            raise NodeLostError(f"it did not answer the handshake ({error or 'timeout'})") from error
        return cls(reader, writer, handshake.seals())

    @classmethod
    async def answer(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes) -> Self:
        """Do the handshake as node 0. Raises NodeLostError."""
        handshake = ResponderHandshake(NODE_PROTOCOL, token)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                while not handshake.is_over:
                    writer.write(handshake.feed(await reader.readexactly(handshake.wanted)))
        except asyncio.IncompleteReadError as error:
            # A peer that finds our proof wrong closes the connection.
            raise NodeLostError(f"it closed the connection during the handshake; perhaps {TOKENS_DIFFER}") from error
        except (OSError, TimeoutError) as error:
            raise NodeLostError(f"it did not authenticate ({error or 'timeout'})") from error
        if handshake.problem is not None:
            raise NodeLostError(handshake.problem)
        return cls(reader, writer, handshake.seals())

    @property
    def peer(self) -> str:
        """Return the peer's address."""
        return str(self._writer.get_extra_info("peername", ("?",))[0])

    def send(self, message: Message) -> None:
        """Send a message without waiting. If it cannot be delivered, `receive` reports the end of the connection."""
        if not self._writer.is_closing():
            payload = msgspec.msgpack.encode(message)
            self._writer.write(_FRAME.pack(len(payload), self._seals.seal(payload)) + payload)

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

    async def _receive(self) -> Message:
        try:
            async with asyncio.timeout(SILENCE_TIMEOUT):
                size, seal = _FRAME.unpack(await self._reader.readexactly(_FRAME.size))
                if size > MAX_FRAME_BYTES:
                    raise NodeLostError(f"a message of {size} bytes, at most {MAX_FRAME_BYTES} are allowed")
                payload = await self._reader.readexactly(size)
        except TimeoutError:
            raise NodeLostError(f"it was silent for {SILENCE_TIMEOUT:g} s") from None
        except (OSError, EOFError) as error:
            raise NodeLostError("its connection ended") from error
        if not self._seals.is_valid(seal, payload):
            raise NodeLostError("a message has no valid seal")
        try:
            return _DECODER.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise NodeLostError(f"undecodable message ({error}): run one release of Splitserve on all nodes") from error

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL)
            self.send(_Alive())
