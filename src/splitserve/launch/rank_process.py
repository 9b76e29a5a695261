"""A follower's process: `python -m splitserve.launch.rank_process`, started by a worker's front end beside a scheduler.

1. One line of JSON on standard input says everything (`SchedulerStart`).
2. It meets the other ranks, loads its share of the model, and opens its end of the hand-over.
3. It carries out the driver's orders up to the last. Meanwhile its KVManager moves rooms in a thread of its own.

Whatever goes wrong ends it, with word to the front end: the ranks are out of step then. It ends with its input, too.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
from contextlib import ExitStack
from typing import NoReturn

import msgspec
import zmq

from splitserve.core.request import DisaggregationMode
from splitserve.disaggregation.transports import needs_shareable_pool
from splitserve.engine.build import build_engine
from splitserve.errors import SplitserveError
from splitserve.launch.group_rooms import follow_rooms
from splitserve.launch.interpreter import set_up_interpreter
from splitserve.launch.logs import setup_logger
from splitserve.launch.rank_channel import EXCHANGE_TIMEOUT, FollowerChannel
from splitserve.launch.rank_end import end_with_input, let_others_speak
from splitserve.launch.rank_group import RankPlace, meet
from splitserve.launch.rank_share import share_of_rank
from splitserve.launch.scheduler_link import SchedulerStart
from splitserve.messages import SchedulerFailed, encode

logger = logging.getLogger(__name__)

# How long its last words may take.
_LINGER_MS = 1000


def main() -> int:
    # Ctrl-C goes to the whole process group; ending in order is the front end's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=SchedulerStart)
    setup_logger(start.config.server.log_level)
    # The driver hears the same, and gives its last order.
    end_with_input(lambda: None)
    with ExitStack() as closing:
        try:
            _follow(start, closing)
        except SplitserveError as error:
            _end(start, error.message)
        except Exception as error:
            logger.exception("this rank could not go on")
            _end(start, f"{type(error).__name__}: {error}")
    return 0


def _follow(start: SchedulerStart, closing: ExitStack) -> None:
    config, rank = start.config, start.rank
    assert start.endpoints is not None
    channel = FollowerChannel(start.endpoints, rank)
    closing.callback(channel.close)
    model, cache = share_of_rank(start)
    ranks = closing.enter_context(meet(start.endpoints, rank, model.device))
    engine = build_engine(
        model,
        cache,
        shareable_pool=needs_shareable_pool(config.disaggregation.transfer_backend),
        ranks=ranks,
        pp_layers=config.parallel.pp_layers,
    )
    closing.callback(engine.close)
    if config.disaggregation.mode is not DisaggregationMode.NULL:
        exchange = functools.partial(channel.exchange, timeout=EXCHANGE_TIMEOUT)
        place = RankPlace(rank, start.instance, exchange)
        follow_rooms(config.disaggregation, engine, start.bootstrap_url, place, channel, closing)
    runner = engine.follower()
    closing.enter_context(set_up_interpreter())
    for order in channel.orders():
        runner.run(order)


def _end(start: SchedulerStart, message: str) -> NoReturn:
    """Say why, where the driver would say it, and end as it is: what is open may wait for ranks that wait here."""
    logger.error("rank %s: %s", start.rank.name, message)
    let_others_speak()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(start.from_scheduler)
    socket.send(encode(SchedulerFailed(message=f"rank {start.rank.name}: {message}")))
    context.destroy(linger=_LINGER_MS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
