"""A follower's process: `python -m splitserve.launch.rank_process`, started by a worker's front end beside a scheduler.

1. One line of JSON on standard input says everything (`SchedulerStart`).
2. It meets the other ranks, loads its share of the model, and opens its end of the hand-over.
3. It carries out the driver's orders up to the last. Meanwhile its KVManager moves rooms in a thread of its own.

Whatever goes wrong ends it, with word to the front end: the ranks are out of step then. It ends with its input, too.
"""

from __future__ import annotations

import functools
import logging
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack

import msgspec

from splitserve.core.process_end import leave, watch_starter
from splitserve.core.request import DisaggregationMode
from splitserve.disaggregation.transports import needs_shareable_pool
from splitserve.engine.build import build_engine
from splitserve.errors import SplitserveError
from splitserve.launch.group_rooms import follow_rooms
from splitserve.launch.interpreter import set_up_interpreter
from splitserve.launch.logs import setup_logger
from splitserve.launch.rank_channel import EXCHANGE_TIMEOUT, FollowerChannel
from splitserve.launch.rank_end import GRACE, end_rank
from splitserve.launch.rank_group import RankPlace, meet, pipe_net
from splitserve.launch.rank_share import share_of_rank
from splitserve.launch.scheduler_link import SchedulerStart
from splitserve.launch.window_demand import window_demand

logger = logging.getLogger(__name__)


def main() -> int:
    # Ctrl-C goes to the whole process group; ending in order is the front end's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=SchedulerStart)
    setup_logger(start.config.server.log_level)
    # The driver's input ends, too, and its last order ends this loop.
    watch_starter(lambda: None, GRACE)
    end = functools.partial(end_rank, start.rank, start.from_scheduler)
    with ExitStack() as closing:
        try:
            _follow(start, end, closing)
        except SplitserveError as error:
            end(error.message)
        except Exception as error:
            logger.exception("this rank could not go on")
            end(f"{type(error).__name__}: {error}")
    return 0


def _follow(start: SchedulerStart, end: Callable[[str], None], closing: ExitStack) -> None:
    config, rank = start.config, start.rank
    assert start.endpoints is not None
    channel = FollowerChannel(start.endpoints, rank, pipe_net(start))
    closing.callback(channel.close)
    model, cache = share_of_rank(start)
    ranks = closing.enter_context(meet(start, start.endpoints.init_method, rank, model.device))
    engine = build_engine(
        model,
        cache,
        shareable_pool=needs_shareable_pool(config.disaggregation.transfer_backend),
        ranks=ranks,
        pp_layers=config.parallel.pp_layers,
        windows=window_demand(config),
    )
    closing.callback(engine.close)
    if config.disaggregation.mode is not DisaggregationMode.NULL:
        exchange = functools.partial(channel.exchange, timeout=EXCHANGE_TIMEOUT)
        place = RankPlace(rank, start.instance, exchange, end)
        follow_rooms(config.disaggregation, engine, start.bootstrap_url, place, channel, closing)
    runner = engine.follower()
    closing.enter_context(set_up_interpreter())
    for order in channel.orders():
        runner.run(order)


if __name__ == "__main__":
    leave(main())
