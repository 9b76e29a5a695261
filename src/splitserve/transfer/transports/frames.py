"""Handshake of a data connection, the same for every backend, and frames that stream backends exchange after it.

The ends authenticate each other (`authentication.py`); the name of the connection is the session's id. Then:

  session info    length of a refusal, length of the data for the sender | both             receiver -> sender

What follows is the backend's own protocol, for some with these frames. All integers are little-endian.

  write   magic, number of ranges, ticket id, total bytes | ranges                sender -> receiver
  reply   ticket id, length of the refusal | refusal                              receiver -> sender

A range is (region u32, offset u64, length u64) of the receiver's memory (`RANGE`). The bytes of a write follow as
the backend sends them. An empty refusal means acceptance; the backend defines of what.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

import numpy as np

from splitserve.process.authentication import CHALLENGE_BYTES, AuthenticationError, InitiatorHandshake, StreamProtocol
from splitserve.transfer.copies import COPY, Copies, num_bytes
from splitserve.transfer.transports import sockets
from splitserve.transfer.transports.base import WriteRefused
from splitserve.transfer.transports.sockets import Deadline

DATA_PROTOCOL = StreamProtocol("data", b"SSKV", 5)
MAX_SESSION_INFO_BYTES = 16 << 20

_LENGTHS = struct.Struct("<II")


class ProtocolError(Exception):
    """Violation of the protocol by the peer, another protocol, or a rejection by the peer."""


def initiate(sock: socket.socket, session_id: str, token: bytes, deadline: Deadline) -> bytes:
    """Authenticate as the sender of a session and return the receiver's session info.

    Raises OSError, ProtocolError. Shutting the socket ends the handshake.
    """
    handshake = InitiatorHandshake(DATA_PROTOCOL, token, session_id.encode())
    sockets.send_all(sock, handshake.hello, deadline)
    try:
        answer = handshake.answer(sockets.receive_exactly(sock, CHALLENGE_BYTES, deadline))
    except AuthenticationError as error:
        raise ProtocolError(str(error)) from None
    sockets.send_all(sock, answer, deadline)
    refusal_bytes, info_bytes = _LENGTHS.unpack(sockets.receive_exactly(sock, _LENGTHS.size, deadline))
    if max(refusal_bytes, info_bytes) > MAX_SESSION_INFO_BYTES:
        raise ProtocolError("malformed session info")
    refusal = sockets.receive_exactly(sock, refusal_bytes, deadline).decode(errors="replace")
    if refusal:
        raise ProtocolError(refusal)
    return sockets.receive_exactly(sock, info_bytes, deadline)


def session_info_frame(session_info: bytes = b"", refusal: str = "") -> bytes:
    """Return the last frame of the receiver."""
    text = refusal.encode()
    return _LENGTHS.pack(len(text), len(session_info)) + text + session_info


# Maximum number of target ranges of one write: 20 MiB of table.
MAX_RANGES = 1 << 20

RANGE = np.dtype([("region", "<u4"), ("offset", "<u8"), ("length", "<u8")])


def encode_targets(copies: Copies) -> bytes:
    ranges = np.empty(len(copies), dtype=RANGE)
    ranges["region"], ranges["offset"], ranges["length"] = (copies[f] for f in ("dst_region", "dst_offset", "length"))
    return ranges.tobytes()


def decode_targets(table: bytes) -> Copies:
    """Return copies without sources. They are not checked yet."""
    ranges = np.frombuffer(table, dtype=RANGE)
    copies = np.zeros(len(ranges), dtype=COPY)
    copies["dst_region"], copies["dst_offset"], copies["length"] = (ranges[f] for f in ("region", "offset", "length"))
    return copies


MAGIC = b"WRIT"
MAX_TEXT_BYTES = 4096

# Minimum timeout in seconds, because zero would mean no timeout.
_LEAST_TIMEOUT = 0.001

_WRITE = struct.Struct("<4sIQQ")
_REPLY = struct.Struct("<QH")


@dataclass(frozen=True, slots=True)
class WriteFrame:
    ticket_id: int
    # Only the targets are set.
    targets: Copies
    # Number of bytes that follow, as announced by the sender.
    length: int


def write_frame(ticket_id: int, copies: Copies) -> bytes:
    """Return header and table of ranges, in one piece. Raises WriteRefused for more ranges than fit."""
    if len(copies) > MAX_RANGES:
        raise WriteRefused(f"{len(copies)} copies in one write: at most {MAX_RANGES}")
    header = _WRITE.pack(MAGIC, len(copies), ticket_id, num_bytes(copies))
    return header + encode_targets(copies)


def receive_write_frame(sock: socket.socket) -> WriteFrame | None:
    """Receive the frame of a write. None if the connection has ended. Raises OSError, ProtocolError."""
    try:
        header = sockets.receive_exactly(sock, _WRITE.size)
    except ConnectionError:
        return None
    magic, num_ranges, ticket_id, length = _WRITE.unpack(header)
    if magic != MAGIC or num_ranges > MAX_RANGES:
        raise ProtocolError("not a write")
    return WriteFrame(ticket_id, decode_targets(sockets.receive_exactly(sock, num_ranges * RANGE.itemsize)), length)


def send_reply(sock: socket.socket, ticket_id: int, refusal: str = "") -> None:
    text = refusal.encode()[:MAX_TEXT_BYTES]
    sock.sendall(_REPLY.pack(ticket_id, len(text)) + text)


def receive_reply(sock: socket.socket, ticket_id: int, deadline: Deadline) -> None:
    """Receive the reply to a write. Raises WriteRefused with the receiver's refusal; OSError, ProtocolError."""
    # Read at least once: a reply that has already arrived is not late.
    sockets.set_receive_timeout(sock, max(deadline.left, _LEAST_TIMEOUT))
    replied, length = _REPLY.unpack(sockets.receive_exactly(sock, _REPLY.size))
    if replied != ticket_id or length > MAX_TEXT_BYTES:
        raise ProtocolError(f"reply to write {replied} instead of {ticket_id}")
    if refusal := sockets.receive_exactly(sock, length).decode(errors="replace"):
        raise WriteRefused(refusal)
