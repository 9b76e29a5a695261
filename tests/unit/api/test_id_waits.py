"""Waits for the end of an earlier request with the same id."""

from __future__ import annotations

import asyncio

import pytest

from splitserve.api.responses import IdWaits
from splitserve.core.errors import DuplicateRequestError

# Seconds after which a wait counts as unlimited.
LONG = 10.0


async def test_one_request_waits_for_an_id_and_another_is_rejected_at_once() -> None:
    waits, held = IdWaits(), {"a"}
    first = asyncio.create_task(waits.wait(["a", "c"], held.__contains__, None))
    await asyncio.sleep(0)
    for name in ("a", "c"):
        with pytest.raises(DuplicateRequestError, match=f"request {name} "):
            await waits.wait(["b", name], held.__contains__, None)
    assert not first.done()
    held.clear()
    await asyncio.wait_for(first, LONG)


async def test_ids_can_be_waited_for_again_after_a_cancelled_wait() -> None:
    waits, held = IdWaits(), {"a"}
    first = asyncio.create_task(waits.wait(["a"], held.__contains__, None))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(waits.wait(["a"], held.__contains__, None))
    await asyncio.sleep(0)
    assert not second.done()
    held.clear()
    await asyncio.wait_for(second, LONG)


@pytest.mark.parametrize(("held", "seconds"), [({"a"}, 0.0), ({"a"}, -1.0), (set(), None)])
async def test_without_time_left_or_with_free_ids_nothing_waits(held: set[str], seconds: float | None) -> None:
    wait = asyncio.create_task(IdWaits().wait(["a"], held.__contains__, seconds))
    await asyncio.sleep(0)
    assert wait.done()
    await wait
