"""A way for any thread to wake one that waits on file descriptors. Portable: a pair of connected sockets."""

from __future__ import annotations

import contextlib
import socket


class Waker:
    """`wake` from any thread; the waiter polls `fileno()` for reading and calls `clear` before it looks for work."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        """Never blocks. A full buffer means that a wake-up is pending already; a closed waker has nobody to wake."""
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
