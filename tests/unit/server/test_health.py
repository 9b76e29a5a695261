"""/health: answered while the processing of requests stands still, by the age of the schedulers' heartbeat."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from splitserve.api.tokenizer import Tokenizer
from splitserve.core.clock import ManualClock
from splitserve.core.errors import DeadlineExceededError
from splitserve.core.messages import SchedulerState
from splitserve.server.front_end import MAX_HEARTBEAT_AGE, MEDIUM_BYTES, Heartbeat
from support.router_world import start_router

from .conftest import DEADLINE, StartWorker, Worker, serve

# Seconds, for a machine that has much else to do.
HANG_TIMEOUT = 1.0
HEALTH_INTERVAL = 0.02


class BlockedTokenizer:
    """The tokenizer of a worker. Long texts wait for `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started, self.release = threading.Event(), threading.Event()
        encode = Tokenizer.encode

        def blocked(tokenizer: Tokenizer, text: str, **options: object) -> list[int]:
            if len(text) > MEDIUM_BYTES:
                self.started.set()
                assert self.release.wait(6 * DEADLINE)
                text = text[:16]
            return encode(tokenizer, text)

        monkeypatch.setattr(Tokenizer, "encode", blocked)


class HealthCounter:
    """An app before another one: it notices when health checks have come for longer than a hang takes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._num_checks = 0
        self.asked_often = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") == "/health":
            self._num_checks += 1
            if self._num_checks > 1.5 * HANG_TIMEOUT / HEALTH_INTERVAL:
                self.asked_often.set()
        await self._app(scope, receive, send)


@pytest.fixture
async def blocked(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BlockedTokenizer]:
    tokenizer = BlockedTokenizer(monkeypatch)
    yield tokenizer
    tokenizer.release.set()


@asynccontextmanager
async def behind_router(worker: Worker) -> AsyncIterator[tuple[str, HealthCounter]]:
    counter = HealthCounter(worker.app)
    options = {"health_interval": HEALTH_INTERVAL, "hang_timeout": HANG_TIMEOUT}
    async with serve(counter) as url, start_router(workers=(url,), **options) as router:  # type: ignore[arg-type]
        yield router, counter


async def test_a_worker_is_healthy_while_it_tokenizes_a_large_prompt(
    start_worker: StartWorker, blocked: BlockedTokenizer
) -> None:
    async with start_worker() as worker, behind_router(worker) as (router, counter), aiohttp.ClientSession() as client:

        async def generate() -> int:
            body = {"text": "a" * (MEDIUM_BYTES + 1), "sampling_params": {"max_new_tokens": 1}}
            async with client.post(router + "/generate", json=body) as response:
                return response.status

        request = asyncio.create_task(generate())
        assert await asyncio.to_thread(blocked.started.wait, DEADLINE)
        await asyncio.wait_for(counter.asked_often.wait(), 6 * DEADLINE)
        async with client.get(router + "/workers") as response:
            (described,) = (await response.json())["workers"]
        assert (described["healthy"], described["num_running"]) == (True, 1)
        assert not request.done()
        blocked.release.set()
        assert await request == 200
        assert len(worker.scheduler.received) == 1


class Schedulers:
    def __init__(self) -> None:
        self.answer = True
        self.asked: asyncio.Queue[None] = asyncio.Queue()

    async def states(self, timeout: float = 0.0) -> list[SchedulerState]:
        self.asked.put_nowait(None)
        if not self.answer:
            raise DeadlineExceededError("no answer")
        return []


async def test_a_worker_with_a_silent_rank_accepts_no_requests_but_is_alive(worker: Worker) -> None:
    seconds = 7.0
    worker.front.silence = lambda: seconds
    response = await worker.http.get("/health")
    assert response.status_code == 503
    assert "has sent no heartbeat for 7 s" in response.json()["error"]["message"]
    sample = (await worker.http.get("/v1/sample")).json()
    assert (sample["status"], "for 7 s" in sample["reason"]) == ("unready", True)
    assert (await worker.http.get("/live")).status_code == 200
    seconds = 0.0
    assert (await worker.http.get("/health")).status_code == 200


async def test_health_reports_schedulers_that_stopped_answering(worker: Worker) -> None:
    clock, schedulers = ManualClock(), Schedulers()
    worker.front.heartbeat = heartbeat = Heartbeat(schedulers, clock)
    task = asyncio.create_task(heartbeat.run(interval=0.001))

    async def next_asked() -> None:
        # The second request is sent after the first one's answer was recorded.
        while not schedulers.asked.empty():
            schedulers.asked.get_nowait()
        for _ in range(2):
            await asyncio.wait_for(schedulers.asked.get(), DEADLINE)

    await next_asked()
    schedulers.answer = False
    clock.advance(MAX_HEARTBEAT_AGE)
    await next_asked()
    for path in ("/health", "/live"):
        assert (await worker.http.get(path)).status_code == 200
    clock.advance(1.0)
    for path in ("/health", "/live"):
        response = await worker.http.get(path)
        assert response.status_code == 503
        assert "has not answered for 61 s" in response.json()["error"]["message"]
    schedulers.answer = True
    await next_asked()
    for path in ("/health", "/live"):
        assert (await worker.http.get(path)).status_code == 200
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
