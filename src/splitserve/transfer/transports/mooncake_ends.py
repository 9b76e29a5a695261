"""The two ends of a mooncake connection and their messages. `mooncake.py` describes the life of a write.

write   magic, number of ranges, ticket id, total bytes, inline? | ranges | bytes, if inline     sender -> receiver
ready   ticket id, number of the chunk                                                           sender -> receiver
reply   ticket id, chunks in place so far, length of the refusal | refusal                       receiver -> sender
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from splitserve.core.errors import SplitserveError
from splitserve.core.layout import Region
from splitserve.transfer.copies import Copies, coalesce, num_bytes
from splitserve.transfer.transports import sockets
from splitserve.transfer.transports.backend import Incoming, Memory, SendingEnd
from splitserve.transfer.transports.base import WriteRefused
from splitserve.transfer.transports.frames import (
    MAX_RANGES,
    MAX_TEXT_BYTES,
    RANGE,
    ProtocolError,
    WriteFrame,
    decode_targets,
    encode_targets,
)
from splitserve.transfer.transports.mooncake_engine import (
    MooncakeError,
    MooncakeTransferEngine,
    Transfer,
    give_back,
    library_version,
)
from splitserve.transfer.transports.sockets import Deadline
from splitserve.transfer.transports.staging import AuxDataCodec, Pieces, StagingBuffer, StagingChoice

MAGIC = b"MOON"
# Writes up to this size are sent inline: one round trip of the socket instead of two and one of the engine, in a third
# of the time.
INLINE_BYTES = 256 << 10
INLINE_PIECES = 128

_WRITE = struct.Struct("<4sIQQ?")
_READY = struct.Struct("<QI")
_REPLY = struct.Struct("<QIH")


class MooncakeSessionInfo(msgspec.Struct, frozen=True):
    """Data for a sender."""

    # Version of the library, and its protocol. Both must be the same at both ends.
    version: str
    protocol: str
    # The receiver's engine (see `MooncakeTransferEngine`), and the staging buffer of this connection.
    session_id: str
    incarnation: str
    address: int
    num_slots: int
    slot_bytes: int
    # Address and length of the receiver's regions, if the sender writes there directly. Empty: it writes to the slots.
    regions: list[tuple[int, int]] = []


def session_info(engine: MooncakeTransferEngine, staging: StagingBuffer, regions: Sequence[Region] = ()) -> bytes:
    """Return the encoded data for a sender. `regions`: those that it writes directly."""
    return msgspec.msgpack.encode(
        MooncakeSessionInfo(
            library_version(),
            engine.protocol,
            engine.get_session_id(),
            engine.incarnation,
            staging.address,
            staging.num_slots,
            staging.slot_bytes,
            [(region.address, region.length) for region in regions],
        )
    )


def is_inline(copies: Copies) -> bool:
    return num_bytes(copies) <= INLINE_BYTES and len(copies) <= INLINE_PIECES


def write_frame(ticket_id: int, copies: Copies) -> bytes:
    """Return the frame of a write. The bytes follow if the write is inline."""
    head = _WRITE.pack(MAGIC, len(copies), ticket_id, num_bytes(copies), is_inline(copies))
    return head + encode_targets(copies)


def receive_write(sock: socket.socket) -> tuple[WriteFrame, bytes | None] | None:
    """Receive a write, with the bytes if it is inline. None if the connection has ended.

    Raises OSError, ProtocolError.
    """
    try:
        header = sockets.receive_exactly(sock, _WRITE.size)
    except ConnectionError:
        return None
    magic, num_ranges, ticket_id, length, inline = _WRITE.unpack(header)
    if magic != MAGIC or num_ranges > MAX_RANGES or (inline and length > INLINE_BYTES):
        raise ProtocolError("not a write")
    targets = decode_targets(sockets.receive_exactly(sock, num_ranges * RANGE.itemsize))
    return WriteFrame(ticket_id, targets, length), sockets.receive_exactly(sock, length) if inline else None


def send_reply(sock: socket.socket, ticket_id: int, taken: int, refusal: str = "") -> None:
    text = refusal.encode()[:MAX_TEXT_BYTES]
    sock.sendall(_REPLY.pack(ticket_id, taken, len(text)) + text)


def receive_reply(sock: socket.socket, ticket_id: int, deadline: Deadline) -> int:
    """Return the number of chunks in place. Raises WriteRefused, OSError, ProtocolError."""
    sockets.set_receive_timeout(sock, deadline.remaining())
    replied, taken, length = _REPLY.unpack(sockets.receive_exactly(sock, _REPLY.size))
    if replied != ticket_id or length > MAX_TEXT_BYTES:
        raise ProtocolError(f"reply to write {replied} instead of {ticket_id}")
    if length:
        raise WriteRefused(sockets.receive_exactly(sock, length).decode(errors="replace"))
    return int(taken)


# Seconds between two polls of a transfer: a slot takes some 2 ms.
POLL_SECONDS = 0.0002


class MooncakeOutgoing(SendingEnd):
    """Sending end. It owns its engine and its staging buffer until it is closed and no transfer reads the buffer.

    `write` polls the socket, so a shut one interrupts it.
    """

    def __init__(
        self,
        sock: socket.socket,
        memory: Memory,
        aux: AuxDataCodec,
        engine: MooncakeTransferEngine,
        peer: MooncakeSessionInfo,
        staging: StagingBuffer,
    ) -> None:
        super().__init__(sock)
        self._memory = memory
        self._aux = aux
        self._engine = engine
        self._peer = peer
        self._staging = staging
        # Addresses of the ranges that are registered with the engine.
        self._registered: list[int] = []
        self._under_way: deque[Transfer] = deque()
        # The thread of a probe that exceeded its deadline. It keeps the engine in use.
        self._probe: threading.Thread | None = None

    def open(self, deadline: Deadline) -> None:
        """Register the staging buffer if needed, and prove the engine's path by a transfer of eight bytes.

        The library's first contact has no timeout, so it runs in a thread of its own. Raises TimeoutError,
        MooncakeError, ConnectionError.
        """
        # Over tcp the library reads any memory without registration.
        if self._engine.protocol == "rdma":
            for address, length in self._registered_memory():
                self._engine.register(address, length)
                self._registered.append(address)
        failures: list[MooncakeError] = []

        def contact() -> None:
            try:
                self._engine.transfer_sync(self._peer.session_id, self._staging.address, self._peer.address, 8)
            except MooncakeError as error:
                failures.append(error)

        self._probe = threading.Thread(target=contact, name="mooncake-probe", daemon=True)
        self._probe.start()
        while self._probe.is_alive():
            self._probe.join(min(0.05, deadline.remaining()))
            if not self.is_alive():
                raise ConnectionError(f"connection ended before mooncake's engine at {self._peer.session_id} answered")
        if failures:
            raise failures[0]

    def write(self, ticket_id: int, copies: Copies, deadline: Deadline) -> None:
        copies = coalesce(copies)
        if len(copies) > MAX_RANGES:
            raise WriteRefused(f"{len(copies)} copies in one write: at most {MAX_RANGES}")
        if not is_inline(copies):
            self._write_large(ticket_id, copies, deadline)
            return
        data = self._aux.serialize_data_from_buffer(self._memory.sources(copies), copies["length"])
        sockets.send_all(self._socket, write_frame(ticket_id, copies) + data, deadline)
        receive_reply(self._socket, ticket_id, deadline)

    def close(self) -> None:
        """Release the engine. The staging buffer, a copy of our pages, is released after the last transfer from it."""
        if self._probe is not None and self._probe.is_alive():
            threading.Thread(target=self._let_go, args=(self._probe,), name="mooncake-probe", daemon=True).start()
        else:
            self._let_go()

    def _let_go(self, probe: threading.Thread | None = None) -> None:
        if probe is not None:
            probe.join()
        give_back(self._engine, self._under_way, self._release)

    def _registered_memory(self) -> list[tuple[int, int]]:
        """Return address and length of the ranges that the library reads."""
        return [(self._staging.address, self._staging.num_bytes)]

    def _release(self) -> None:
        """Release the staging buffer after the last transfer from it."""
        for address in self._registered:
            try:
                self._engine.deregister(address)
            except MooncakeError:
                # The library may still read the buffer.
                self._engine.kept.append(self._staging)
                raise
        self._staging.discard()

    def _write_large(self, ticket_id: int, copies: Copies, deadline: Deadline) -> None:
        """Write what is too much for one frame, through the staging buffers."""
        sockets.send_all(self._socket, write_frame(ticket_id, copies), deadline)
        pieces = Pieces(self._memory.sources(copies), copies["length"])
        self._write_staged(ticket_id, pieces, num_bytes(copies), deadline)

    def _write_staged(self, ticket_id: int, pieces: Pieces, length: int, deadline: Deadline) -> None:
        num_chunks = -(-length // self._peer.slot_bytes)
        gathered = ready = 0
        # Number of chunks in place. None: the receiver has not accepted the write yet.
        taken: int | None = None
        while taken != num_chunks:
            deadline.remaining()
            while gathered < num_chunks and gathered - (taken or 0) < self._peer.num_slots:
                self._send_chunk(gathered, pieces, length)
                gathered += 1
            # Announce chunks only after acceptance: a receiver that refuses the write would read the message as its
            # next write.
            while taken is not None and self._has_arrived():
                sockets.send_all(self._socket, _READY.pack(ticket_id, ready), deadline)
                ready += 1
            if not self._under_way or sockets.has_data(self._socket):
                taken = receive_reply(self._socket, ticket_id, deadline)
            else:
                time.sleep(POLL_SECONDS)

    def _send_chunk(self, chunk: int, pieces: Pieces, length: int) -> None:
        first = chunk * self._peer.slot_bytes
        end = min(first + self._peer.slot_bytes, length)
        slot = chunk % self._peer.num_slots
        self._staging.gather(slot, pieces.between(first, end))
        target = self._peer.address + slot * self._peer.slot_bytes
        self._under_way.append(
            self._engine.submit(self._peer.session_id, self._staging.slot_address(slot), target, end - first)
        )

    def _has_arrived(self) -> bool:
        """Return whether the oldest transfer has succeeded. Raises MooncakeError if it failed."""
        if not self._under_way:
            return False
        oldest = self._under_way.popleft()
        # The library forgets a failed transfer, so it must not be polled again.
        if self._engine.is_done(oldest):
            return True
        self._under_way.appendleft(oldest)
        return False


logger = logging.getLogger(__name__)

# One slot is being gathered, one is in flight, one is being scattered.
NUM_SLOTS = 3
SLOT_BYTES = 4 << 20


class MooncakeIncoming(Incoming):
    """Receiving end. `engine_at`: returns the engine for buffers on a GPU, or with -1 in the host's memory."""

    def __init__(
        self, memory: Memory, stagings: StagingChoice, engine_at: Callable[[int], MooncakeTransferEngine]
    ) -> None:
        self._memory = memory
        self._stagings = stagings
        self._engine_at = engine_at
        # Buffer of the current connection, and the engine that registered it.
        self._staging: StagingBuffer | None = None
        self._engine: MooncakeTransferEngine | None = None

    def session_info(self) -> bytes:
        # Each connection gets a new buffer: transfers in flight of an earlier one must not write to its slots.
        self.revoke()
        try:
            staging = self._stagings.to_receive(NUM_SLOTS, SLOT_BYTES)
            engine = self._engine_for(staging)
        except (MooncakeError, OSError, RuntimeError, SplitserveError) as error:
            # The last two are errors of a GPU, or of torch about it.
            raise ProtocolError(f"no staging buffer: {error}") from error
        self._staging, self._engine = staging, engine
        return session_info(engine, staging)

    def serve(self, sock: socket.socket) -> None:
        staging = self._staging
        try:
            while staging is not None and (write := receive_write(sock)) is not None:
                self._take(sock, staging, *write)
        except (RuntimeError, SplitserveError) as error:
            raise ProtocolError(f"the GPU failed: {error}") from error

    def revoke(self) -> None:
        """Deregister and discard the staging buffer. The engine keeps its addresses for transfers in flight.

        The only writer of pages is our own thread.
        """
        staging, engine = self._staging, self._engine
        self._staging = self._engine = None
        if staging is not None and engine is not None:
            engine.kept.append(staging)
            try:
                engine.deregister(staging.address)
                staging.discard()
            except (MooncakeError, OSError, RuntimeError):
                # The session has ended in any case. The memory stays, because the library may still write there.
                logger.exception("the staging buffer of an ended connection was not given back")

    def _engine_for(self, staging: StagingBuffer) -> MooncakeTransferEngine:
        """Return the engine for this buffer, with the buffer registered. Raises MooncakeError, ConfigError."""
        try:
            engine = self._engine_at(staging.gpu_id)
            engine.register(staging.address, staging.num_bytes)
        except BaseException:
            staging.discard()
            raise
        return engine

    def _take(self, sock: socket.socket, staging: StagingBuffer, frame: WriteFrame, data: bytes | None) -> None:
        """Receive one write into place. `data`: its bytes, or None if it is staged."""
        if data is not None:
            self._take_inline(sock, frame, data)
        elif refusal := self._memory.refusal(frame.targets, frame.length):
            # The sender ends the connection.
            send_reply(sock, frame.ticket_id, 0, refusal)
        else:
            pieces = Pieces(self._memory.targets(frame.targets), frame.targets["length"])
            _receive_staged(sock, frame.ticket_id, staging, pieces, frame.length)

    def _take_inline(self, sock: socket.socket, frame: WriteFrame, data: bytes) -> None:
        if refusal := self._memory.refusal(frame.targets, frame.length):
            send_reply(sock, frame.ticket_id, 0, refusal)
            return
        self._stagings.aux.deserialize_data_to_buffer(
            data, self._memory.targets(frame.targets), frame.targets["length"]
        )
        send_reply(sock, frame.ticket_id, 1)


def _receive_staged(sock: socket.socket, ticket_id: int, staging: StagingBuffer, pieces: Pieces, length: int) -> None:
    send_reply(sock, ticket_id, 0)
    for chunk in range(-(-length // staging.slot_bytes)):
        announced = _READY.unpack(sockets.receive_exactly(sock, _READY.size))
        if announced != (ticket_id, chunk):
            raise ProtocolError(f"chunk {announced} instead of {(ticket_id, chunk)}")
        first = chunk * staging.slot_bytes
        staging.scatter(chunk % staging.num_slots, pieces.between(first, min(first + staging.slot_bytes, length)))
        send_reply(sock, ticket_id, chunk + 1)
