"""Process of a follower, started by a worker's front end beside a scheduler.

The command is `python -m splitserve.process.quick_start splitserve.ranks.rank_process`.

1. One line of JSON on standard input contains its configuration (`SchedulerStart`).
2. It joins the process group and loads its shard of the model.
3. It executes the driver's orders up to the last one (`follower.py`). They also open its part of the KV transfer. Then
   its KVManager drives rooms in a thread of its own.

Any error is reported to the front end and ends the process, because the ranks are out of step then. It also ends with
its input.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import NoReturn

import msgspec
import zmq

from splitserve.core.errors import SplitserveError
from splitserve.core.messages import SchedulerFailed, encode
from splitserve.core.parallel import ParallelRank
from splitserve.engine.build import build_engine
from splitserve.process.process_end import watch_starter
from splitserve.process.settings import set_up_interpreter, setup_logger
from splitserve.ranks.follower import Follower
from splitserve.ranks.group import RankPlace, meet, pipe_net, share_of_rank, window_demand
from splitserve.ranks.rank_channel import EXCHANGE_TIMEOUT, FollowerChannel
from splitserve.ranks.rank_heartbeat import send_heartbeats
from splitserve.ranks.scheduler_start import SchedulerStart
from splitserve.transfer.transports import pool_sharing_of

logger = logging.getLogger(__name__)


def main() -> int:
    # Ctrl-C is sent to the whole process group; only the front end handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=SchedulerStart)
    setup_logger(start.config.server.log_level, start.config.server.log_format)
    # The driver's input ends as well, and its last order ends this loop.
    watch_starter(lambda: None, GRACE)
    end = functools.partial(end_rank, start.rank, start.from_scheduler)
    with ExitStack() as closing:
        try:
            _follow(start, end, closing)
        except SplitserveError as error:
            end(error.message, exit_code=error.exit_code)
        except Exception as error:
            logger.exception("this rank could not go on")
            end(f"{type(error).__name__}: {error}")
    return 0


def _follow(start: SchedulerStart, end: Callable[[str], None], closing: ExitStack) -> None:
    config, rank = start.config, start.rank
    transfer = config.disaggregation
    assert start.endpoints is not None
    channel = FollowerChannel(start.endpoints, rank, pipe_net(start))
    closing.callback(channel.close)
    model, cache = share_of_rank(start)
    ranks = meet(start, model.device)
    assert ranks is not None
    closing.enter_context(ranks)
    engine = build_engine(
        model,
        cache,
        pool_sharing=pool_sharing_of(transfer.transfer_backend, transfer.transfer_options),
        ranks=ranks,
        pp_layers=config.parallel.pp_layers,
        draft_model=config.speculative.draft_model,
        draft_head=config.speculative.head,
        windows=window_demand(config),
    )
    closing.callback(engine.close)
    exchange = functools.partial(channel.exchange, timeout=EXCHANGE_TIMEOUT)
    follower = Follower(config, engine, RankPlace(rank, start.instance, exchange, end), channel)
    closing.callback(follower.close)
    closing.enter_context(set_up_interpreter())
    if start.heartbeat is not None:
        send_heartbeats(start.heartbeat)
    for order in channel.orders():
        follower.run(order)


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


def end_rank(rank: ParallelRank, from_scheduler: str, message: str, exit_code: int = 1) -> NoReturn:
    """End this process at once, from any thread. No cleanup: it could wait for ranks that wait for this one.

    `from_scheduler`: ZMQ endpoint of the front end, which receives the reason.
    """
    logger.error("rank %s: %s", rank.name, message)
    let_others_speak()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(from_scheduler)
    socket.send(encode(SchedulerFailed(message=f"rank {rank.name}: {message}", exit_code=exit_code)))
    context.destroy(linger=_LINGER_MS)
    os._exit(1)
