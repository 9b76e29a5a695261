"""One function in a process of its own, connected by a pipe: the second end of a transport, a limit, or a baseline."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any, Self

from splitserve.core.errors import SplitserveError

# Seconds for the process to be ready or to answer, and for its end after its connection is closed.
_TIMEOUT = 120.0
_END_TIMEOUT = 10.0


class SecondProcessError(SplitserveError):
    """The second process ended, or did not answer in time."""

    reason = "second_process"


class SecondProcess:
    """`run(connection, *args)` in another process. Use as a context manager.

    At the end of the block its connection is closed. If it does not end then, it is killed.
    """

    def __init__(self, run: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=run, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()
        self._process.join(_END_TIMEOUT)
        self.kill()

    def send(self, message: Any) -> None:
        """Send a message. Raises SecondProcessError if the process has ended."""
        try:
            self.connection.send(message)
        except OSError:
            raise self._ended() from None

    def receive(self, timeout: float = _TIMEOUT) -> Any:
        """Return the next message. Raises SecondProcessError if there is none."""
        try:
            if self.connection.poll(timeout):
                return self.connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        raise SecondProcessError(f"the second process did not answer within {timeout:g} s")

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended. Idempotent."""
        self._process.kill()
        self._process.join()

    def _ended(self) -> SecondProcessError:
        self._process.join(_END_TIMEOUT)
        return SecondProcessError(f"the second process ended with code {self._process.exitcode}: see its error above")
