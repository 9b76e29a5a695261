"""Waits for the end of an earlier request with the same id."""

from __future__ import annotations

import asyncio

from splitserve.api.responses import IdWaits


async def test_one_request_waits_for_an_id_and_a_second_returns_at_once() -> None:
    waits, held = IdWaits(), {"a", "b"}
    first = asyncio.create_task(waits.wait(["a", "c"], held.__contains__, 60))
    await asyncio.sleep(0)
    await waits.wait(["b", "a"], held.__contains__, 60)
    assert not first.done()
    held.clear()
    await first
    # The id is held anew and may be waited for again, by a request with no time left too.
    held.add("a")
    await waits.wait(["a"], held.__contains__, 0)
