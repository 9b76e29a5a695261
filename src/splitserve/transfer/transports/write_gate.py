"""Fence of memory that senders write to directly: it admits writes and proves when the last one has ended.

1. The receiver makes a gate, an anonymous file, for each session. A sender on the same host opens it again: a key.
2. Around every bounded piece of a write the sender holds a shared lock on the file and checks that the gate is open.
3. The receiver closes the gate by a byte in the file. No piece begins any more.
4. Once the receiver gets the exclusive lock, the last piece has ended too. That is the proof.

The lock is the kernel's (flock). It is released when a sender dies, and stays with one that is stopped inside a piece.
It belongs to an open file description, so a key opens the file again instead of sharing a descriptor.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from contextlib import AbstractContextManager

from splitserve.transfer.transports.base import WriteRefused

_CLOSED = b"\x01"


class WriteGate:
    """The receiver's end, open until `close_for_good`."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("splitserve-gate", os.MFD_CLOEXEC)
        # A key maps this byte, so it must exist.
        os.ftruncate(self.fd, len(_CLOSED))
        self._is_empty = False

    def close_for_good(self) -> None:
        """Let no piece begin any more. Idempotent."""
        os.pwrite(self.fd, _CLOSED, 0)

    def is_closed(self) -> bool:
        """Return whether the gate is closed and no sender is inside any more."""
        if not self._is_empty and os.pread(self.fd, 1, 0) == _CLOSED:
            self._is_empty = _try_lock(self.fd, fcntl.LOCK_EX)
        return self._is_empty

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            os.close(self.fd)


class GateKey:
    """A sender's end. `fd`: any descriptor of the gate's file. The caller keeps it."""

    def __init__(self, fd: int) -> None:
        path = f"/proc/self/fd/{fd}"
        # Checked for every piece; a read of the file would make that a quarter slower. A separate descriptor, because a
        # mapping would keep the lock of a descriptor that it shares.
        with open(path, "rb") as file:
            self._said = mmap.mmap(file.fileno(), len(_CLOSED), access=mmap.ACCESS_READ)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def held(self) -> AbstractContextManager[None]:
        """Return a context in which the receiver waits for us. Raises WriteRefused if the gate is closed."""
        return _Held(self._fd, self._said)

    def close(self) -> None:
        """Close the key. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            self._said.close()


class _Held:
    """Context manager. As a generator it would take a microsecond more, of the ten that a page takes."""

    __slots__ = ("_fd", "_said")

    def __init__(self, fd: int, said: mmap.mmap) -> None:
        self._fd, self._said = fd, said

    def __enter__(self) -> None:
        if not _try_lock(self._fd, fcntl.LOCK_SH):
            raise WriteRefused("the session was drained")
        # Lock first: the receiver waits for a sender that has the lock and found the gate open.
        if self._said[:] == _CLOSED:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            raise WriteRefused("the session was drained")

    def __exit__(self, *error: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
