"""Requests that wait for a worker to return, if a role has none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from splitserve.core.errors import NoWorkerError, WorkerUnavailableError
from splitserve.core.request import DisaggregationMode
from splitserve.router.args import PrefillConfig
from splitserve.router.registry import WorkerRegistry
from splitserve.router.waiting import Wakeup
from support.router_world import (
    DEADLINE,
    Pools,
    answers,
    dies,
    journals,
    serve_pair,
    serve_pools,
    start_router,
    start_worker,
)

OK = {"text": "Paris"}
COUNT = 4
STREAM = {"text": "a", "stream": True}
WHOLE = b"".join(b'data: {"i": %d}\n\n' % i for i in range(COUNT)) + b"data: [DONE]\n\n"
LONG: dict[str, Any] = {"worker_wait_timeout": DEADLINE, "health_interval": 0.05}
PREFILL, DECODE, NULL = DisaggregationMode.PREFILL, DisaggregationMode.DECODE, DisaggregationMode.NULL


async def until(client: aiohttp.ClientSession, url: str, part: str) -> None:
    """Wait until the answer of a route contains `part`."""
    async with asyncio.timeout(DEADLINE):
        while True:
            async with client.get(url) as response:
                if part in await response.text():
                    return


async def waits(client: aiohttp.ClientSession, router: str, count: int = 1) -> None:
    await until(client, router + "/metrics", f"splitserve_router:num_requests_waiting {count}.0")


@asynccontextmanager
async def without_decode(**options: Any) -> AsyncIterator[Pools]:
    """Run a router with a pair. The decode worker does not pass its health checks."""
    async with serve_pools([answers({})], [answers(OK)], **{**LONG, **options}) as pools:
        pools.decode[0].health_status = 503
        await until(pools.client, pools.router + "/workers", '"healthy":false')
        yield pools


async def test_a_request_waits_until_a_worker_passes_its_health_check() -> None:
    async with without_decode() as pools:
        request = asyncio.create_task(pools.post("/generate", {"text": "a"}))
        await waits(pools.client, pools.router)
        pools.decode[0].health_status = 200
        status, body = await request
        assert (status, json.loads(body)) == (200, OK)
        await waits(pools.client, pools.router, 0)


async def test_a_stream_continues_on_the_worker_that_replaces_its_only_one() -> None:
    async with (
        start_worker(journals(COUNT)) as new,
        serve_pair(answers({}), journals(COUNT, until=2), worker_wait_timeout=DEADLINE, health_interval=60) as pair,
    ):
        request = asyncio.create_task(pair.post("/generate", STREAM))
        await waits(pair.client, pair.router)
        async with pair.client.delete(pair.router + "/workers", params={"url": pair.decode.url}) as response:
            assert response.status == 200
        order = {"registry_url": new.url, "mode": "decode"}
        new.is_decode, new.rooms = True, pair.decode.rooms
        async with pair.client.post(pair.router + "/workers", json=order) as response:
            assert response.status == 200, await response.text()
        status, body, _ = await request
        assert (status, body) == (200, WHOLE)
        assert [line["token_ids"] for line in new.bodies[0]["dispatch"]["told"]] == [[0], [1]]


async def test_a_worker_that_failed_gets_the_request_again_after_a_health_check() -> None:
    async def decode(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (answers(OK) if body["dispatch"]["attempt"] else dies())(request, body)

    async with serve_pair(answers({}), decode, **LONG) as pair:
        status, body, _ = await pair.post("/generate", {"text": "a"})
        assert (status, json.loads(body)) == (200, OK)
        assert len(pair.decode.bodies) == 2


@pytest.mark.parametrize("code", ["kv_transfer_failed", "worker_unavailable"])
async def test_the_only_pair_gets_a_request_again_if_the_failure_may_have_passed(code: str) -> None:
    failure = answers({"error": {"message": "no", "type": "server_error", "param": None, "code": code}}, 503)

    async def decode(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (answers(OK) if body["dispatch"]["attempt"] else failure)(request, body)

    async with serve_pair(answers({}), decode, **LONG) as pair:
        status, body, _ = await pair.post("/generate", {"text": "a"})
        assert (status, json.loads(body)) == (200, OK)


@pytest.mark.parametrize("code", ["over_capacity", "engine_error"])
async def test_the_only_pair_does_not_get_a_request_again_that_it_would_reject_again(code: str) -> None:
    failure = answers({"error": {"message": "no", "type": "server_error", "param": None, "code": code}}, 503)
    async with serve_pair(answers({}), failure, **LONG) as pair:
        status, body, _ = await pair.post("/generate", {"text": "a"})
        assert (status, json.loads(body)["error"]["code"]) == (503, code)
        assert len(pair.decode.bodies) == 1


@pytest.mark.parametrize("first", [answers(OK), journals(COUNT, until=1)])
async def test_after_the_timeout_the_error_states_the_wait(first) -> None:
    async with serve_pair(answers({}), first, worker_wait_timeout=0.01, health_interval=0.05) as pair:
        pair.decode.health_status = 503
        await until(pair.client, pair.router + "/workers", '"healthy":false')
        status, body, _ = await pair.post("/generate", STREAM | {"rid": "mine"})
        message = json.loads(body)["error"]["message"]
        assert status == 503
        assert "request mine (stage: dispatch): none of the 1 decode worker(s)" in message
        assert "(waited 0.01 s)" in message


async def test_a_request_waits_no_longer_than_its_own_timeout() -> None:
    async with without_decode() as pools:
        status, body = await pools.post("/generate", {"text": "a", "timeout": 0.05})
        assert (status, "waited 0.0" in json.loads(body)["error"]["message"]) == (503, True)


async def test_a_request_beyond_the_limit_fails_at_once() -> None:
    async with without_decode(max_queued_requests=1) as pools:
        first = asyncio.create_task(pools.post("/generate", {"text": "a"}))
        await waits(pools.client, pools.router)
        status, body = await pools.post("/generate", {"text": "b"})
        assert (status, "waited" in json.loads(body)["error"]["message"]) == (503, False)
        pools.decode[0].health_status = 200
        assert (await first)[0] == 200


async def test_a_client_that_disconnects_no_longer_waits() -> None:
    async with without_decode() as pools:
        request = asyncio.create_task(pools.post("/generate", {"text": "a"}))
        await waits(pools.client, pools.router)
        request.cancel()
        await waits(pools.client, pools.router, 0)
        assert pools.prefill[0].bodies == []


async def test_nobody_waits_for_a_role_that_had_no_worker() -> None:
    async with (
        start_worker(answers({})) as prefill,
        start_router(prefill=(PrefillConfig(prefill.url, 1),), **LONG) as router,
        aiohttp.ClientSession() as client,
        client.post(router + "/generate", json={"text": "a"}) as response,
    ):
        assert response.status == 503
        assert "no decode worker is registered" in (await response.json())["error"]["message"]


async def test_other_routes_wait_too() -> None:
    async with start_worker(answers({"tokens": [1]})) as worker, start_router(workers=(worker.url,), **LONG) as router:
        worker.health_status = 503
        async with aiohttp.ClientSession() as client:
            await until(client, router + "/workers", '"healthy":false')

            async def tokenize() -> tuple[int, Any]:
                async with client.post(router + "/tokenize", json={"prompt": "a"}) as response:
                    return response.status, await response.json()

            request = asyncio.create_task(tokenize())
            await waits(client, router)
            worker.health_status = 200
            assert await request == (200, {"tokens": [1]})


@pytest.mark.parametrize(
    ("known", "present", "missing"),
    [
        ((PREFILL, DECODE), (PREFILL,), "no decode worker is registered"),
        ((PREFILL, DECODE), (), "no prefill worker is registered and no decode worker is registered"),
        ((NULL,), (), "no colocated worker is registered"),
    ],
)
def test_a_role_that_had_a_worker_may_have_one_again(known, present, missing: str) -> None:
    registry = WorkerRegistry()
    for mode in known:
        registry.add(mode.value, mode)
    for mode in set(known) - set(present):
        registry.remove(mode.value)
    with pytest.raises(NoWorkerError, match=f"^{missing}"):
        registry.select()


def test_an_incompatible_pair_is_not_waited_for() -> None:
    registry = WorkerRegistry()
    registry.add("p", PREFILL)
    registry.add("d", DECODE)
    registry.get("p").add_misfit(registry.get("d"), "page size", until=float("inf"))
    with pytest.raises(WorkerUnavailableError, match="fit together") as raised:
        registry.select()
    assert not isinstance(raised.value, NoWorkerError)


async def test_a_wakeup_reaches_all_that_wait_and_none_that_come_later() -> None:
    wakeup = Wakeup()
    early = [asyncio.create_task(wakeup.wait(DEADLINE)) for _ in range(3)]
    await asyncio.sleep(0)
    wakeup.send()
    late = asyncio.create_task(wakeup.wait(DEADLINE))
    await asyncio.gather(*early)
    assert not late.done()
    wakeup.send()
    await late
