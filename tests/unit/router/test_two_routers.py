"""Several routers before the same workers: their registries, and that none disturbs another's requests."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from splitserve.api.http_server import port_of
from splitserve.core.errors import ConfigError
from splitserve.core.request import DisaggregationMode
from splitserve.ranks.launch import router_urls
from splitserve.router.args import PrefillConfig
from splitserve.worker.registration import RouterRegistration
from support.router_world import FakeWorker, Handler, answers, journals, start_router, start_worker, streams

DEADLINE = 60.0
COUNT = 5
WHOLE = b"".join(b'data: {"i": %d}\n\n' % i for i in range(COUNT)) + b"data: [DONE]\n\n"


@pytest.fixture
def port() -> Iterator[int]:
    """Return a port that no other process gets. Connections are refused while no router listens there."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        yield port_of(sock)


async def urls_at(router: str) -> set[str]:
    async with aiohttp.ClientSession() as client, client.get(f"{router}/workers") as response:
        return {w["url"] for w in (await response.json())["workers"]}


async def left_at(router: str) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession() as client, client.get(f"{router}/workers") as response:
        left: list[dict[str, Any]] = (await response.json())["left"]
        return left


async def until_known(router: str, *urls: str) -> None:
    limit = time.monotonic() + DEADLINE
    while (known := await urls_at(router)) != set(urls):
        assert time.monotonic() < limit, known
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("options", "urls"),
    [
        ([], ()),
        (["http://a:1"], ("http://a:1",)),
        (["http://a:1,https://b:2/", "http://c:3"], ("http://a:1", "https://b:2", "http://c:3")),
        (["http://a:1", "http://a:1/"], ("http://a:1",)),
    ],
)
def test_routers_are_named_one_by_one_or_with_commas(options: list[str], urls: tuple[str, ...]) -> None:
    assert router_urls(options) == urls


def test_a_router_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="''"):
        router_urls(["http://a:1,"])


async def test_a_worker_announces_itself_at_each_router_and_says_goodbye_to_each() -> None:
    async with start_router() as one, start_router() as other:
        registration = RouterRegistration([one, other], "h", 1)
        registration.enter(DisaggregationMode.DECODE, None)
        await until_known(one, "http://h:1")
        await until_known(other, "http://h:1")
        await registration.leave()
        assert await urls_at(one) == await urls_at(other) == set()
        await registration.leave()


async def test_a_worker_that_ends_after_it_left_with_a_reason_is_listed_no_more() -> None:
    async with start_router() as one, start_router() as other:
        registration = RouterRegistration([one, other], "h", 1)
        for returns in (True, False):
            registration.enter(DisaggregationMode.DECODE, None)
            await until_known(one, "http://h:1")
            await until_known(other, "http://h:1")
            await registration.leave("memory released")
            left = {"url": "http://h:1", "mode": "decode", "reason": "memory released"}
            assert await left_at(one) == await left_at(other) == [left], returns
        # The worker ends.
        await registration.leave()
        assert await left_at(one) == await left_at(other) == []


async def test_a_router_that_is_away_keeps_no_other_waiting_and_is_told_when_it_comes(port: int) -> None:
    async with start_router() as there:
        away = f"http://127.0.0.1:{port}"
        registration = RouterRegistration([away, there], "h", 1)
        registration.enter(DisaggregationMode.DECODE, None)
        await until_known(there, "http://h:1")
        async with start_router(on_port=port):
            await until_known(away, "http://h:1")
        await registration.leave()
        assert await urls_at(there) == set()


async def test_a_router_with_an_impossible_name_is_tried_again_and_keeps_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("splitserve.worker.registration._BACKOFF", (0.01, 0.01))
    async with start_router() as there:
        registration = RouterRegistration(["http://a..b:80", f"http://{'x' * 64}.example:80", there], "h", 1)
        with caplog.at_level(logging.INFO):
            registration.enter(DisaggregationMode.DECODE, None)
            await until_known(there, "http://h:1")
            async with asyncio.timeout(DEADLINE):
                while any(caplog.text.count(name) < 2 for name in ("a..b", "x" * 64)):
                    await urls_at(there)
        await registration.leave()
        assert await urls_at(there) == set()


async def test_an_error_page_in_another_encoding_ends_no_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "<h1>Dienst nicht verf\xfcgbar</h1>".encode("latin-1")
    paths: asyncio.Queue[str] = asyncio.Queue()

    async def proxy(request: web.Request) -> web.Response:
        await paths.put(request.path)
        return web.Response(status=502, body=page, content_type="text/html")

    monkeypatch.setattr("splitserve.worker.registration._BACKOFF", (0.01, 0.01))
    app = web.Application()
    app.router.add_post("/{path}", proxy)
    server = TestServer(app)
    await server.start_server()
    registration = RouterRegistration([f"http://127.0.0.1:{server.port}"], "h", 1)
    registration.enter(DisaggregationMode.DECODE, None)
    async with asyncio.timeout(DEADLINE):
        assert [await paths.get() for _ in range(3)] == ["/register"] * 3
        # A drain goes on after such a page, too.
        await registration.leave()
        while await paths.get() != "/deregister":
            pass
    await server.close()


async def test_a_router_that_is_restarted_gets_its_workers_back(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitserve.worker.registration.REFRESH_INTERVAL", 0.05)
    router = f"http://127.0.0.1:{port}"
    async with start_worker(answers({"text": "ok"})) as worker:
        worker_port = int(worker.url.rsplit(":", 1)[1])
        registration = RouterRegistration([router], "127.0.0.1", worker_port)
        registration.enter(DisaggregationMode.NULL, None)
        for _ in range(2):
            async with start_router(on_port=port, probe=True):
                await until_known(router, worker.url)
                async with (
                    aiohttp.ClientSession() as client,
                    client.post(f"{router}/generate", json={"text": "a"}) as response,
                ):
                    assert response.status == 200
        await registration.leave()


@dataclass
class TwoRouters:
    routers: list[str]
    prefill: FakeWorker
    decode: list[FakeWorker]
    client: aiohttp.ClientSession

    async def post(self, i: int, path: str, body: Any) -> tuple[int, bytes]:
        async with self.client.post(self.routers[i] + path, json=body) as response:
            return response.status, await response.read()


@asynccontextmanager
async def two_routers(prefill: Handler, *decode: Handler) -> AsyncIterator[TwoRouters]:
    """Both give their first request to the first of the decode workers."""
    async with AsyncExitStack() as stack:
        p = await stack.enter_async_context(start_worker(prefill))
        d = [await stack.enter_async_context(start_worker(handler)) for handler in decode]
        configs, urls = (PrefillConfig(p.url, 8998),), tuple(worker.url for worker in d)
        routers = [await stack.enter_async_context(start_router(prefill=configs, decode=urls)) for _ in range(2)]
        client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE))
        yield TwoRouters(routers, p, d, await stack.enter_async_context(client))


async def test_requests_of_two_routers_share_the_workers_and_nothing_else() -> None:
    async with two_routers(answers({}), answers({"text": "ok"})) as world:
        outcomes = await asyncio.gather(*(world.post(i % 2, "/generate", {"text": "a"}) for i in range(40)))
        assert {status for status, _ in outcomes} == {200}
        bodies = world.decode[0].bodies
        assert len({body["rid"] for body in bodies}) == len({body["bootstrap_room"] for body in bodies}) == 40
        rooms = [
            sorted(body["bootstrap_room"] for body in worker.bodies) for worker in (world.prefill, world.decode[0])
        ]
        assert rooms[0] == rooms[1]


async def test_what_one_router_drains_is_no_matter_to_the_other() -> None:
    go_on = asyncio.Event()
    held, free = journals(COUNT, until=2, go_on=go_on), journals(COUNT)
    async with two_routers(streams(), held, free) as world:
        answered = [asyncio.create_task(world.post(i, "/generate", {"text": "a", "stream": True})) for i in range(2)]
        limit = time.monotonic() + DEADLINE
        while len(world.decode[0].bodies) < 2:
            assert time.monotonic() < limit
            await asyncio.sleep(0.01)
        url = world.decode[0].url
        assert (await world.post(0, "/workers/drain", {"url": url, "migrate": True}))[0] == 200
        # The stream of the first router migrates, while the other's stays on its worker.
        assert await answered[0] == (200, WHOLE)
        assert (len(world.decode[1].bodies), answered[1].done()) == (1, False)
        # To the first router the worker is closed, to the other it is not.
        for _ in range(2):
            assert await world.post(0, "/generate", {"text": "a", "stream": True}) == (200, WHOLE)
        assert len(world.decode[0].bodies) == 2
        go_on.set()
        assert await answered[1] == (200, WHOLE)
        for _ in range(2):
            assert await world.post(1, "/generate", {"text": "a", "stream": True}) == (200, WHOLE)
        assert len(world.decode[0].bodies) == 3
