"""Orders to abort requests that are at the router: before their first attempt, and after a failed one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from splitserve.core.errors import RequestAbortedError
from splitserve.router.aborts import AbortOrders
from splitserve.router.access_log import LoggedRequest
from support.router_world import DEADLINE, Handler, Pools, after, answers, delta, dies, journals, serve_pools

OK = {"text": "Paris"}


def obeying(handler: Handler) -> Handler:
    """Return a handler that answers orders at once, as a worker does that has no such request."""

    async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (answers({}) if request.path == "/abort_request" else handler)(request, body)

    return handle


async def waits(pools: Pools, count: int) -> None:
    """Wait until this number of requests waits at the router."""
    async with asyncio.timeout(DEADLINE):
        while True:
            async with pools.client.get(pools.router + "/metrics") as response:
                if f"splitserve_router:num_requests_waiting {count}.0" in await response.text():
                    return


async def abort(pools: Pools, **order: Any) -> None:
    assert (await pools.post("/abort_request", order))[0] == 200


def code_of(answer: tuple[int, bytes]) -> tuple[int, str]:
    return answer[0], json.loads(answer[1])["error"]["code"]


@pytest.mark.parametrize("order", [{"rid": "a"}, {"abort_all": True}])
async def test_a_request_that_waits_for_a_worker_ends(order: dict[str, Any]) -> None:
    prefill, decode = obeying(answers({})), obeying(dies())
    async with serve_pools([prefill], [decode], worker_wait_timeout=DEADLINE, health_interval=600) as pools:
        request = asyncio.create_task(pools.post("/generate", {"text": "a", "rid": "a"}))
        await waits(pools, 1)
        await abort(pools, rid="another")
        await waits(pools, 1)
        await abort(pools, **order)
        assert code_of(await request) == (499, "aborted")
        assert b"request a (stage: waiting at the router)" in (await request)[1]
        await waits(pools, 0)
        # Workers get all orders: they may have the request.
        assert pools.prefill[0].bodies[1:] == pools.decode[0].bodies[1:] == [{"rid": "another"}, order]


async def test_a_request_that_waits_for_its_turn_ends_and_the_next_gets_it() -> None:
    event = asyncio.Event()
    prefill, decode = obeying(answers({})), obeying(after(event, answers(OK)))
    async with serve_pools([prefill], [decode], max_running_requests=1) as pools:
        running, *waiting = (asyncio.create_task(pools.post("/generate", {"text": "a", "rid": rid})) for rid in "abc")
        await waits(pools, 2)
        await abort(pools, rid="b")
        await waits(pools, 1)
        event.set()
        assert code_of(await waiting[0]) == (499, "aborted")
        assert [(await request)[0] for request in (running, waiting[1])] == [200, 200]


async def test_an_order_ends_the_running_request_at_its_worker_and_the_one_that_waits_for_its_id_here() -> None:
    event = asyncio.Event()
    async with serve_pools([obeying(answers({}))], [obeying(after(event, answers(OK)))]) as pools:
        running, waiting = (asyncio.create_task(pools.post("/generate", {"text": "a", "rid": "a"})) for _ in range(2))
        await pools.decode[0].arrived.wait()
        while not waiting.done():
            await abort(pools, rid="a")
        event.set()
        assert sorted([(await running)[0], (await waiting)[0]]) == [200, 499]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_that_was_aborted_at_a_worker_is_not_sent_to_another(is_stream: bool) -> None:
    event = asyncio.Event()

    async def breaks_off(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-splitserve-journal": "1"})
        await response.prepare(request)
        await response.write(delta(0))
        return await after(event, dies())(request, {})

    decodes = [obeying(breaks_off if is_stream else after(event, dies())), obeying(journals(4))]
    async with serve_pools([obeying(answers({}))], decodes) as pools:
        request = asyncio.create_task(pools.post("/generate", {"text": "a", "rid": "a", "stream": is_stream}))
        await pools.decode[0].arrived.wait()
        await abort(pools, rid="a")
        event.set()
        status, answer = await request
        assert (status, b'"code":"aborted"' in answer) == (200 if is_stream else 499, True)
        assert pools.decode[1].bodies == [{"rid": "a"}]


async def test_a_batch_ends_when_there_were_orders_for_all_of_its_ids() -> None:
    orders, record = AbortOrders(), LoggedRequest("/generate", rid=["a", "b"])

    async def wait() -> None:
        async with orders.obeyed(record):
            await asyncio.Event().wait()

    request = asyncio.create_task(wait())
    for rid in ("c", "a", "a"):
        await asyncio.sleep(0)
        orders.give(rid)
        assert not record.is_aborted
    orders.give("b")
    # A further order while the request ends.
    orders.give(None)
    with pytest.raises(RequestAbortedError, match=r"request a,b \(stage: waiting at the router\)"):
        await request


async def test_other_errors_of_a_request_pass() -> None:
    orders, record = AbortOrders(), LoggedRequest("/generate", rid="a")
    with pytest.raises(TimeoutError):
        async with orders.obeyed(record):
            raise TimeoutError
    # A request that has ended gets no orders.
    orders.give(None)
    assert not record.is_aborted
