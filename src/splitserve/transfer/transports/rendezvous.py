"""Rendezvous of the two members of a torch.distributed group, over the data connection, which stays open.

1. The receiver sends an authenticated sender its library and a fresh secret (`RendezvousWelcome`).
2. The library exchanges its keys through a `ConnectionStore` instead of a store with a port of its own.
3. The group is created, and each end sends the other one half of the secret through it.
"""

from __future__ import annotations

import secrets
import socket
import struct
from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import Store

from splitserve.transfer.transports import sockets
from splitserve.transfer.transports.handshake import ProtocolError
from splitserve.transfer.transports.sockets import Deadline

# Ranks of the two members.
RECEIVER, SENDER = 0, 1

MAX_VALUE_BYTES = 1 << 16
# Size of the proof that each end sends.
PROOF_BYTES = 16

_PAIR = struct.Struct("<II")


class RendezvousWelcome(msgspec.Struct, frozen=True):
    # Library that transfers the bytes, with its version. Both ends need the same.
    library: str
    secret: bytes

    @classmethod
    def to(cls, library: str) -> RendezvousWelcome:
        return cls(library, secrets.token_bytes(2 * PROOF_BYTES))

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, data: bytes, library: str) -> RendezvousWelcome:
        """Decode a welcome. Raises ProtocolError if it is malformed or of another library."""
        try:
            welcome = _welcomes.decode(data)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"malformed welcome: {error}") from error
        if welcome.library != library:
            raise ProtocolError(f"{library} against {welcome.library}: install the same on both sides")
        return welcome


# Created on import: sessions open in threads, and two threads that create it at once crash the process.
_welcomes = msgspec.msgpack.Decoder(RendezvousWelcome)


class ConnectionStore(Store):
    """Store of a rendezvous over the data connection: a key set by one end is sent to the other.

    After `seal` its content is fixed, because the connection then carries other data. Until then it has its own
    descriptor: a library may still read from it after the connection's owner has closed the original.
    """

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        super().__init__()
        self._socket = sock.dup()
        self._deadline = deadline
        self._values: dict[str, bytes] = {}
        self._sealed = False

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        if not self._sealed:
            name = key.encode()
            self._socket.sendall(_PAIR.pack(len(name), len(data)) + name + data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys until the deadline of the connection; `timeout` is ignored. Raises OSError, ProtocolError."""
        while not self.check(keys):
            if self._sealed:
                raise ProtocolError(f"the group's rendezvous is over, but {keys} are asked for")
            sockets.set_receive_timeout(self._socket, self._deadline.remaining())
            name_bytes, value_bytes = _PAIR.unpack(sockets.receive_exactly(self._socket, _PAIR.size))
            if max(name_bytes, value_bytes) > MAX_VALUE_BYTES:
                raise ProtocolError("not a rendezvous: run the same Splitserve release on both sides")
            name = sockets.receive_exactly(self._socket, name_bytes).decode(errors="replace")
            self._values[name] = sockets.receive_exactly(self._socket, value_bytes)

    def clone(self) -> ConnectionStore:
        return self

    def seal(self) -> None:
        """End the exchange of keys. Idempotent."""
        self._sealed = True
        self._socket.close()
