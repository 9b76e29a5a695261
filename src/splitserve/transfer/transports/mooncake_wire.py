"""Messages between the two ends of a mooncake connection. `mooncake.py` describes the life of a write.

write   magic, number of ranges, ticket id, total bytes, inline? | ranges | bytes, if inline     sender -> receiver
ready   ticket id, number of the chunk                                                           sender -> receiver
reply   ticket id, chunks in place so far, length of the refusal | refusal                       receiver -> sender
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

import msgspec

from splitserve.transfer.copies import Copies, num_bytes
from splitserve.transfer.transports import sockets
from splitserve.transfer.transports.base import WriteRefused
from splitserve.transfer.transports.frames import MAX_TEXT_BYTES, WriteFrame
from splitserve.transfer.transports.handshake import ProtocolError
from splitserve.transfer.transports.ranges import MAX_RANGES, RANGE, decode_targets, encode_targets
from splitserve.transfer.transports.sockets import Deadline

MAGIC = b"MOON"
# Writes up to this size are sent inline: one round trip of the socket instead of two and one of the engine, in a third
# of the time.
INLINE_BYTES = 256 << 10
INLINE_PIECES = 128

_WRITE = struct.Struct("<4sIQQ?")
_READY = struct.Struct("<QI")
_REPLY = struct.Struct("<QIH")


class MooncakeWelcome(msgspec.Struct, frozen=True):
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


@dataclass(frozen=True, slots=True)
class AnnouncedWrite:
    frame: WriteFrame
    # Bytes of an inline write. None: staged.
    data: bytes | None


def is_inline(copies: Copies) -> bool:
    return num_bytes(copies) <= INLINE_BYTES and len(copies) <= INLINE_PIECES


def write_frame(ticket_id: int, copies: Copies) -> bytes:
    """Return the frame of a write. The bytes follow if the write is inline."""
    head = _WRITE.pack(MAGIC, len(copies), ticket_id, num_bytes(copies), is_inline(copies))
    return head + encode_targets(copies)


def receive_write(sock: socket.socket) -> AnnouncedWrite | None:
    """Receive a write. None if the connection has ended. Raises OSError, ProtocolError."""
    try:
        header = sockets.receive_exactly(sock, _WRITE.size)
    except ConnectionError:
        return None
    magic, num_ranges, ticket_id, length, inline = _WRITE.unpack(header)
    if magic != MAGIC or num_ranges > MAX_RANGES or (inline and length > INLINE_BYTES):
        raise ProtocolError("not a write")
    targets = decode_targets(sockets.receive_exactly(sock, num_ranges * RANGE.itemsize))
    data = sockets.receive_exactly(sock, length) if inline else None
    return AnnouncedWrite(WriteFrame(ticket_id, targets, length), data)


def send_ready(sock: socket.socket, ticket_id: int, chunk: int) -> None:
    sock.sendall(_READY.pack(ticket_id, chunk))


def receive_ready(sock: socket.socket, ticket_id: int, chunk: int) -> None:
    """Receive the announcement of one chunk. Raises OSError, ProtocolError."""
    announced = _READY.unpack(sockets.receive_exactly(sock, _READY.size))
    if announced != (ticket_id, chunk):
        raise ProtocolError(f"chunk {announced} instead of {(ticket_id, chunk)}")


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
