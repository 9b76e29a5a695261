"""What the pipes between ranks of different hosts need beside an address: keys, and sockets that listen already.

The keys are CURVE's (ZeroMQ encrypts and authenticates with them), derived from the cluster token for one start of a
worker. The public key of those who listen is derived, too, and never shown: without it nobody gets through the
handshake, so whoever does holds the token. Nothing else has to be sent or asked.

Sockets listen before the processes that serve them are started: their ports are known, and taken, from the start.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

_KEY_BYTES = 32
# Milliseconds between two signs of life, and of silence after which a connection is broken.
_HEARTBEAT_MS = 5_000
_SILENCE_MS = 15_000
TCP = "tcp://"


@dataclass(frozen=True, slots=True)
class KeyPair:
    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class PipeNet:
    """`descriptors`: by endpoint, of the sockets on which this process shall listen."""

    listener: KeyPair
    caller: KeyPair
    descriptors: Mapping[str, int]

    @classmethod
    def of(cls, token: bytes, instance: int, descriptors: Mapping[str, int]) -> PipeNet:
        """`instance`: of this start of the worker."""
        return cls(_key_pair(token, instance, b"listener"), _key_pair(token, instance, b"caller"), descriptors)

    def bind(self, pipe: zmq.Socket[bytes], endpoint: str) -> None:
        pipe.curve_server = True
        pipe.curve_publickey, pipe.curve_secretkey = self.listener.public, self.listener.secret
        _show_life(pipe)
        pipe.setsockopt(zmq.USE_FD, self.descriptors[endpoint])
        pipe.bind(endpoint)

    def connect(self, pipe: zmq.Socket[bytes], endpoint: str) -> None:
        pipe.curve_serverkey = self.listener.public
        pipe.curve_publickey, pipe.curve_secretkey = self.caller.public, self.caller.secret
        _show_life(pipe)
        # The other end listens, but may answer only when its process has loaded its libraries.
        pipe.setsockopt(zmq.HANDSHAKE_IVL, 0)
        # What was under way on a connection that broke is lost: the pipe ends with it, and sends fail from then on.
        pipe.setsockopt(zmq.RECONNECT_IVL, -1)
        pipe.connect(endpoint)


def _show_life(pipe: zmq.Socket[bytes]) -> None:
    """While nothing is said: firewalls forget silent connections, and a way that is gone must be noticed."""
    pipe.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    pipe.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)


class Listeners:
    """Sockets that listen on free ports of one address, for processes that are yet to be started. Close them after."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._sockets: dict[str, socket.socket] = {}

    def open(self) -> str:
        """One more; its endpoint. Raises OSError."""
        sock = socket.create_server((self._address, 0))
        endpoint = f"{TCP}{self._address}:{sock.getsockname()[1]}"
        self._sockets[endpoint] = sock
        return endpoint

    def descriptors(self, endpoints: Iterable[str]) -> dict[str, int]:
        """Of those that are ours."""
        return {e: self._sockets[e].fileno() for e in endpoints if e in self._sockets}

    def close(self) -> None:
        """Idempotent. Processes that have inherited them listen on."""
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()


def _key_pair(token: bytes, instance: int, role: bytes) -> KeyPair:
    secret = z85.encode(_derived(token, b"splitserve rank pipes " + role, str(instance).encode()))
    return KeyPair(zmq.curve_public(secret), secret)


def _derived(token: bytes, info: bytes, salt: bytes) -> bytes:
    """32 bytes by HKDF-SHA256 (RFC 5869), of which that is one block."""
    extracted = hmac.digest(salt, token, hashlib.sha256)
    return hmac.digest(extracted, info + b"\x01", hashlib.sha256)[:_KEY_BYTES]
