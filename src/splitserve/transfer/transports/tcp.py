"""KV pages over plain TCP sockets, scattered straight from one registered memory into the other.

  write   the frame of `frames.py` | bytes          sender -> receiver
  reply   the frame of `frames.py`                  receiver -> sender

A write of more than PART_BYTES is sent in several frames, an empty write in none.
The receiver checks every range of a frame before it reads its bytes straight into place. Only a reply without a refusal
makes a ticket DONE. The next write is sent before the reply to this one has arrived. The sockets block and the lists of
pieces are long, so the time is spent inside the kernel, without Python's lock.
"""

from __future__ import annotations

import contextlib
import socket
from functools import partial

import msgspec

from splitserve._native.tables import in_source_order
from splitserve.core.layout import Region
from splitserve.transfer.copies import Copies, parts_of
from splitserve.transfer.transports import iovec, sockets
from splitserve.transfer.transports.backend import Proof
from splitserve.transfer.transports.base import TransportOptions
from splitserve.transfer.transports.frames import (
    MAX_RANGES,
    receive_reply,
    receive_write_frame,
    send_reply,
    write_frame,
)
from splitserve.transfer.transports.handshake import ProtocolError
from splitserve.transfer.transports.listener import GRACE_SECONDS
from splitserve.transfer.transports.memory import Memory, decode_regions, encode_regions
from splitserve.transfer.transports.session import SessionTransport
from splitserve.transfer.transports.sockets import Deadline

# Approximate maximum bytes of a write in one frame. Up to twice as much if its pieces are that long.
PART_BYTES = 8 << 20
# Bytes sent per system call. Longer and shorter calls are up to half as slow again.
CALL_BYTES = 2 << 20


def tcp_transport(options: TransportOptions) -> SessionTransport:
    return SessionTransport(TcpBackend(), options)


class TcpBackend:
    brief_bytes = 0
    joined_bytes = 8 << 20

    def __init__(self) -> None:
        self._memory = Memory()

    def register(self, memory: Memory) -> None:
        self._memory = memory

    def receive(self) -> TcpIncoming:
        return TcpIncoming(self._memory)

    def connect(self, sock: socket.socket, session_info: bytes, deadline: Deadline) -> TcpOutgoing:
        try:
            return TcpOutgoing(sock, self._memory, Memory(decode_regions(session_info)))
        except msgspec.DecodeError as error:
            raise ProtocolError(f"malformed session info: {error}") from error

    def close(self) -> None:
        """Do nothing: the backend holds no resources."""


class TcpOutgoing:
    def __init__(self, sock: socket.socket, memory: Memory, theirs: Memory) -> None:
        self._socket = sock
        self._memory = memory
        # Lengths only: the receiver does not send the addresses of its regions.
        self._theirs = theirs

    def write(self, ticket_id: int, copies: Copies, deadline: Deadline) -> Proof:
        # The receiver checks this too, but by then other parts or writes are in flight.
        num_bytes = self._theirs.check_targets(copies)
        copies = in_source_order(copies, num_bytes, self._memory.bases)
        # The receiver prepares for a part while the one before it is in flight.
        parts = parts_of(copies, PART_BYTES, MAX_RANGES)
        for part in parts:
            self._send(ticket_id, part, deadline)
        return partial(self._receive_replies, len(parts), ticket_id, deadline)

    def _receive_replies(self, count: int, ticket_id: int, deadline: Deadline) -> None:
        for _ in range(count):
            receive_reply(self._socket, ticket_id, deadline)

    def _send(self, ticket_id: int, copies: Copies, deadline: Deadline) -> None:
        head = write_frame(ticket_id, copies)
        # Send the header with the first piece. Alone it would be a packet of its own and wake the receiver in vain.
        iovec.send_copies(self._socket, copies, self._memory, CALL_BYTES, deadline, head=head)

    def is_alive(self) -> bool:
        return not sockets.is_broken(self._socket)

    def interrupt(self) -> None:
        """Do nothing: the caller shuts the socket, which wakes a thread blocked on it."""

    def close(self) -> None:
        """Do nothing: the caller closes the socket."""


class TcpIncoming:
    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def session_info(self) -> bytes:
        return encode_regions([Region(0, region.length) for region in self._memory.regions])

    def serve(self, sock: socket.socket) -> None:
        while self._receive_write(sock):
            pass

    def revoke(self) -> None:
        """Do nothing: the only writer was our own thread, which has ended."""

    def is_fenced(self) -> bool:
        return True

    def _receive_write(self, sock: socket.socket) -> bool:
        """Receive one frame into place and acknowledge it. Return False if the connection should end."""
        frame = receive_write_frame(sock)
        if frame is None:
            return False
        if refusal := frame.refusal(self._memory):
            send_reply(sock, frame.ticket_id, refusal)
            _discard(sock)
            return False
        iovec.receive_copies(sock, frame.targets, self._memory)
        send_reply(sock, frame.ticket_id)
        return True


def _discard(sock: socket.socket) -> None:
    """Read what a refused peer still sends. An earlier close could discard the refusal before it arrives."""
    shut_at = Deadline(GRACE_SECONDS)
    scratch = bytearray(1 << 20)
    with contextlib.suppress(OSError):
        while True:
            sockets.set_receive_timeout(sock, shut_at.remaining())
            if not sock.recv_into(scratch):
                return
