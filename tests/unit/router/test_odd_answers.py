"""Odd answers of a worker to the router's own requests: none ends a watch, and none fills the memory."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from splitserve.core.request import DisaggregationMode
from splitserve.router.args import LBArgs
from splitserve.router.balancer import MiniLoadBalancer
from splitserve.router.live_samples import INTERVAL, SampledWorker, WorkerSampler
from splitserve.router.upstream import MAX_CHECK_ANSWER, error_object
from splitserve.router.worker import Worker

DEADLINE = 60.0
DEEP = b"[" * 200_000


class Answering:
    """Upstream with one answer to all requests."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.max_bytes: int | None = None

    async def ask(self, *_: Any, max_bytes: int, **__: Any) -> tuple[int, bytes, dict[str, str]]:
        self.max_bytes = max_bytes
        return 200, self.answer, {}


@pytest.fixture
def worker() -> Worker:
    return Worker("http://w:1", DisaggregationMode.NULL)


@pytest.mark.parametrize("body", [DEEP, b'{"error":' * 200_000, b"", b"\xff", b"[]", b'{"error": 5}'])
def test_a_body_without_an_error_has_none(body: bytes) -> None:
    assert error_object(body) == {}


async def test_a_sample_that_cannot_be_read_is_none_and_its_size_is_limited(worker: Worker) -> None:
    upstream = Answering(DEEP)
    sampler = WorkerSampler(upstream, lambda: None)  # type: ignore[arg-type]
    found = SampledWorker()
    assert await sampler.sample(worker, found) > INTERVAL
    assert (found.sample, upstream.max_bytes) == (None, MAX_CHECK_ANSWER)


async def test_a_watch_that_failed_is_logged_and_begins_again(caplog: pytest.LogCaptureFixture) -> None:
    balancer = MiniLoadBalancer(LBArgs(workers=("http://w:1",), probe=False, health_interval=0.01))
    num_begun, again = 0, asyncio.Event()

    async def watch(worker: Worker) -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun == 1:
            raise RecursionError("too deep")
        again.set()
        await asyncio.Event().wait()

    async def returns(worker: Worker) -> None:
        nonlocal num_returned
        num_returned += 1

    num_returned = 0
    balancer._watches = (watch, returns)  # type: ignore[assignment]
    await balancer.open()
    try:
        async with asyncio.timeout(DEADLINE):
            await again.wait()
    finally:
        await balancer.close()
    # One that has no work returns, and does not begin again.
    assert (num_begun, num_returned) == (2, 1)
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert record.getMessage() == "watch of a worker failed and is restarted url=http://w:1 mode=null"
