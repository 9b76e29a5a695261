"""The pool of threads for large prompts: off the event loop, by size, in order, bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from splitserve.core.errors import CapacityError, DeadlineExceededError
from splitserve.server.front_end import INLINE_BYTES, MEDIUM_BYTES, PromptPool
from support.loop_clock import advance

# Seconds in which everything here happens, but for hangs.
DEADLINE = 60.0


class Blocker:
    """Work that ends when it is released."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.release = threading.Event()

    def __call__(self) -> str:
        self.started.set()
        assert self.release.wait(DEADLINE)
        return threading.current_thread().name


@pytest.fixture
async def blocker() -> AsyncIterator[Blocker]:
    blocker = Blocker()
    yield blocker
    blocker.release.set()


async def run(pool: PromptPool, num_bytes: int) -> str:
    async with asyncio.timeout(DEADLINE):
        return await pool.run(num_bytes, lambda: threading.current_thread().name)


async def test_small_requests_run_in_the_event_loop_and_large_ones_in_threads_by_size() -> None:
    pool = PromptPool()
    assert await run(pool, INLINE_BYTES) == threading.current_thread().name
    assert (await run(pool, INLINE_BYTES + 1)).startswith("medium-prompts")
    assert (await run(pool, MEDIUM_BYTES + 1)).startswith("large-prompts")
    pool.close()


async def test_a_large_request_delays_neither_the_event_loop_nor_medium_ones(blocker: Blocker) -> None:
    pool = PromptPool()
    large = asyncio.create_task(pool.run(MEDIUM_BYTES + 1, blocker))
    assert await asyncio.to_thread(blocker.started.wait, DEADLINE)
    await run(pool, MEDIUM_BYTES)
    assert not large.done()
    blocker.release.set()
    assert (await large).startswith("large-prompts")
    pool.close()


async def test_requests_beyond_the_bound_are_rejected(blocker: Blocker) -> None:
    pool = PromptPool(max_waiting=2)
    waiting = [asyncio.create_task(pool.run(MEDIUM_BYTES, work)) for work in (blocker, lambda: "second")]
    assert await asyncio.to_thread(blocker.started.wait, DEADLINE)
    with pytest.raises(CapacityError, match="2 large requests wait"):
        await run(pool, MEDIUM_BYTES)
    blocker.release.set()
    assert (await asyncio.gather(*waiting))[1] == "second"
    await run(pool, MEDIUM_BYTES)
    pool.close()


async def test_a_request_that_waits_too_long_ends_and_frees_its_place(blocker: Blocker) -> None:
    pool = PromptPool(max_waiting=1, timeout=DEADLINE)
    waiting = asyncio.create_task(pool.run(MEDIUM_BYTES, blocker))
    assert await asyncio.to_thread(blocker.started.wait, DEADLINE)
    advance(DEADLINE)
    with pytest.raises(DeadlineExceededError, match="stage: tokenization"):
        await waiting
    blocker.release.set()
    await run(PromptPool(), MEDIUM_BYTES)
    with pytest.raises(ValueError, match="bad"):
        await pool.run(MEDIUM_BYTES, lambda: int("bad"))
    pool.close()


async def test_a_client_that_leaves_frees_its_place(blocker: Blocker) -> None:
    pool = PromptPool(max_waiting=1)
    waiting = asyncio.create_task(pool.run(MEDIUM_BYTES, blocker))
    assert await asyncio.to_thread(blocker.started.wait, DEADLINE)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    blocker.release.set()
    await run(pool, MEDIUM_BYTES)
    pool.close()
