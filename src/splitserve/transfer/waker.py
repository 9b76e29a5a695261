"""Wake-up of a thread that waits on file descriptors, from any thread. Portable: a pair of connected sockets."""

from __future__ import annotations

import contextlib
import socket


class Waker:
    """Wake-up for a waiting thread, from any other. The waiter polls `fileno()`, and calls `clear` before its work."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        """Wake the waiter without blocking. A full buffer means a pending wake-up; a closed waker has no waiter."""
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
