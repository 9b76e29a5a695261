"""Scatter-gather over a socket without a Python object per piece.

`send_copies` and `receive_copies` move whole copy tables by sendmsg(2) and recvmsg(2), up to 1,024 pieces per call, in
C (`_native/stream.c`). Python code between two calls would keep the sender's processor from its packets. If the C code
was not built, numpy builds the kernel's iovec table. Python's lock is released during the calls.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import sys
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from splitserve._native.library import address_of, open_library
from splitserve.transfer.copies import Copies, cut
from splitserve.transfer.transports.memory import Memory
from splitserve.transfer.transports.sockets import LATE, Deadline, set_send_timeout

# struct iovec on 64-bit systems: base, length.
IOVEC = np.dtype([("base", "<u8"), ("length", "<u8")])
# Maximum number of pieces per system call on Linux and macOS.
MAX_PIECES_PER_CALL = 1024

_IS_LINUX = sys.platform == "linux"
# Report a broken connection as an error, not as a signal.
_SEND_FLAGS = socket.MSG_NOSIGNAL if _IS_LINUX else 0
# Return value of stream.c: the connection has ended.
_ENDED = -1


class _MsgHdr(ctypes.Structure):
    """struct msghdr of sys/socket.h."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("namelen", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iovlen", ctypes.c_size_t if _IS_LINUX else ctypes.c_int),
        ("control", ctypes.c_void_p),
        ("controllen", ctypes.c_size_t if _IS_LINUX else ctypes.c_uint32),
        ("flags", ctypes.c_int),
    )


_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.sendmsg, _libc.recvmsg):
    _call.argtypes = (ctypes.c_int, ctypes.POINTER(_MsgHdr), ctypes.c_int)
    _call.restype = ctypes.c_ssize_t


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
    deadline.
    """
    if _library is None:
        copies = cut(copies, max_bytes)
        table = iovec_table(memory.sources(copies), copies["length"], head)
        _move_slowly(sock, table, _Call(_libc.sendmsg, _SEND_FLAGS, len(head), max_bytes, deadline))
        return
    # Keep it alive until C is done with its address.
    bases = memory.bases
    copies = np.ascontiguousarray(copies)
    _check(
        _library.stream_send(
            sock.fileno(),
            head,
            len(head),
            address_of(copies),
            len(copies),
            bases.address,
            _SEND_FLAGS,
            max_bytes,
            deadline.left,
        )
    )


def receive_copies(sock: socket.socket, copies: Copies, memory: Memory) -> None:
    """Fill the targets of the copies in order. Raises OSError, ConnectionError if the connection ends before.

    `memory`: our regions. Nothing is checked: call `check_targets` before.
    """
    if _library is None:
        table = iovec_table(memory.targets(copies), copies["length"])
        # The kernel returns when the pieces of a call are full, or the connection has ended.
        _move_slowly(sock, table, _Call(_libc.recvmsg, socket.MSG_WAITALL))
        return
    bases = memory.bases
    copies = np.ascontiguousarray(copies)
    _check(_library.stream_receive(sock.fileno(), address_of(copies), len(copies), bases.address))


def iovec_table(addresses: NDArray[np.uint64], lengths: NDArray[np.uint64], head: bytes = b"") -> NDArray[np.void]:
    """Return a table of `head` and the pieces. `head` must outlive the table. Empty pieces are omitted."""
    table = np.empty((1 + len(addresses), 2), dtype=np.uint64)
    table[0] = np.frombuffer(head, dtype=np.uint8).ctypes.data, len(head)
    table[1:, 0], table[1:, 1] = addresses, lengths
    if not table[:, 1].all():
        table = table[table[:, 1] > 0]
    return table.view(IOVEC).reshape(-1)


@dataclass(frozen=True, slots=True)
class _Call:
    """System call and its limits."""

    function: ctypes._NamedFuncPointer
    flags: int
    # Bytes sent in addition to `max_bytes` of the first call.
    head_bytes: int = 0
    max_bytes: int = 1 << 62
    # Only for sends.
    deadline: Deadline | None = None


def _move_slowly(sock: socket.socket, table: NDArray[np.void], call: _Call) -> None:
    """Move all pieces with system calls from Python. No piece is longer than `call.max_bytes`. Changes `table`."""
    ends = np.cumsum(table["length"])
    address = table.ctypes.data
    first, moved = 0, 0
    header = _MsgHdr()
    while first < len(table):
        header.iov = address + first * IOVEC.itemsize
        end = max(moved, call.head_bytes) + call.max_bytes
        # Use the table's own type: for any other type numpy converts the whole table.
        last = int(np.searchsorted(ends, np.uint64(end), side="right"))
        header.iovlen = min(max(last - first, 1), MAX_PIECES_PER_CALL)
        if call.deadline is not None:
            # The kernel's own timeout restarts with each call.
            set_send_timeout(sock, call.deadline.remaining())
        n = call.function(sock.fileno(), ctypes.byref(header), call.flags)
        if n < 0:
            if (code := ctypes.get_errno()) == errno.EINTR:
                continue
            _raise(code)
        if n == 0:
            _raise(_ENDED)
        moved += n
        if moved == ends[-1]:
            return
        first = int(np.searchsorted(ends, np.uint64(moved), side="right"))
        if first < len(table):
            # Drop the finished bytes of the first unfinished piece.
            left = int(ends[first]) - moved
            table["base"][first] += table["length"][first] - np.uint64(left)
            table["length"][first] = left


def _check(code: int) -> None:
    if code:
        _raise(code)


def _raise(code: int) -> NoReturn:
    if code == _ENDED:
        raise ConnectionError("connection closed inside a write")
    if code in (errno.EAGAIN, errno.EWOULDBLOCK):
        raise TimeoutError(LATE)
    raise OSError(code, os.strerror(code))
