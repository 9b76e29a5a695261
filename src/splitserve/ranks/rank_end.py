"""End of a rank's process after an error, and time limits for its end."""

from __future__ import annotations

import logging
import os
import threading
from typing import NoReturn

import zmq

from splitserve.core.messages import SchedulerFailed, encode
from splitserve.core.parallel import ParallelRank

logger = logging.getLogger(__name__)

# Seconds from the end of standard input until a rank inside a step, a load or a collective is killed.
GRACE = 5.0
# Seconds that a rank waits before it reports a failed step. The cause may be the end of another rank. Then the front
# end receives the report of that rank first, and ends this rank.
_OTHERS_FIRST = 0.3
# Milliseconds to deliver the last message.
_LINGER_MS = 1000


def let_others_speak() -> None:
    """Wait before this rank reports its failure, so that other ranks can report theirs first."""
    threading.Event().wait(_OTHERS_FIRST)


def end_rank(rank: ParallelRank, from_scheduler: str, message: str) -> NoReturn:
    """End this process at once, from any thread. No cleanup: it could wait for ranks that wait for this one.

    `from_scheduler`: ZMQ endpoint of the front end, which receives the reason.
    """
    logger.error("rank %s: %s", rank.name, message)
    let_others_speak()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(from_scheduler)
    socket.send(encode(SchedulerFailed(message=f"rank {rank.name}: {message}")))
    context.destroy(linger=_LINGER_MS)
    os._exit(1)
