"""KV pages over plain TCP sockets, scattered straight from one registered memory into the other.

  write   the frame of `frames.py` | bytes          sender -> receiver
  reply   the frame of `frames.py`                  receiver -> sender

A write of more than PART_BYTES is sent in several frames, an empty write in none.

Between two workers of one host the sender writes directly into the receiver's memory, like `shm`, if that is shareable
(option `direct`). The connection then only shows that the peer is alive. Other hosts get the bytes through the socket,
and so does a receiver with memory that cannot be opened: another user, or another process namespace.

The receiver checks every range of a frame before it reads its bytes straight into place. Only a reply without a refusal
makes a ticket DONE. The next write is sent before the reply to this one has arrived.

`send_copies` and `receive_copies` move whole copy tables by sendmsg(2) and recvmsg(2), up to 1,024 pieces per call, in
C (`_native/stream.c`). Python code between two calls would keep the sender's processor from its packets. If the C code
was not built, Python makes an object per piece. Python's lock is released during the calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import socket
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from splitserve._native.library import address_of, open_library
from splitserve._native.tables import in_source_order
from splitserve.core.layout import Region
from splitserve.transfer.copies import Copies, parts_of
from splitserve.transfer.transports import same_host, shm, sockets
from splitserve.transfer.transports.backend import (
    ConnectionBackend,
    Incoming,
    Memory,
    Proof,
    SendingEnd,
    decode_session_info,
)
from splitserve.transfer.transports.base import TransportOptions, is_direct
from splitserve.transfer.transports.frames import (
    MAX_RANGES,
    ProtocolError,
    receive_reply,
    receive_write_frame,
    send_reply,
    write_frame,
)
from splitserve.transfer.transports.listener import GRACE_SECONDS
from splitserve.transfer.transports.session import SessionTransport
from splitserve.transfer.transports.sockets import LATE, Deadline, set_send_timeout

logger = logging.getLogger(__name__)

# Approximate maximum bytes of a write in one frame. Up to twice as much if its pieces are that long.
PART_BYTES = 8 << 20
# Bytes sent per system call. Longer and shorter calls are up to half as slow again.
CALL_BYTES = 2 << 20
# Maximum number of pieces per system call on Linux and macOS.
MAX_PIECES_PER_CALL = 1024


class SessionInfo(msgspec.Struct, frozen=True):
    """Length of each region, and description of the memory for senders that write directly."""

    lengths: list[int]
    # None: all bytes come through the connection.
    direct: shm.SharedMemoryTarget | None = None


_session_infos = msgspec.msgpack.Decoder(SessionInfo)
# Report a broken connection as an error, not as a signal. macOS lacks the flag.
_SEND_FLAGS = getattr(socket, "MSG_NOSIGNAL", 0)
# Return value of stream.c: the connection has ended.
_ENDED = -1


def _declare(library: ctypes.CDLL) -> None:
    table = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p)
    head = (ctypes.c_void_p, ctypes.c_uint64)
    library.stream_send.argtypes = (ctypes.c_int, *head, *table, ctypes.c_int, ctypes.c_uint64, ctypes.c_double)
    library.stream_receive.argtypes = (ctypes.c_int, *table)


_library = open_library("stream", _declare)


def send_copies(
    sock: socket.socket, copies: Copies, memory: Memory, max_bytes: int, deadline: Deadline, *, head: bytes = b""
) -> None:
    """Send `head`, then the sources of the copies, in order and at most `max_bytes` (at least 1) per system call.

    `memory`: our regions. Nothing is checked: call `check_sources` before. Raises OSError; TimeoutError at the
    deadline. Without C, a call may have up to twice as many bytes.
    """
    if _library is None:
        _send_slowly(sock, copies, memory, max_bytes, deadline, head)
        return
    # Keep it alive until C is done with its address.
    bases = memory.bases
    copies = np.ascontiguousarray(copies)
    table = (address_of(copies), len(copies), bases.address)
    _check(_library.stream_send(sock.fileno(), head, len(head), *table, _SEND_FLAGS, max_bytes, deadline.left))


def receive_copies(sock: socket.socket, copies: Copies, memory: Memory) -> None:
    """Fill the targets of the copies in order. Raises OSError, ConnectionError if the connection ends before.

    `memory`: our regions. Nothing is checked: call `check_targets` before.
    """
    if _library is None:
        # The kernel returns when the pieces of a call are full, or the connection has ended.
        for part in parts_of(copies, CALL_BYTES, MAX_PIECES_PER_CALL):
            pieces = _views(memory.targets(part), part["length"])
            _move_slowly(pieces, lambda left: sock.recvmsg_into(left, 0, socket.MSG_WAITALL)[0])
        return
    bases = memory.bases
    copies = np.ascontiguousarray(copies)
    _check(_library.stream_receive(sock.fileno(), address_of(copies), len(copies), bases.address))


def _send_slowly(
    sock: socket.socket, copies: Copies, memory: Memory, max_bytes: int, deadline: Deadline, head: bytes
) -> None:
    def send(pieces: list[memoryview]) -> int:
        # The kernel's own timeout restarts with each call.
        set_send_timeout(sock, deadline.remaining())
        return sock.sendmsg(pieces, (), _SEND_FLAGS)

    pieces = [memoryview(head)] if head else []
    # The head is a piece too. It may be the only one.
    for part in parts_of(copies, max_bytes, MAX_PIECES_PER_CALL - 1) or [copies[:0]]:
        pieces += _views(memory.sources(part), part["length"])
        _move_slowly(pieces, send)


def _views(addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> list[memoryview]:
    pairs = zip(addresses.tolist(), lengths.tolist(), strict=True)
    return [memoryview((ctypes.c_char * n).from_address(address)).cast("B") for address, n in pairs]


def _move_slowly(pieces: list[memoryview], move: Callable[[list[memoryview]], int]) -> None:
    """Move all pieces, and remove them. `move` returns how many bytes it has moved."""
    while pieces:
        try:
            moved = move(pieces)
        except BlockingIOError as error:
            raise TimeoutError(LATE) from error
        if not moved:
            raise ConnectionError("connection closed inside a write")
        while pieces and len(pieces[0]) <= moved:
            moved -= len(pieces.pop(0))
        if moved:
            pieces[0] = pieces[0][moved:]


def _check(code: int) -> None:
    """Raise the error of a code from stream.c. 0: success."""
    if code == _ENDED:
        raise ConnectionError("connection closed inside a write")
    if code in (errno.EAGAIN, errno.EWOULDBLOCK):
        raise TimeoutError(LATE)
    if code:
        raise OSError(code, os.strerror(code))


def tcp_transport(options: TransportOptions) -> SessionTransport:
    """Return a transport over sockets, which is direct on one host. Raises OptionError."""
    return SessionTransport(TcpBackend(is_direct=is_direct(options.extra)), options)


class TcpBackend(ConnectionBackend):
    def __init__(self, *, is_direct: bool = False) -> None:
        super().__init__()
        self._is_direct = is_direct

    def receive(self) -> TcpIncoming:
        if self._is_direct and all(region.fd >= 0 for region in self.memory.regions):
            try:
                return DirectTcpIncoming(self.memory)
            except OSError as error:
                logger.warning("KV is received through sockets, direct writes failed reason=%s", error)
        return TcpIncoming(self.memory)

    def connect(self, sock: socket.socket, session_info: bytes, deadline: Deadline) -> SendingEnd:
        found = decode_session_info(_session_infos, session_info)
        if self._is_direct and found.direct is not None:
            try:
                if found.direct.host.boot_id == same_host.boot_id():
                    end = shm.ShmOutgoing(sock, self.memory, found.direct, anonymous=True)
                    end.path = "direct"
                    logger.info("KV is written directly peer_pid=%d", found.direct.pid)
                    return end
            except (OSError, ProtocolError, ValueError) as error:
                reason, pid = error.__cause__ or error, found.direct.pid
                logger.info("direct writes failed, a socket is used peer_pid=%d reason=%s", pid, reason)
        return TcpOutgoing(sock, self.memory, Memory([Region(0, length) for length in found.lengths]))


class TcpOutgoing(SendingEnd):
    path = "socket"

    def __init__(self, sock: socket.socket, memory: Memory, theirs: Memory) -> None:
        super().__init__(sock)
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
            # Send the header with the first piece. Alone it would be a packet of its own and wake the receiver in vain.
            head = write_frame(ticket_id, part)
            send_copies(self._socket, part, self._memory, CALL_BYTES, deadline, head=head)
        return partial(self._receive_replies, len(parts), ticket_id, deadline)

    def _receive_replies(self, count: int, ticket_id: int, deadline: Deadline) -> None:
        for _ in range(count):
            receive_reply(self._socket, ticket_id, deadline)


class TcpIncoming(Incoming):
    # Description for senders that write directly. None: there are none.
    _direct: shm.SharedMemoryTarget | None = None

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def session_info(self) -> bytes:
        lengths = [region.length for region in self._memory.regions]
        return msgspec.msgpack.encode(SessionInfo(lengths, self._direct))

    def serve(self, sock: socket.socket) -> None:
        """Receive frame after frame into place and acknowledge each, until one is refused or the connection ends."""
        while frame := receive_write_frame(sock):
            if refusal := self._memory.refusal(frame.targets, frame.length):
                send_reply(sock, frame.ticket_id, refusal)
                _discard(sock)
                return
            receive_copies(sock, frame.targets, self._memory)
            send_reply(sock, frame.ticket_id)


class DirectTcpIncoming(TcpIncoming, same_host.GatedIncoming):
    """Receiving end for both kinds of senders: frames of the connection, and direct writes. Raises OSError."""

    def __init__(self, memory: Memory) -> None:
        same_host.GatedIncoming.__init__(self, same_host.WriteGate())
        TcpIncoming.__init__(self, memory)
        self._direct = shm.describe(memory, self._gate)


def _discard(sock: socket.socket) -> None:
    """Read what a refused peer still sends. An earlier close could discard the refusal before it arrives."""
    shut_at = Deadline(GRACE_SECONDS)
    scratch = bytearray(1 << 20)
    with contextlib.suppress(OSError):
        while True:
            sockets.set_receive_timeout(sock, shut_at.remaining())
            if not sock.recv_into(scratch):
                return
