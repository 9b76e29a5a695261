"""A client that leaves takes its request with it, at every stage, and over a real socket."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from .conftest import DEADLINE, Worker

HI = [{"role": "user", "content": "Hi"}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "abc"}),
    ("/v1/completions", {"prompt": "abc", "max_tokens": 100}),
    ("/v1/chat/completions", {"messages": HI, "n": 1}),
]


async def aborted(worker: Worker) -> None:
    abort = await asyncio.wait_for(worker.scheduler.aborts.get(), DEADLINE)
    assert abort.quiet
    assert await worker.front.requests.wait_idle(DEADLINE)
    assert worker.scheduler.num_running == 0


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_leaving_in_the_midst_of_a_stream_aborts(live_worker: Worker, path: str, body: dict[str, Any]) -> None:
    live_worker.scheduler.hold_after = 2
    async with live_worker.http.stream("POST", path, json=body | {"stream": True}) as response:
        assert (await anext(response.aiter_lines())).startswith("data: ")
    await aborted(live_worker)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_leaving_before_the_first_token_aborts(
    live_worker: Worker, path: str, body: dict[str, Any], stream: bool
) -> None:
    live_worker.scheduler.hold_after = 0
    async with httpx.AsyncClient(base_url=live_worker.http.base_url) as leaving:
        call = asyncio.create_task(leaving.post(path, json=body | {"stream": stream}, timeout=DEADLINE))
        async with asyncio.timeout(DEADLINE):
            # The scheduler takes the messages in order, so each answer is later than its request.
            while not live_worker.scheduler.received:
                await live_worker.front.scheduler.states()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    await aborted(live_worker)


async def test_leaving_aborts_every_sample(live_worker: Worker) -> None:
    live_worker.scheduler.hold_after = 2
    body = {"text": ["a", "b"], "sampling_params": {"n": 2}, "stream": True}
    async with live_worker.http.stream("POST", "/generate", json=body) as response:
        await anext(response.aiter_lines())
    rids = {(await asyncio.wait_for(live_worker.scheduler.aborts.get(), DEADLINE)).rid for _ in range(4)}
    assert len(rids) == 4
