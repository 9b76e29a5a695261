"""Who is let to the workers, who waits, and who is sent away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from splitserve.core.errors import CapacityError, DeadlineExceededError
from splitserve.router.admission import RequestAdmission
from support.router_world import Handler, after, answers, serve_pair, start_router, start_worker

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


@asynccontextmanager
async def place(admission: RequestAdmission, rid: object, seconds: float) -> AsyncIterator[float]:
    waited = await admission.enter(rid, seconds)
    try:
        yield waited
    finally:
        admission.leave()


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_those_who_wait_come_in_the_order_of_arrival() -> None:
    admission, came = RequestAdmission(2, 10), list[int]()

    async def visit(number: int) -> None:
        async with place(admission, number, 10):
            came.append(number)

    async with AsyncExitStack() as places:
        assert [await places.enter_async_context(place(admission, "first", 10)) for _ in range(2)] == [0.0, 0.0]
        visits = [asyncio.create_task(visit(number)) for number in range(5)]
        await settle()
        assert (came, admission.queue.num_waiting) == ([], 5)
    await asyncio.gather(*visits)
    assert (came, admission.queue.num_waiting) == ([0, 1, 2, 3, 4], 0)


async def test_nobody_overtakes_those_who_wait() -> None:
    admission, came = RequestAdmission(1, 10), list[str]()

    async def visit(name: str) -> None:
        async with place(admission, name, 10):
            came.append(name)

    async with place(admission, "first", 10):
        waits = asyncio.create_task(visit("waited"))
        await settle()
    # The place is free and promised.
    await visit("late")
    await waits
    assert came == ["waited", "late"]


async def test_a_full_line_sends_away_at_once() -> None:
    admission = RequestAdmission(1, 0)
    async with place(admission, "a", 10):
        with pytest.raises(CapacityError, match=r"request b .*1 requests run and 0 wait"):
            await admission.enter("b", 10)
    async with place(admission, "b", 10) as waited:
        assert waited == 0.0


@pytest.mark.parametrize("seconds", [0.001, 0, -1])
async def test_whoever_has_no_time_left_leaves_the_line(seconds: float) -> None:
    admission = RequestAdmission(1, 1)
    async with place(admission, "a", 10):
        for _ in range(3):
            with pytest.raises(DeadlineExceededError, match=r"request b \(stage: waiting"):
                await admission.enter("b", seconds)
        assert admission.queue.num_waiting == 0
    async with place(admission, "b", 10):
        pass


@pytest.mark.parametrize("just_called", [False, True])
async def test_whoever_leaves_the_line_leaves_a_place_for_the_next(just_called: bool) -> None:
    admission = RequestAdmission(1, 1)
    holds = place(admission, "a", 10)
    await holds.__aenter__()
    leaves = asyncio.create_task(admission.enter("b", 10))
    await settle()
    if just_called:
        await holds.__aexit__(None, None, None)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    assert admission.queue.num_waiting == 0
    if not just_called:
        await holds.__aexit__(None, None, None)
    async with asyncio.timeout(60), place(admission, "c", 10):
        pass


async def test_without_a_bound_everybody_comes_in() -> None:
    admission = RequestAdmission(None, 0)
    async with AsyncExitStack() as places:
        for _ in range(100):
            assert await places.enter_async_context(place(admission, "a", 0)) == 0.0


async def metric(url: str, name: str) -> float:
    async with aiohttp.ClientSession() as client, client.get(url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"splitserve_router:{name} "))


def ask(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> asyncio.Task[tuple[int, Any, str | None]]:
    async def answer() -> tuple[int, Any, str | None]:
        async with client.post(url + "/generate", json=body) as response:
            return response.status, await response.json(), response.headers.get("Retry-After")

    return asyncio.create_task(answer())


async def test_a_request_waits_at_the_router_and_the_one_after_the_last_gets_503() -> None:
    go = asyncio.Event()
    handler: Handler = after(go, answers({"text": "b"}))
    async with (
        asyncio.timeout(60),
        start_worker(handler) as worker,
        start_router(workers=(worker.url,), max_running_requests=1, max_queued_requests=1) as url,
        aiohttp.ClientSession() as client,
    ):
        first = ask(client, url, {"text": "1"})
        await worker.arrived.wait()
        second = ask(client, url, {"text": "2"})
        while await metric(url, "num_requests_waiting") < 1:
            pass
        assert await metric(url, "num_requests_running") == 1
        status, body, retry = await ask(client, url, {"text": "3"})
        assert (status, body["error"]["code"], retry) == (503, "over_capacity", "1")
        assert [b["text"] for b in worker.bodies] == ["1"]
        go.set()
        assert [(await one)[0] for one in (first, second)] == [200, 200]
        assert await metric(url, "num_requests_waiting") == await metric(url, "num_requests_running") == 0
        assert [b["text"] for b in worker.bodies] == ["1", "2"]


async def test_the_time_in_line_counts_and_what_is_left_goes_on_to_the_workers() -> None:
    go = asyncio.Event()
    async with (
        asyncio.timeout(60),
        start_worker(after(go, answers({"text": "b"}))) as worker,
        start_router(workers=(worker.url,), max_running_requests=1) as url,
        aiohttp.ClientSession() as client,
    ):
        first = ask(client, url, {"text": "1", "timeout": 50})
        await worker.arrived.wait()
        waits = ask(client, url, {"text": "2", "timeout": 50})
        while await metric(url, "num_requests_waiting") < 1:
            pass
        status, body, _ = await ask(client, url, {"text": "3", "timeout": 0.01, "rid": "r3"})
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        assert "request r3 (stage: waiting at the router)" in body["error"]["message"]
        go.set()
        assert [(await one)[0] for one in (first, waits)] == [200, 200]
        at_once, late = worker.bodies
        assert at_once["timeout"] == 50
        assert 0 < late["timeout"] <= 50 - 0.01
        assert late["dispatch"]["elapsed"] >= 0.01


async def test_a_client_that_leaves_the_line_frees_its_place_and_asks_no_worker() -> None:
    go = asyncio.Event()
    async with (
        asyncio.timeout(60),
        start_worker(after(go, answers({"text": "b"}))) as worker,
        start_router(workers=(worker.url,), max_running_requests=1, max_queued_requests=1) as url,
        aiohttp.ClientSession() as client,
    ):
        first = ask(client, url, {"text": "1"})
        await worker.arrived.wait()
        leaves = ask(client, url, {"text": "2"})
        while await metric(url, "num_requests_waiting") < 1:
            pass
        leaves.cancel()
        while await metric(url, "num_requests_waiting") > 0:
            pass
        third = ask(client, url, {"text": "3"})
        while await metric(url, "num_requests_waiting") < 1:
            pass
        go.set()
        assert [(await one)[0] for one in (first, third)] == [200, 200]
        assert [b["text"] for b in worker.bodies] == ["1", "3"]


async def test_a_request_that_fails_gives_its_place_back() -> None:
    async def breaks(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no", "code": "engine_error"}}, status=500)

    async with serve_pair(answers({}), breaks, max_running_requests=1, max_queued_requests=0) as pair:
        for _ in range(3):
            assert (await pair.post("/generate", {"text": "a"}))[0] == 500


async def test_a_caller_that_comes_too_often_gets_429_and_others_are_served(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{ALICE} alice\n{BOB} bob\n")
    options = {"api_key_file": tmp_path / "keys", "rate_limit": 0.001, "rate_limit_burst": 2}
    async with serve_pair(answers({}), answers({"text": "b"}), **options) as pair:
        seen = []
        for key in (ALICE, ALICE, ALICE, BOB):
            headers = {"Authorization": f"Bearer {key}"}
            async with pair.client.post(pair.router + "/generate", json={"text": "a"}, headers=headers) as response:
                seen.append(response.status)
                if response.status == 429:
                    error = json.loads(await response.read())["error"]
                    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
                    assert 900 < int(response.headers["Retry-After"]) <= 1000
        assert seen == [200, 200, 429, 200]
