"""When a process shall end: the first SIGTERM or SIGINT asks it to drain, the second to stop at once. Where something
else had it drain before (another host of its worker had a signal), its own first one changes nothing.

With `exit_with_parent`, the end of standard input stops it at once, too: whoever started it has died or let go of it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from splitserve.launch.http_server import HttpServer

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Lifecycle:
    def __init__(self) -> None:
        # Finish what runs, take nothing new, then end.
        self.draining = asyncio.Event()
        # End now. Implies `draining`.
        self.stopping = asyncio.Event()
        self._had_signal = False

    def request_end(self) -> None:
        """What a signal does: the first call drains, the second stops."""
        if self._had_signal:
            self.stop()
            return
        self._had_signal = True
        self.drain()

    def drain(self) -> None:
        """Idempotent, and no signal: the first one of those is still to come."""
        if not self.draining.is_set():
            logger.info("draining: running requests finish, new ones are refused; a second signal stops at once")
            self.draining.set()

    def stop(self) -> None:
        self.draining.set()
        self.stopping.set()

    @contextmanager
    def watch(self, *, exit_with_parent: bool) -> Iterator[None]:
        """Listen to signals, and to the parent, inside a running event loop."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.request_end)
        stdin = sys.stdin.fileno() if exit_with_parent else None
        if stdin is not None:
            os.set_blocking(stdin, False)
            loop.add_reader(stdin, self._read_parent, stdin)
        try:
            yield
        finally:
            if stdin is not None:
                loop.remove_reader(stdin)
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _read_parent(self, stdin: int) -> None:
        try:
            alive = bool(os.read(stdin, 4096))
        except BlockingIOError:
            return
        if not alive:
            logger.warning("the parent process is gone: stopping")
            asyncio.get_running_loop().remove_reader(stdin)
            self.stop()


async def end_server(server: HttpServer, lifecycle: Lifecycle, deadline: float) -> None:
    """Let running requests finish for `deadline` seconds, or until the process shall stop at once."""
    stop = asyncio.create_task(server.stop(deadline))
    stopping = asyncio.create_task(lifecycle.stopping.wait())
    await asyncio.wait({stop, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not stop.done():
        await server.abort()
    stopping.cancel()
    await asyncio.gather(stop, stopping, return_exceptions=True)
