"""Keys and listening sockets for the pipes between ranks of different hosts.

The keys are CURVE keys, with which ZeroMQ encrypts and authenticates. They are derived from the cluster token for one
start of a worker. The listeners' public key is derived too and never published. The handshake fails without it, so a
peer that completes the handshake holds the token. No further authentication is needed.

Sockets listen before the processes that serve them are started, so their ports are known and reserved at startup.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import zmq

from splitserve.process.authentication import CurveKeys, curve_keys

# Milliseconds between two heartbeats, and of silence after which a connection is broken.
_HEARTBEAT_MS = 5_000
_SILENCE_MS = 15_000
TCP = "tcp://"


@dataclass(frozen=True, slots=True)
class PipeNet:
    """Keys of the pipes of one start. `descriptors`: endpoint -> descriptor of a socket to listen on."""

    listener: CurveKeys
    caller: CurveKeys
    descriptors: Mapping[str, int]

    @classmethod
    def of(cls, token: bytes, instance: int, descriptors: Mapping[str, int]) -> PipeNet:
        """Derive the keys. `instance`: random number of this start of the worker."""
        salt = str(instance).encode()
        return cls(curve_keys(token, "pipe listener", salt), curve_keys(token, "pipe caller", salt), descriptors)

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
        # The other end listens, but may answer only after its process has loaded its libraries.
        pipe.setsockopt(zmq.HANDSHAKE_IVL, 0)
        # Frames in flight on a broken connection are lost. Therefore the pipe does not reconnect, and later sends fail.
        pipe.setsockopt(zmq.RECONNECT_IVL, -1)
        pipe.connect(endpoint)


def _show_life(pipe: zmq.Socket[bytes]) -> None:
    """Enable heartbeats: firewalls drop idle connections, and a broken path must be noticed."""
    pipe.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    pipe.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)


class Listeners:
    """Sockets that listen on free ports of one address, for processes to be started. Close them after that."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._sockets: dict[str, socket.socket] = {}

    def open(self) -> str:
        """Open one more socket and return its endpoint. Raises OSError."""
        sock = socket.create_server((self._address, 0))
        endpoint = f"{TCP}{self._address}:{sock.getsockname()[1]}"
        self._sockets[endpoint] = sock
        return endpoint

    def descriptors(self, endpoints: Iterable[str]) -> dict[str, int]:
        """Return the descriptors of those endpoints that are ours."""
        return {e: self._sockets[e].fileno() for e in endpoints if e in self._sockets}

    def close(self) -> None:
        """Close our copies. Processes that have inherited the sockets keep listening. Idempotent."""
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()
