"""The door: how one worker's transport lets another's in. The same for every backend.

  hello      magic, version, nonce, length of the session id | session id             sender -> receiver
  challenge  magic, version, nonce, proof                                              receiver -> sender
  answer     proof                                                                     sender -> receiver
  welcome    length of a refusal, length of what the sender must know | both           receiver -> sender

A proof is an HMAC-SHA256 under the cluster token over both nonces, the session and the side that says it: each end
shows the other that it holds the token without showing the token. What comes after the welcome is the backend's own.
All integers are little-endian. Magic and version never move, so that a mismatch of versions can be named.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import socket
import struct
import threading
from typing import Protocol

from splitserve.disaggregation.challenge import TOKENS_DIFFER
from splitserve.disaggregation.transports.sockets import (
    Deadline,
    abort,
    receive_exactly,
    set_receive_timeout,
    set_send_timeout,
    shut,
    tune,
)

logger = logging.getLogger(__name__)

MAGIC = b"SSKV"
VERSION = 3
NONCE_BYTES = 16
PROOF_BYTES = 32
MAX_SESSION_BYTES = 256
MAX_WELCOME_BYTES = 16 << 20
# A peer that has connected must have shown who it is within so many seconds.
GRACE_SECONDS = 10.0
# So many may be about to show it; others are turned away. Each has a thread.
MAX_STRANGERS = 256
# The next connection is waited for when one could not be taken, such as for want of descriptors.
_PAUSE_SECONDS = 0.1

_HELLO = struct.Struct(f"<4sH{NONCE_BYTES}sH")
_CHALLENGE = struct.Struct(f"<4sH{NONCE_BYTES}s{PROOF_BYTES}s")
_WELCOME = struct.Struct("<II")


class ProtocolError(Exception):
    """The other end does not speak our protocol, breaks it, or may not come in."""


class Host(Protocol):
    """Who lives behind the door: decides about sessions and serves those let in."""

    def enter(self, guest: Guest, session_id: str) -> bytes:
        """What the sender must know; the guest is registered under the session. Raises ProtocolError to refuse."""
        ...

    def serve(self, guest: Guest, session_id: str) -> None:
        """Runs in the guest's own thread until the connection ends."""
        ...


def introduce(sock: socket.socket, session_id: str, token: bytes, deadline: Deadline) -> bytes:
    """Ask at a session's door to be let in: what its receiver lets us know. Raises OSError, ProtocolError.

    Shutting the socket ends it. The socket's timeouts are left as they come.
    """
    set_send_timeout(sock, deadline.remaining())
    name, ours = session_id.encode(), secrets.token_bytes(NONCE_BYTES)
    sock.sendall(_HELLO.pack(MAGIC, VERSION, ours, len(name)) + name)
    magic, version, theirs, proof = _CHALLENGE.unpack(receive_exactly(sock, _CHALLENGE.size, deadline))
    if magic != MAGIC:
        raise ProtocolError("the other side is no Splitserve transport")
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


class Door:
    """Listens on a free port of `host` and lets in who holds the token."""

    def __init__(self, host: str, token: bytes, inhabitant: Host) -> None:
        self.token = token
        self.inhabitant = inhabitant
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=128)
        # Before anyone connects: the window's scale is agreed on in the first packets.
        tune(self._socket)
        name = f"[{host}]" if ":" in host else host
        self.endpoint = f"{name}:{self._socket.getsockname()[1]}"
        self._lock = threading.Lock()
        self._guests: set[Guest] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-accept", daemon=True)
        self._thread.start()

    def leave(self, guest: Guest) -> None:
        with self._lock:
            self._guests.discard(guest)

    def close(self) -> None:
        """Nobody comes in any more, and who is in is thrown out. Idempotent."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        shut(self._socket)
        self._thread.join()
        self._socket.close()
        with self._lock:
            guests = list(self._guests)
        for guest in guests:
            guest.stop()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if not self._closed.is_set():
                    logger.warning("cannot take a data connection: %s", error)
                    self._closed.wait(_PAUSE_SECONDS)
                continue
            self._take(sock)

    def _take(self, sock: socket.socket) -> None:
        guest = Guest(self, sock)
        with self._lock:
            num_strangers = sum(other.is_stranger for other in self._guests)
            self._guests.add(guest)
        if num_strangers >= MAX_STRANGERS:
            self._turn_away(guest, f"{num_strangers} others have not shown yet who they are")
            return
        try:
            guest.start()
        except RuntimeError as error:
            # A system that has no more threads.
            self._turn_away(guest, str(error))

    def _turn_away(self, guest: Guest, why: str) -> None:
        """It was never started."""
        logger.warning("a data connection was turned away: %s", why)
        self.leave(guest)
        guest.socket.close()


class Guest:
    """One connection from a sender, and its thread."""

    def __init__(self, door: Door, sock: socket.socket) -> None:
        self._door = door
        self.socket = sock
        # Until it has shown that it holds the token.
        self.is_stranger = True
        self._thread = threading.Thread(target=self._run, name="kv-receive", daemon=True)

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """When this returns, the connection's thread has ended, and the sender has been told."""
        abort(self.socket)
        self._thread.join()

    def _run(self) -> None:
        try:
            session_id = self._let_in()
            self._door.inhabitant.serve(self, session_id)
        except (OSError, ProtocolError) as error:
            logger.info("data connection ended: %s", error)
        finally:
            self._door.leave(self)
            self.socket.close()

    def _let_in(self) -> str:
        sock = self.socket
        tune(sock)
        deadline = Deadline(GRACE_SECONDS)
        set_send_timeout(sock, GRACE_SECONDS)
        magic, version, theirs, length = _HELLO.unpack(receive_exactly(sock, _HELLO.size, deadline))
        if magic != MAGIC or length > MAX_SESSION_BYTES:
            raise ProtocolError(f"not a hello: {magic!r}")
        ours = secrets.token_bytes(NONCE_BYTES)
        if version != VERSION:
            # The other side reads our version from it and gives up.
            sock.sendall(_CHALLENGE.pack(MAGIC, VERSION, ours, bytes(PROOF_BYTES)))
            raise ProtocolError(_version_difference(VERSION, version))
        name = receive_exactly(sock, length, deadline)
        token = self._door.token
        sock.sendall(_CHALLENGE.pack(MAGIC, VERSION, ours, _proof(token, b"receiver", theirs, ours, name)))
        answer = receive_exactly(sock, PROOF_BYTES, deadline)
        if not hmac.compare_digest(answer, _proof(token, b"sender", theirs, ours, name)):
            raise ProtocolError("a sender without the cluster token was turned away")
        self.is_stranger = False
        session_id = name.decode(errors="replace")
        try:
            welcome = self._door.inhabitant.enter(self, session_id)
        except ProtocolError as refusal:
            text = str(refusal).encode()
            sock.sendall(_WELCOME.pack(len(text), 0) + text)
            raise
        sock.sendall(_WELCOME.pack(0, len(welcome)) + welcome)
        # From here on the sender's deadlines count: a connection may be idle for long.
        set_receive_timeout(sock, 0)
        return session_id


def _proof(token: bytes, side: bytes, sender_nonce: bytes, receiver_nonce: bytes, session: bytes) -> bytes:
    said = b"\0".join((b"splitserve data", side, sender_nonce, receiver_nonce, session))
    return hmac.digest(token, said, hashlib.sha256)


def _version_difference(ours: int, theirs: int) -> str:
    return f"data protocol version {ours} against {theirs}: run the same Splitserve release on both sides"
