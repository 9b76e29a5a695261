"""Frames of the TCP transport on blocking sockets. All integers are little-endian.

  hello   magic, version, length of the session id | session id                                  sender -> receiver
  write   magic, version, number of ranges, ticket id, bytes in all | ranges | bytes             sender -> receiver
  reply   magic, ticket id (HELLO_ID for the hello), length of the refusal | refusal             receiver -> sender

A range is (region u32, offset u64, length u64) of the receiver's memory. No refusal means: done.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from splitserve.core.layout import Copy, Region

MAGIC = b"SSKV"
VERSION = 1
HELLO_ID = (1 << 64) - 1

# Buffers handed to one system call. Linux takes 1024; fewer than that saves nothing.
MAX_BUFFERS_PER_CALL = 1024
# Target ranges of one write: 20 MiB of table.
MAX_RANGES = 1 << 20
MAX_TEXT_BYTES = 4096
SOCKET_BUFFER_BYTES = 4 << 20
# A peer that has connected must say who it is, and one that was refused must stop sending, within so many seconds.
GRACE_SECONDS = 10.0

_HELLO = struct.Struct("<4sHH")
_WRITE = struct.Struct("<4sHIQQ")
_REPLY = struct.Struct("<4sQH")
_RANGE = np.dtype([("region", "<u4"), ("offset", "<u8"), ("length", "<u8")])


class ProtocolError(Exception):
    """The other end does not speak our protocol, or breaks it."""


class Deadline:
    """A wait's end on the system's clock: sockets know no other."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Raises TimeoutError when nothing remains."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"over {self.seconds:g} s")
        return left


class Memory:
    """Registered regions as buffers. Views only: the bytes belong to whoever registered them."""

    def __init__(self) -> None:
        self._views: list[memoryview] = []
        self._lengths = np.zeros(0, dtype=np.uint64)

    def add(self, regions: Sequence[Region]) -> None:
        self._views += [memoryview((ctypes.c_char * r.length).from_address(r.address)).cast("B") for r in regions]
        self._lengths = np.array([len(view) for view in self._views], dtype=np.uint64)

    def slices(self, ranges: Iterable[tuple[int, int, int]]) -> list[memoryview]:
        """Buffers of ranges (region, offset, length) that `check` has passed."""
        views = self._views
        return [views[region][offset : offset + length] for region, offset, length in ranges]

    def check(self, ranges: np.ndarray) -> str | None:
        """Why not every range of dtype _RANGE lies inside its region; None where all do."""
        known = ranges["region"] < len(self._views)
        if not known.all():
            region = int(ranges["region"][~known][0])
            return f"region {region} is not registered ({len(self._views)} are)"
        limits = self._lengths[ranges["region"]]
        # Without a sum that could wrap around.
        inside = (ranges["length"] <= limits) & (ranges["offset"] <= limits - np.minimum(ranges["length"], limits))
        if not inside.all():
            i = int(np.flatnonzero(~inside)[0])
            region, offset, length = (int(x) for x in ranges[i])
            return f"[{offset}, {offset + length}) is out of bounds of region {region} of {int(limits[i])} bytes"
        return None


class WriteFrame:
    """One write, ready to be sent. Raises ValueError for ranges outside our own memory."""

    def __init__(self, ticket_id: int, copies: Sequence[Copy], memory: Memory) -> None:
        if len(copies) > MAX_RANGES:
            raise ValueError(f"{len(copies)} copies in one write: at most {MAX_RANGES}")
        self.ticket_id = ticket_id
        sources = [(c.src_region, c.src_offset, c.length) for c in copies]
        try:
            source_table = np.array(sources, dtype=_RANGE)
            targets = np.array([(c.dst_region, c.dst_offset, c.length) for c in copies], dtype=_RANGE)
        except OverflowError as error:
            raise ValueError(f"source of a copy, or its target, is out of range: {error}") from error
        if error_text := memory.check(source_table):
            raise ValueError(f"source of a copy: {error_text}")
        self.num_bytes = int(targets["length"].sum())
        header = _WRITE.pack(MAGIC, VERSION, len(copies), ticket_id, self.num_bytes)
        self._buffers = [memoryview(header), memoryview(targets.tobytes()), *memory.slices(sources)]

    def send(self, sock: socket.socket, deadline: Deadline) -> None:
        _set_timeout(sock, socket.SO_RCVTIMEO, deadline.remaining())
        _move_all(self._buffers, lambda buffers: _send_some(sock, buffers, deadline))


def connect(endpoint: str, deadline: Deadline, is_cancelled: Callable[[], bool]) -> socket.socket:
    """A blocking socket to `endpoint`, unless cancelled on the way."""
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        tune(sock)
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.connect((host, int(port)))
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


def is_broken(sock: socket.socket) -> bool:
    """Whether the peer has closed an idle connection (or says something unasked, which is as bad)."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))


def send_hello(sock: socket.socket, session_id: str, deadline: Deadline) -> None:
    """Name the session. Raises ProtocolError where it is refused."""
    name = session_id.encode()
    _set_timeout(sock, socket.SO_SNDTIMEO, deadline.remaining())
    sock.sendall(_HELLO.pack(MAGIC, VERSION, len(name)) + name)
    if refusal := receive_reply(sock, HELLO_ID, deadline):
        raise ProtocolError(refusal)


def receive_hello(sock: socket.socket) -> str:
    tune(sock)
    _set_timeout(sock, socket.SO_SNDTIMEO, GRACE_SECONDS)
    _set_timeout(sock, socket.SO_RCVTIMEO, GRACE_SECONDS)
    magic, version, length = _HELLO.unpack(_receive_exactly(sock, _HELLO.size))
    if magic != MAGIC or version != VERSION or length > MAX_TEXT_BYTES:
        raise ProtocolError(f"not a hello of data protocol version {VERSION}: {magic!r} version {version}")
    session_id = _receive_exactly(sock, length).decode(errors="replace")
    # From here on the sender's deadline counts: a connection may be idle for long.
    _set_timeout(sock, socket.SO_RCVTIMEO, 0)
    return session_id


def send_reply(sock: socket.socket, ticket_id: int, refusal: str | None) -> None:
    text = (refusal or "").encode()[:MAX_TEXT_BYTES]
    sock.sendall(_REPLY.pack(MAGIC, ticket_id, len(text)) + text)


def receive_reply(sock: socket.socket, ticket_id: int, deadline: Deadline) -> str | None:
    """The refusal, or None for done."""
    _set_timeout(sock, socket.SO_RCVTIMEO, deadline.remaining())
    magic, replied, length = _REPLY.unpack(_receive_exactly(sock, _REPLY.size))
    if magic != MAGIC or replied != ticket_id or length > MAX_TEXT_BYTES:
        raise ProtocolError(f"reply to write {replied} instead of {ticket_id}")
    return _receive_exactly(sock, length).decode(errors="replace") if length else None


def receive_write(sock: socket.socket, memory: Memory) -> bool:
    """Take one write into place and acknowledge it. False when the connection should end."""
    try:
        header = _receive_exactly(sock, _WRITE.size)
    except ConnectionError:
        return False
    magic, version, num_ranges, ticket_id, num_bytes = _WRITE.unpack(header)
    if magic != MAGIC or version != VERSION or num_ranges > MAX_RANGES:
        raise ProtocolError(f"not a write of data protocol version {VERSION}")
    ranges = np.frombuffer(_receive_exactly(sock, num_ranges * _RANGE.itemsize), dtype=_RANGE)
    refusal = memory.check(ranges)
    if refusal is None and int(ranges["length"].sum()) != num_bytes:
        refusal = f"{num_bytes} bytes announced for ranges of {int(ranges['length'].sum())}"
    if refusal is not None:
        send_reply(sock, ticket_id, refusal)
        _discard(sock, num_bytes)
        return False
    _move_all(memory.slices(ranges.tolist()), lambda buffers: _receive_some(sock, buffers))
    send_reply(sock, ticket_id, None)
    return True


def _move_all(buffers: list[memoryview], move: Callable[[list[memoryview]], int]) -> None:
    """Call `move` with batches of buffers until all their bytes are moved; it may stop anywhere inside a batch."""
    first = 0
    while first < len(buffers):
        moved = move(buffers[first : first + MAX_BUFFERS_PER_CALL])
        while first < len(buffers) and moved >= len(buffers[first]):
            moved -= len(buffers[first])
            first += 1
        if moved:
            buffers[first] = buffers[first][moved:]


def _send_some(sock: socket.socket, buffers: list[memoryview], deadline: Deadline) -> int:
    _set_timeout(sock, socket.SO_SNDTIMEO, deadline.remaining())
    with _timeouts_by_name():
        return sock.sendmsg(buffers)


def _receive_some(sock: socket.socket, buffers: list[memoryview]) -> int:
    if not any(buffers):
        return 0
    # The kernel returns when all is there, or the connection ends.
    n = sock.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
    if n == 0:
        raise ConnectionError("connection closed inside a write")
    return n


def _receive_exactly(sock: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        with _timeouts_by_name():
            n = sock.recv_into(view, len(view), socket.MSG_WAITALL)
        if n == 0:
            raise ConnectionError("connection closed by the other side")
        view = view[n:]
    return bytes(data)


def _discard(sock: socket.socket, num_bytes: int) -> None:
    """Read what a refused peer had sent already: closing before that could destroy the refusal on its way."""
    shut_at = Deadline(GRACE_SECONDS)
    scratch = bytearray(1 << 20)
    with contextlib.suppress(OSError):
        while num_bytes > 0:
            _set_timeout(sock, socket.SO_RCVTIMEO, shut_at.remaining())
            n = sock.recv_into(scratch, min(num_bytes, len(scratch)))
            if n == 0:
                return
            num_bytes -= n


def _set_timeout(sock: socket.socket, option: int, seconds: float) -> None:
    """The kernel's own timeout, which leaves the socket blocking (0: none)."""
    whole = int(seconds)
    micros = int((seconds - whole) * 1_000_000)
    if seconds > 0 and whole == micros == 0:
        micros = 1
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", whole, micros))


@contextlib.contextmanager
def _timeouts_by_name() -> Iterator[None]:
    """The kernel reports SO_SNDTIMEO and SO_RCVTIMEO as EAGAIN."""
    try:
        yield
    except BlockingIOError as error:
        raise TimeoutError("the peer did not keep up") from error
