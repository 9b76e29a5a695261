"""KV pages over plain TCP sockets, scattered straight from one registered memory into the other.

  write   magic, number of ranges, ticket id, bytes in all | ranges | bytes       sender -> receiver
  reply   ticket id, length of the refusal | refusal                              receiver -> sender

A range is (region u32, offset u64, length u64) of the receiver's memory. The receiver checks every range before it
takes a byte of them, and reads straight into place. No refusal means done; only that makes a ticket DONE. The sockets
block and the lists of pieces are long: the time goes by inside the kernel, where Python's lock is free.
"""

from __future__ import annotations

import contextlib
import socket
import struct

import numpy as np
from numpy.typing import NDArray

from splitserve.disaggregation.copies import Copies, num_bytes
from splitserve.disaggregation.transports import iovec, sockets
from splitserve.disaggregation.transports.base import TransportOptions
from splitserve.disaggregation.transports.door import GRACE_SECONDS, ProtocolError
from splitserve.disaggregation.transports.memory import Memory
from splitserve.disaggregation.transports.ranges import MAX_RANGES, RANGE, decode_targets, encode_targets
from splitserve.disaggregation.transports.session import SessionTransport, WriteRefused
from splitserve.disaggregation.transports.sockets import Deadline

MAGIC = b"WRIT"
MAX_TEXT_BYTES = 4096

_WRITE = struct.Struct("<4sIQQ")
_REPLY = struct.Struct("<QH")


def tcp_transport(options: TransportOptions) -> SessionTransport:
    return SessionTransport(TcpBackend(), options)


class TcpBackend:
    def __init__(self) -> None:
        self._memory = Memory()

    def register(self, memory: Memory) -> None:
        self._memory = memory

    def receive(self) -> TcpIncoming:
        return TcpIncoming(self._memory)

    def connect(self, sock: socket.socket, welcome: bytes, deadline: Deadline) -> TcpOutgoing:
        return TcpOutgoing(sock, self._memory)

    def close(self) -> None:
        """Nothing is held."""


class TcpOutgoing:
    def __init__(self, sock: socket.socket, memory: Memory) -> None:
        self._socket = sock
        self._memory = memory

    def write(self, ticket_id: int, copies: Copies, deadline: Deadline) -> None:
        if len(copies) > MAX_RANGES:
            raise WriteRefused(f"{len(copies)} copies in one write: at most {MAX_RANGES}")
        head = _head(ticket_id, copies)
        # Both of dtype uint64: an array of anything else would turn the addresses into floats.
        addresses = np.append(np.uint64(head.ctypes.data), self._memory.sources(copies))
        lengths = np.append(np.uint64(head.nbytes), copies["length"])
        sockets.set_send_timeout(self._socket, deadline.remaining())
        iovec.send_all(self._socket, iovec.iovec_table(addresses, lengths))
        if refusal := self._receive_reply(ticket_id, deadline):
            raise WriteRefused(refusal)

    def is_alive(self) -> bool:
        return not sockets.is_broken(self._socket)

    def interrupt(self) -> None:
        """The socket is shut, which wakes whoever blocks on it."""

    def close(self) -> None:
        """Nothing is held beside the socket."""

    def _receive_reply(self, ticket_id: int, deadline: Deadline) -> str:
        sockets.set_receive_timeout(self._socket, deadline.remaining())
        replied, length = _REPLY.unpack(sockets.receive_exactly(self._socket, _REPLY.size))
        if replied != ticket_id or length > MAX_TEXT_BYTES:
            raise ProtocolError(f"reply to write {replied} instead of {ticket_id}")
        return sockets.receive_exactly(self._socket, length).decode(errors="replace")


class TcpIncoming:
    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def welcome(self) -> bytes:
        return b""

    def serve(self, sock: socket.socket) -> None:
        while self._receive_write(sock):
            pass

    def revoke(self) -> None:
        """Our own thread wrote, and it has ended."""

    def is_fenced(self) -> bool:
        return True

    def _receive_write(self, sock: socket.socket) -> bool:
        """Take one write into place and acknowledge it. False when the connection should end."""
        try:
            header = sockets.receive_exactly(sock, _WRITE.size)
        except ConnectionError:
            return False
        magic, num_ranges, ticket_id, length = _WRITE.unpack(header)
        if magic != MAGIC or num_ranges > MAX_RANGES:
            raise ProtocolError("not a write")
        targets = decode_targets(sockets.receive_exactly(sock, num_ranges * RANGE.itemsize))
        refusal = self._memory.target_error(targets)
        if refusal is None and num_bytes(targets) != length:
            refusal = f"{length} bytes announced for ranges of {num_bytes(targets)}"
        if refusal is not None:
            _send_reply(sock, ticket_id, refusal)
            _discard(sock, length)
            return False
        iovec.receive_all(sock, iovec.iovec_table(self._memory.targets(targets), targets["length"]))
        _send_reply(sock, ticket_id, "")
        return True


def _head(ticket_id: int, copies: Copies) -> NDArray[np.uint8]:
    """Header and table of ranges, in one piece."""
    header = _WRITE.pack(MAGIC, len(copies), ticket_id, num_bytes(copies))
    return np.frombuffer(header + encode_targets(copies), dtype=np.uint8)


def _send_reply(sock: socket.socket, ticket_id: int, refusal: str) -> None:
    text = refusal.encode()[:MAX_TEXT_BYTES]
    sock.sendall(_REPLY.pack(ticket_id, len(text)) + text)


def _discard(sock: socket.socket, length: int) -> None:
    """Read what a refused peer had sent already: closing before that could destroy the refusal on its way."""
    shut_at = Deadline(GRACE_SECONDS)
    scratch = bytearray(1 << 20)
    with contextlib.suppress(OSError):
        while length > 0:
            sockets.set_receive_timeout(sock, shut_at.remaining())
            n = sock.recv_into(scratch, min(length, len(scratch)))
            if n == 0:
                return
            length -= n
