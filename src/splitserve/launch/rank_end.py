"""How a rank's process ends: with its standard input, when whoever started it closed it or is gone, or by an error."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import NoReturn

import zmq

from splitserve.core.parallel import ParallelRank
from splitserve.messages import SchedulerFailed, encode

logger = logging.getLogger(__name__)

# Seconds a process gets to end in order before it is ended from outside what it is in: a step, a load, a collective.
GRACE = 5.0
# Seconds that a rank waits with its word on a step that failed. It may fail by another's end: then the front end, which
# knows that one, ends this one meanwhile.
_OTHERS_FIRST = 0.3
# How long its last words may take.
_LINGER_MS = 1000


def let_others_speak() -> None:
    """Before a rank says why it cannot go on."""
    threading.Event().wait(_OTHERS_FIRST)


def end_rank(rank: ParallelRank, from_scheduler: str, message: str) -> NoReturn:
    """End this process as it is, from any thread: what is open may wait for ranks that wait for this one.

    `from_scheduler`: ZMQ endpoint of the front end, which is told why.
    """
    logger.error("rank %s: %s", rank.name, message)
    let_others_speak()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(from_scheduler)
    socket.send(encode(SchedulerFailed(message=f"rank {rank.name}: {message}")))
    context.destroy(linger=_LINGER_MS)
    os._exit(1)


def end_with_input(on_end: Callable[[], None]) -> None:
    """Have a thread watch the input from now on; it calls `on_end`."""
    threading.Thread(target=_watch, args=(on_end,), name="end-of-input", daemon=True).start()


def _watch(on_end: Callable[[], None]) -> None:
    # Not through sys.stdin: its lock, held by a blocked daemon thread, would abort the interpreter's exit.
    while os.read(0, 4096):
        pass
    on_end()
    # Nobody waits any more for what the main thread is in.
    threading.Event().wait(GRACE)
    os._exit(1)
