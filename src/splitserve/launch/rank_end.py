"""The end of a rank's process by an error, and how long it may take to end with its standard input."""

from __future__ import annotations

import logging
import os
import threading
from typing import NoReturn

import zmq

from splitserve.core.parallel import ParallelRank
from splitserve.messages import SchedulerFailed, encode

logger = logging.getLogger(__name__)

# Seconds from the end of standard input until a rank that is inside a step, a load or a collective is ended by force.
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
