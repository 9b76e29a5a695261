"""Handshake of a data connection, the same for every backend.

  hello      magic, version, nonce, length of the session id | session id             sender -> receiver
  challenge  magic, version, nonce, proof                                              receiver -> sender
  answer     proof                                                                     sender -> receiver
  welcome    length of a refusal, length of the data for the sender | both                receiver -> sender

A proof is an HMAC-SHA256 under the cluster token over both nonces, the session and the end that sends it: each end
proves that it holds the token without sending it. What follows the welcome is the backend's own protocol.
All integers are little-endian. Magic and version never move, so that an error can report both versions.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct

from splitserve.transfer.challenge import TOKENS_DIFFER
from splitserve.transfer.transports.sockets import Deadline, receive_exactly, set_send_timeout

MAGIC = b"SSKV"
VERSION = 3
NONCE_BYTES = 16
PROOF_BYTES = 32
MAX_SESSION_BYTES = 256
MAX_WELCOME_BYTES = 16 << 20

_HELLO = struct.Struct(f"<4sH{NONCE_BYTES}sH")
_CHALLENGE = struct.Struct(f"<4sH{NONCE_BYTES}s{PROOF_BYTES}s")
_WELCOME = struct.Struct("<II")


class ProtocolError(Exception):
    """Violation of the protocol by the peer, another protocol, or a rejection by the peer."""


def introduce(sock: socket.socket, session_id: str, token: bytes, deadline: Deadline) -> bytes:
    """Authenticate as the sender of a session and return the data in the receiver's welcome.

    Raises OSError, ProtocolError. Shutting the socket ends the handshake. The socket's timeouts are not changed.
    """
    set_send_timeout(sock, deadline.remaining())
    name, ours = session_id.encode(), secrets.token_bytes(NONCE_BYTES)
    sock.sendall(_HELLO.pack(MAGIC, VERSION, ours, len(name)) + name)
    magic, version, theirs, proof = _CHALLENGE.unpack(receive_exactly(sock, _CHALLENGE.size, deadline))
    if magic != MAGIC:
        raise ProtocolError("the peer is no Splitserve transport")
    if version != VERSION:
        raise ProtocolError(f"{_version_difference(VERSION, version)}")
    if not hmac.compare_digest(proof, _proof(token, b"receiver", ours, theirs, name)):
        raise ProtocolError(TOKENS_DIFFER)
    sock.sendall(_proof(token, b"sender", ours, theirs, name))
    refusal_bytes, welcome_bytes = _WELCOME.unpack(receive_exactly(sock, _WELCOME.size, deadline))
    if max(refusal_bytes, welcome_bytes) > MAX_WELCOME_BYTES:
        raise ProtocolError("malformed welcome")
    refusal = receive_exactly(sock, refusal_bytes, deadline).decode(errors="replace")
    if refusal:
        raise ProtocolError(refusal)
    return receive_exactly(sock, welcome_bytes, deadline)


def welcome_frame(welcome: bytes = b"", refusal: str = "") -> bytes:
    """Return the last frame of the receiver."""
    text = refusal.encode()
    return _WELCOME.pack(len(text), len(welcome)) + text + welcome


class ReceiverHandshake:
    """Receiver's part of the handshake up to the answer, without a socket and without waiting.

    Feed at most `wanted` bytes at a time, and send what `feed` returns. The part is over when one of two fields is set:
    `session_id`, because the sender has authenticated, or `problem`, because it must be rejected.
    """

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._data = b""
        # The sender's nonce, and then the id of its session, once its hello has arrived.
        self._theirs: bytes | None = None
        self._name: bytes | None = None
        self._ours = secrets.token_bytes(NONCE_BYTES)
        self._version = VERSION
        # Size of the current part in bytes.
        self._size = _HELLO.size
        self.session_id: str | None = None
        self.problem: str | None = None

    @property
    def is_over(self) -> bool:
        return self.session_id is not None or self.problem is not None

    @property
    def wanted(self) -> int:
        """Return the number of bytes that the current part still needs."""
        return self._size - len(self._data)

    def feed(self, data: bytes) -> bytes:
        """Process received bytes and return the bytes to send."""
        self._data += data
        reply = b""
        while not self.is_over and not self.wanted:
            part, self._data = self._data, b""
            reply += self._take(part)
        return reply

    def _take(self, part: bytes) -> bytes:
        if self._theirs is None:
            return self._take_hello(part)
        if self._version != VERSION:
            # Reject only now: a close before the sender's last byte is read could discard our version in flight.
            self.problem = _version_difference(VERSION, self._version)
            return b""
        if self._name is None:
            self._name, self._size = part, PROOF_BYTES
            return self._challenge(_proof(self._token, b"receiver", self._theirs, self._ours, part))
        if hmac.compare_digest(part, _proof(self._token, b"sender", self._theirs, self._ours, self._name)):
            self.session_id = self._name.decode(errors="replace")
        else:
            self.problem = "it does not hold the cluster token"
        return b""

    def _take_hello(self, part: bytes) -> bytes:
        magic, self._version, self._theirs, self._size = _HELLO.unpack(part)
        if magic != MAGIC or self._size > MAX_SESSION_BYTES:
            self.problem = "it sent no hello"
            return b""
        # A sender of another version reads only our version from this challenge, so the proof is zeros.
        return b"" if self._version == VERSION else self._challenge(bytes(PROOF_BYTES))

    def _challenge(self, proof: bytes) -> bytes:
        return _CHALLENGE.pack(MAGIC, VERSION, self._ours, proof)


def _proof(token: bytes, end: bytes, sender_nonce: bytes, receiver_nonce: bytes, session: bytes) -> bytes:
    text = b"\0".join((b"splitserve data", end, sender_nonce, receiver_nonce, session))
    return hmac.digest(token, text, hashlib.sha256)


def _version_difference(ours: int, theirs: int) -> str:
    return f"data protocol version {ours} against {theirs}: run the same Splitserve release on both sides"
