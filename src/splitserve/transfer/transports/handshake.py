"""Handshake of a data connection, the same for every backend.

The ends authenticate each other (`authentication.py`); the name of the connection is the session's id. Then:

  session info    length of a refusal, length of the data for the sender | both             receiver -> sender

What follows the session info is the backend's own protocol. All integers are little-endian.
"""

from __future__ import annotations

import socket
import struct

from splitserve.process.authentication import CHALLENGE_BYTES, AuthenticationError, InitiatorHandshake, StreamProtocol
from splitserve.transfer.transports.sockets import Deadline, receive_exactly, set_send_timeout

DATA_PROTOCOL = StreamProtocol("data", b"SSKV", 4)
MAX_SESSION_INFO_BYTES = 16 << 20

_LENGTHS = struct.Struct("<II")


class ProtocolError(Exception):
    """Violation of the protocol by the peer, another protocol, or a rejection by the peer."""


def initiate(sock: socket.socket, session_id: str, token: bytes, deadline: Deadline) -> bytes:
    """Authenticate as the sender of a session and return the receiver's session info.

    Raises OSError, ProtocolError. Shutting the socket ends the handshake. The socket's timeouts are not changed.
    """
    set_send_timeout(sock, deadline.remaining())
    handshake = InitiatorHandshake(DATA_PROTOCOL, token, session_id.encode())
    sock.sendall(handshake.hello)
    try:
        answer = handshake.answer(receive_exactly(sock, CHALLENGE_BYTES, deadline))
    except AuthenticationError as error:
        raise ProtocolError(str(error)) from None
    sock.sendall(answer)
    refusal_bytes, info_bytes = _LENGTHS.unpack(receive_exactly(sock, _LENGTHS.size, deadline))
    if max(refusal_bytes, info_bytes) > MAX_SESSION_INFO_BYTES:
        raise ProtocolError("malformed session info")
    refusal = receive_exactly(sock, refusal_bytes, deadline).decode(errors="replace")
    if refusal:
        raise ProtocolError(refusal)
    return receive_exactly(sock, info_bytes, deadline)


def session_info_frame(session_info: bytes = b"", refusal: str = "") -> bytes:
    """Return the last frame of the receiver."""
    text = refusal.encode()
    return _LENGTHS.pack(len(text), len(session_info)) + text + session_info
