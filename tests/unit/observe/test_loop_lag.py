"""The lag of an event loop is how much later than planned a task runs."""

import asyncio
import contextlib

from prometheus_client import CollectorRegistry

from splitserve.core.clock import ManualClock
from splitserve.observe.loop_lag import LoopLag


async def test_time_in_which_the_loop_is_blocked_is_observed():
    registry, clock = CollectorRegistry(), ManualClock()
    lag = LoopLag(registry, "p:", clock)
    task = asyncio.create_task(lag.run(interval=0))
    await asyncio.sleep(0)
    # The task waits for its next turn, and meanwhile the loop is blocked.
    clock.advance(0.3)
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert registry.get_sample_value("p:event_loop_lag_seconds_sum") == 0.3
    assert registry.get_sample_value("p:event_loop_lag_seconds_bucket", {"le": "0.25"}) == (
        registry.get_sample_value("p:event_loop_lag_seconds_count") - 1
    )
    assert (lag.take_longest(), lag.take_longest()) == (0.3, 0.0)
