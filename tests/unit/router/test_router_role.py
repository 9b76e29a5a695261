"""POST /role: a worker changes its role while others serve, and the router's registry follows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from splitserve.core.clock import ManualClock
from splitserve.core.request import DisaggregationMode
from splitserve.router.register import deregister_disaggregation_server, register_disaggregation_server
from splitserve.router.registry import FORGET_AFTER, WorkerRegistry
from support.router_world import FakeWorker, Handler, start_router, start_worker

NULL, PREFILL, DECODE = DisaggregationMode.NULL, DisaggregationMode.PREFILL, DisaggregationMode.DECODE
DEADLINE = 60.0
# What a worker does with the order; its answer.
OnOrder = Callable[[web.Request, dict[str, Any]], Awaitable[web.Response]]


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


async def changes(request: web.Request, body: dict[str, Any]) -> web.Response:
    return web.json_response({"role": body["role"], "seconds": 0.5, "bootstrap_port": body.get("bootstrap_port")})


async def refuses(request: web.Request, body: dict[str, Any]) -> web.Response:
    return web.json_response(
        {"error": {"message": "2 samples were still running", "code": "deadline_exceeded"}}, status=504
    )


def worker(on_order: OnOrder = changes) -> Handler:
    """Answers each request with the role that it was sent for."""

    async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path == "/role":
            return await on_order(request, body)
        return web.json_response({"text": request.headers["x-splitserve-role"]})

    return handler


@dataclass
class World:
    url: str
    workers: list[FakeWorker]
    client: aiohttp.ClientSession

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.client.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def order(self, number: int, role: str, **more: Any) -> tuple[int, Any]:
        return await self.post("/role", {"url": self.workers[number].url, "role": role, **more})

    async def listed(self) -> list[dict[str, Any]]:
        async with self.client.get(self.url + "/workers") as response:
            found = {w["url"]: w for w in (await response.json())["workers"]}
        return [found[w.url] for w in self.workers if w.url in found]

    async def modes(self) -> list[str]:
        return [w["mode"] for w in await self.listed()]


@asynccontextmanager
async def world(*roles: DisaggregationMode, on_order: OnOrder = changes) -> AsyncIterator[World]:
    """The last worker does `on_order`; all have announced themselves."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(start_router())
        handlers = [worker() for _ in roles[1:]] + [worker(on_order)]
        workers = [await stack.enter_async_context(start_worker(handler)) for handler in handlers]
        for role, w in zip(roles, workers, strict=True):
            await register_disaggregation_server(role, port_of(w.url), 8998 if role is PREFILL else None, url)
        timeout = aiohttp.ClientTimeout(total=DEADLINE)
        yield World(url, workers, await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout)))


async def test_a_worker_that_has_changed_stands_in_its_new_pool() -> None:
    async with world(PREFILL, DECODE, DECODE) as w:
        status, answer = await w.order(2, "prefill", drain="migrate", timeout=7.5, bootstrap_port=7000)
        assert (status, answer["mode"], answer["bootstrap_port"], answer["seconds"]) == (200, "prefill", 7000, 0.5)
        assert w.workers[2].bodies == [{"role": "prefill", "drain": "migrate", "timeout": 7.5, "bootstrap_port": 7000}]
        assert await w.modes() == ["prefill", "decode", "prefill"]
        for _ in range(2):
            assert (await w.post("/generate", {"text": "a"}))[1] == {"text": "decode"}
        for number, port in ((0, 8998), (2, 7000)):
            bodies = [
                b
                for b, path in zip(w.workers[number].bodies, w.workers[number].paths, strict=True)
                if path == "/generate"
            ]
            assert [b["bootstrap_port"] for b in bodies] == [port]
        assert (await w.order(2, "null"))[0] == 200
        assert await w.modes() == ["prefill", "decode", "null"]


async def test_an_operators_drain_and_a_switch_do_not_undo_each_other() -> None:
    ordered, go_on = asyncio.Event(), asyncio.Event()

    async def takes_its_time(request: web.Request, body: dict[str, Any]) -> web.Response:
        ordered.set()
        await go_on.wait()
        return await changes(request, body)

    async with world(PREFILL, DECODE, DECODE, on_order=takes_its_time) as w:
        url = w.workers[2].url
        assert (await w.post("/workers/drain", {"url": url}))[0] == 200
        status, answer = await w.order(2, "null")
        assert (status, "/workers/resume" in answer["error"]["message"]) == (409, True)
        assert [state["draining"] for state in await w.listed()] == [False, False, True]
        assert (await w.post("/workers/resume", {"url": url}))[0] == 200
        switch = asyncio.create_task(w.order(2, "null"))
        await ordered.wait()
        status, answer = await w.post("/workers/drain", {"url": url})
        assert (status, "changes its role" in answer["error"]["message"]) == (409, True)
        go_on.set()
        assert (await switch)[0] == 200


async def test_what_is_wrong_with_an_order_is_named_with_its_field() -> None:
    async with world(PREFILL, DECODE) as w:
        for path, body, field in (
            ("/role", {"role": "decode"}, "url"),
            ("/role", {"url": w.workers[0].url, "role": "decode", "timeout": -1}, "timeout"),
            ("/workers", {"mode": "decode", "url": w.workers[0].url}, "registry_url"),
        ):
            status, answer = await w.post(path, body)
            assert (status, answer["error"]["param"]) == (400, field)
            assert f"{field}: " in answer["error"]["message"]
        async with w.client.delete(w.url + "/workers") as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "url")


async def test_while_it_changes_it_shows_and_gets_no_requests_though_it_leaves_and_comes_back() -> None:
    ordered, go_on = asyncio.Event(), asyncio.Event()

    async def takes_its_time(request: web.Request, body: dict[str, Any]) -> web.Response:
        ordered.set()
        await go_on.wait()
        return await changes(request, body)

    async with world(PREFILL, DECODE, DECODE, on_order=takes_its_time) as w:
        order = asyncio.create_task(w.order(2, "prefill", bootstrap_port=7000))
        await asyncio.wait_for(ordered.wait(), DEADLINE)
        port = port_of(w.workers[2].url)
        await deregister_disaggregation_server(DECODE, port, None, w.url)
        listed = (await w.listed())[2]
        assert (listed["mode"], listed["draining"], listed["switching_to"]) == ("decode", True, "prefill")
        assert (await w.order(2, "null"))[0] == 409
        for _ in range(4):
            assert (await w.post("/generate", {"text": "a"}))[0] == 200
        assert w.workers[2].paths == ["/role"]
        await register_disaggregation_server(PREFILL, port, 7000, w.url)
        go_on.set()
        assert (await order)[0] == 200
        listed = (await w.listed())[2]
        assert (listed["mode"], listed["draining"], listed["switching_to"]) == ("prefill", False, None)


async def dies(request: web.Request, body: dict[str, Any]) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def speaks_another_language(request: web.Request, body: dict[str, Any]) -> web.Response:
    return web.json_response({"done": True})


@pytest.mark.parametrize(("on_order", "status"), [(refuses, 504), (dies, 502), (speaks_another_language, 502)])
async def test_a_worker_that_could_not_change_keeps_its_place(on_order: OnOrder, status: int) -> None:
    async with world(PREFILL, DECODE, DECODE, on_order=on_order) as w:
        found, answer = await w.order(2, "prefill")
        assert found == status
        if on_order is refuses:
            assert answer["error"]["message"] == "2 samples were still running"
        assert await w.modes() == ["prefill", "decode", "decode"]
        listed = (await w.listed())[2]
        assert (listed["draining"], listed["switching_to"]) == (False, None)
        for _ in range(2):
            assert (await w.post("/generate", {"text": "a"}))[0] == 200
        assert "/generate" in w.workers[2].paths


@pytest.mark.parametrize(
    ("roles", "number", "is_needed"),
    [
        ((PREFILL, DECODE), 1, True),
        ((PREFILL, DECODE), 0, True),
        ((PREFILL, DECODE, NULL), 0, False),
        ((NULL,), 0, True),
        ((NULL, PREFILL, DECODE), 0, False),
        ((PREFILL, PREFILL, DECODE), 0, False),
        # No worker can serve anyway, and this may be the reason.
        ((DECODE, DECODE), 1, False),
    ],
)
async def test_the_last_one_that_makes_a_path_stays_unless_it_is_forced(
    roles: tuple[DisaggregationMode, ...], number: int, is_needed: bool
) -> None:
    goal = "prefill" if roles[number] is not PREFILL else "decode"
    async with world(*roles) as w:
        status, answer = await w.order(number, goal, bootstrap_port=7000 if goal == "prefill" else None)
        assert status == (503 if is_needed else 200)
        if is_needed:
            assert "no worker would serve" in answer["error"]["message"]
            assert w.workers[number].paths == []
            more = {"bootstrap_port": 7000} if goal == "prefill" else {}
            assert (await w.order(number, goal, force=True, **more))[0] == 200
        assert (await w.modes())[number] == goal


async def test_an_order_for_the_current_role_changes_nothing_even_at_the_last_worker() -> None:
    async with world(PREFILL, DECODE) as w:
        for number, role in enumerate(("prefill", "decode")):
            status, answer = await w.order(number, role)
            assert (status, answer["mode"], answer["seconds"]) == (200, role, 0.0)
            assert w.workers[number].paths == []
        assert await w.modes() == ["prefill", "decode"]
        assert [listed["draining"] for listed in await w.listed()] == [False, False]


@pytest.mark.parametrize("wrong", [{"role": "both"}, {"drain": "now"}, {"timeout": 0}, {"bootstrap_port": 70000}])
async def test_an_order_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    async with world(PREFILL, DECODE, DECODE) as w:
        body = {"url": w.workers[2].url, "role": "prefill", **wrong}
        status, answer = await w.post("/role", body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert (await w.post("/role", {"url": "http://unknown", "role": "null"}))[0] == 404


def test_one_that_is_away_to_change_its_role_is_not_forgotten() -> None:
    clock = ManualClock()
    registry = WorkerRegistry(clock=clock)
    registry.add("http://a", DECODE)
    (worker_a,) = registry.all()
    worker_a.switching_to = PREFILL
    worker_a.mark_unhealthy()
    clock.advance(FORGET_AFTER + 1)
    registry.forget_gone()
    assert registry.all() == [worker_a]
    worker_a.switching_to = None
    registry.forget_gone()
    assert registry.all() == []
