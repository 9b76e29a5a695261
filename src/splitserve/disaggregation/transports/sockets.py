"""Blocking sockets with deadlines: what the transports' connections have in common."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator

SOCKET_BUFFER_BYTES = 4 << 20
LATE = "the peer did not keep up"
# To linger for no time at all: closing ends the connection instead of saying that nothing more is said.
_RESET = struct.pack("@ii", 1, 0)


class Deadline:
    """A wait's end on the system's clock: sockets know no other."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds; negative once it is over."""
        return self._end - time.monotonic()

    def remaining(self) -> float:
        """Raises TimeoutError when nothing remains."""
        left = self.left
        if left <= 0:
            raise TimeoutError(f"over {self.seconds:g} s")
        return left


def connect(endpoint: str, deadline: Deadline, is_cancelled: Callable[[], bool]) -> socket.socket:
    """A blocking socket to `endpoint` ("host:port" or "[host6]:port"), unless cancelled on the way. Raises OSError."""
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        tune(sock)
        sock.setblocking(False)
        code = sock.connect_ex((host, int(port)))
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, f"{endpoint}: {os.strerror(code)}")
        poller = select.poll()
        poller.register(sock, select.POLLOUT)
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
    """No delay for the short frames, room for the long ones."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)


def shut(sock: socket.socket) -> None:
    """Wake whoever is blocked on the socket. Its owner closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def abort(sock: socket.socket) -> None:
    """As `shut`, of a connection whose other side sends; when its owner closes it, that side hears of it at once.

    After a shutdown alone the kernel offers no room any more, whatever is read, and a sender that waits for some would
    go on asking for a minute. What the other side has not read yet may be lost to it.
    """
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    shut(sock)


def is_broken(sock: socket.socket) -> bool:
    """Whether the peer has closed an idle connection (or says something unasked, which is as bad)."""
    return has_data(sock)


def end_of(sock: socket.socket) -> Callable[[], bool]:
    """`is_broken`, to be asked many times: in half the time. The socket must stay open."""
    poller = _poller(sock, select.POLLIN)
    return lambda: bool(poller.poll(0))


def has_ended(sock: socket.socket) -> bool:
    """Whether either end has ended the connection, also where something said before is still to be read."""
    # That both ends have is reported unasked.
    return bool(_poller(sock, select.POLLRDHUP).poll(0))


def has_data(sock: socket.socket) -> bool:
    """Whether a read would not block: something was said, or the connection has ended."""
    return end_of(sock)()


def _poller(sock: socket.socket, events: int) -> select.poll:
    poller = select.poll()
    poller.register(sock, events)
    return poller


def wait_until_closed(sock: socket.socket) -> None:
    """Block until the peer, or `shut` here, ends a connection on which nothing is said."""
    with contextlib.suppress(OSError):
        while sock.recv(1):
            pass


def receive_exactly(sock: socket.socket, length: int, deadline: Deadline | None = None) -> bytes:
    """Raises ConnectionError where the connection ends before, TimeoutError at the receive timeout.

    That begins anew whenever some of it has come, but for a `deadline`, which is set as the timeout.
    """
    data = b""
    while len(data) < length:
        if deadline is not None:
            set_receive_timeout(sock, deadline.remaining())
        try:
            # All of it at once, but for a signal.
            more = sock.recv(length - len(data), socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise TimeoutError(LATE) from error
        if not more:
            raise ConnectionError("connection closed by the other side")
        data += more
    return data


def set_send_timeout(sock: socket.socket, seconds: float) -> None:
    _set_timeout(sock, socket.SO_SNDTIMEO, seconds)


def set_receive_timeout(sock: socket.socket, seconds: float) -> None:
    """0: none."""
    _set_timeout(sock, socket.SO_RCVTIMEO, seconds)


def _set_timeout(sock: socket.socket, option: int, seconds: float) -> None:
    """The kernel's own timeout, which leaves the socket blocking."""
    whole = int(seconds)
    micros = int((seconds - whole) * 1_000_000)
    if seconds > 0 and whole == micros == 0:
        micros = 1
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", whole, micros))


@contextlib.contextmanager
def timeouts_by_name() -> Iterator[None]:
    """The kernel reports SO_SNDTIMEO and SO_RCVTIMEO as EAGAIN."""
    try:
        yield
    except BlockingIOError as error:
        raise TimeoutError(LATE) from error
