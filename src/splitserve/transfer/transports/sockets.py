"""Blocking sockets with deadlines, as used by the connections of all transports."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable

SOCKET_BUFFER_BYTES = 4 << 20
LATE = "the peer did not keep up"
# Linger for zero seconds: a close then resets the connection instead of ending it in order.
_RESET = struct.pack("@ii", 1, 0)


class Deadline:
    """Deadline on the system's clock, which is the only one that sockets support."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Remaining seconds. Negative after the deadline."""
        return self._end - time.monotonic()

    def remaining(self) -> float:
        """Return the remaining seconds. Raises TimeoutError after the deadline."""
        left = self.left
        if left <= 0:
            raise TimeoutError(f"over {self.seconds:g} s")
        return left


def connect(endpoint: str, deadline: Deadline, is_cancelled: Callable[[], bool]) -> socket.socket:
    """Return a blocking socket connected to `endpoint` ("host:port" or "[host6]:port"). Raises OSError."""
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        tune(sock)
        sock.setblocking(False)
        code = sock.connect_ex((host, int(port)))
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, f"{endpoint}: {os.strerror(code)}")
        poller = _poller(sock, select.POLLOUT)
        while not poller.poll(min(50.0, deadline.remaining() * 1000)):
            if is_cancelled():
                raise ConnectionAbortedError("cancelled")
        if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, f"{endpoint} does not take connections (error {code})")
        sock.setblocking(True)
    except BaseException:
        sock.close()
        raise
    return sock


def tune(sock: socket.socket) -> None:
    """Set options: no delay for short frames, large buffers for long ones."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)


def shut(sock: socket.socket) -> None:
    """Wake a thread that is blocked on the socket. The owner of the socket closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def abort(sock: socket.socket) -> None:
    """Do `shut` on a connection to a sender, so that it is notified at once when the owner closes the socket.

    After a shutdown alone the kernel opens no window any more, whatever is read. A sender that waits for one would
    probe for a minute. Data that the peer has not read yet may be lost.
    """
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    shut(sock)


def data_poll(sock: socket.socket) -> Callable[[], bool]:
    """Return `has_data` as a function for repeated calls, in half the time. The socket must stay open."""
    poller = _poller(sock, select.POLLIN)
    return lambda: bool(poller.poll(0))


def has_data(sock: socket.socket) -> bool:
    """Return whether a read would not block: there is data, or the connection has ended. Idle, it is broken."""
    return data_poll(sock)()


def has_ended(sock: socket.socket) -> bool:
    """Return whether either end has ended the connection, even if received data is still to be read."""
    # The kernel reports the end of both directions without an event mask.
    return bool(_poller(sock, select.POLLRDHUP).poll(0))


def _poller(sock: socket.socket, events: int) -> select.poll:
    poller = select.poll()
    poller.register(sock, events)
    return poller


def wait_until_closed(sock: socket.socket) -> None:
    """Block until the peer closes a connection without data, or `shut` is called."""
    with contextlib.suppress(OSError):
        while sock.recv(1):
            pass


def receive_exactly(sock: socket.socket, length: int, deadline: Deadline | None = None) -> bytes:
    """Receive `length` bytes. Raises ConnectionError if the connection ends before, TimeoutError after the timeout.

    The socket's receive timeout restarts with each piece of data. A `deadline` does not.
    """
    data = b""
    while len(data) < length:
        if deadline is not None:
            set_receive_timeout(sock, deadline.remaining())
        try:
            # One call receives everything, unless a signal interrupts it.
            more = sock.recv(length - len(data), socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise TimeoutError(LATE) from error
        if not more:
            raise ConnectionError("connection closed by the other side")
        data += more
    return data


def send_all(sock: socket.socket, data: bytes, deadline: Deadline) -> None:
    """Send all bytes. Raises OSError; TimeoutError at the deadline, which the kernel reports as EAGAIN."""
    set_send_timeout(sock, deadline.remaining())
    try:
        sock.sendall(data)
    except BlockingIOError as error:
        raise TimeoutError(LATE) from error


def set_send_timeout(sock: socket.socket, seconds: float) -> None:
    _set_timeout(sock, socket.SO_SNDTIMEO, seconds)


def set_receive_timeout(sock: socket.socket, seconds: float) -> None:
    """Set the receive timeout in seconds. 0: none."""
    _set_timeout(sock, socket.SO_RCVTIMEO, seconds)


def _set_timeout(sock: socket.socket, option: int, seconds: float) -> None:
    """Set the kernel's own timeout, which leaves the socket blocking."""
    whole = int(seconds)
    micros = int((seconds - whole) * 1_000_000)
    if seconds > 0 and whole == micros == 0:
        micros = 1
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", whole, micros))
