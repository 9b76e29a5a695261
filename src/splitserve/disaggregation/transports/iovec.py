"""Scatter-gather over a socket without a Python object per piece: the kernel's own iovec table is built by numpy.

`send_all` and `receive_all` call sendmsg(2) and recvmsg(2) with tables of up to 1,024 pieces. ctypes lets Python's lock
go for the time of the call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import sys

import numpy as np
from numpy.typing import NDArray

from splitserve.disaggregation.transports.sockets import Deadline, set_send_timeout

# struct iovec on 64-bit systems: base, length.
IOVEC = np.dtype([("base", "<u8"), ("length", "<u8")])
# Pieces handed to one system call: what Linux and macOS take.
MAX_PIECES_PER_CALL = 1024

_IS_LINUX = sys.platform == "linux"


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


_NO_BYTES = np.empty(0, dtype=np.uint8)


def iovec_table(
    addresses: NDArray[np.uint64], lengths: NDArray[np.uint64], head: NDArray[np.uint8] = _NO_BYTES
) -> NDArray[np.void]:
    """A table of the bytes of `head`, which must outlive it, and the pieces; empty ones are left out."""
    table = np.empty((1 + len(addresses), 2), dtype=np.uint64)
    table[0] = head.ctypes.data, head.nbytes
    table[1:, 0], table[1:, 1] = addresses, lengths
    if not table[:, 1].all():
        table = table[table[:, 1] > 0]
    return table.view(IOVEC).reshape(-1)


def send_all(sock: socket.socket, table: NDArray[np.void], max_bytes: int, deadline: Deadline) -> None:
    """Send all pieces in order, at most `max_bytes`, or one piece, a call. Raises OSError. Spoils `table`."""
    flags = socket.MSG_NOSIGNAL if _IS_LINUX else 0
    _move_all(_libc.sendmsg, sock, table, flags, max_bytes, deadline)


def receive_all(sock: socket.socket, table: NDArray[np.void]) -> None:
    """Fill all pieces in order. Raises OSError, ConnectionError where the connection ends before. Spoils `table`."""
    # The kernel returns when the pieces of a call are full, or the connection ends.
    _move_all(_libc.recvmsg, sock, table, socket.MSG_WAITALL, 1 << 62)


def _move_all(
    call: ctypes._NamedFuncPointer,
    sock: socket.socket,
    table: NDArray[np.void],
    flags: int,
    max_bytes: int,
    deadline: Deadline | None = None,
) -> None:
    ends = np.cumsum(table["length"])
    address = table.ctypes.data
    first, moved = 0, 0
    header = _MsgHdr()
    while first < len(table):
        header.iov = address + first * IOVEC.itemsize
        # Of the table's own type: for any other numpy converts all of it.
        last = int(np.searchsorted(ends, np.uint64(moved + max_bytes), side="right"))
        header.iovlen = min(max(last - first, 1), MAX_PIECES_PER_CALL)
        if deadline is not None:
            # The kernel's own timeout begins anew with each call.
            set_send_timeout(sock, deadline.remaining())
        n = call(sock.fileno(), ctypes.byref(header), flags)
        if n < 0:
            _raise(ctypes.get_errno())
            continue
        if n == 0:
            raise ConnectionError("connection closed inside a write")
        moved += n
        if moved == ends[-1]:
            return
        first = int(np.searchsorted(ends, np.uint64(moved), side="right"))
        if first < len(table):
            # Cut off what is done of the first piece that is not.
            left = int(ends[first]) - moved
            table["base"][first] += table["length"][first] - np.uint64(left)
            table["length"][first] = left


def _raise(code: int) -> None:
    """Returns only for EINTR: try again."""
    if code == errno.EINTR:
        return
    if code in (errno.EAGAIN, errno.EWOULDBLOCK):
        raise TimeoutError("the peer did not keep up")
    raise OSError(code, os.strerror(code))
