"""Several routers behind one name: a worker reaches all of them, and they are replaced while it serves."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from splitserve.api.http_server import port_of
from splitserve.core.errors import DeadlineExceededError, WorkerUnavailableError
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.router_client import drain_worker, resume_worker
from splitserve.router.register import look_up
from splitserve.router.registry import WorkerRegistry
from splitserve.worker.registration import RouterRegistration
from support.router_world import start_router

DEADLINE = 60.0
WORKER = "http://h:1"
HERE, THERE, UNUSED = "127.0.0.1", "127.0.0.2", "127.0.0.3"


class NameServer:
    """Resolves one name to these addresses. None: the address does not answer."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: tuple[str, ...] | None = addresses

    async def look_up(self, url: str) -> list[str | None]:
        if self.addresses is None:
            raise OSError("no answer")
        return list(self.addresses)


@pytest.fixture
def port() -> Iterator[int]:
    """Return a port that no other process gets."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((HERE, 0))
        yield port_of(sock)


async def workers_at(router: str) -> dict[str, dict[str, Any]]:
    async with aiohttp.ClientSession() as client, client.get(f"{router}/workers") as response:
        return {w["url"]: w for w in (await response.json())["workers"]}


async def until_known(router: str) -> None:
    limit = time.monotonic() + DEADLINE
    while WORKER not in await workers_at(router):
        assert time.monotonic() < limit
        await asyncio.sleep(0.01)


def registration(port: int, names: NameServer) -> RouterRegistration:
    url = f"http://routers.invalid:{port}"
    return RouterRegistration([url], "h", 1, look_up=names.look_up)


async def test_a_worker_is_known_to_every_router_behind_a_name_also_to_those_that_come_later(port, monkeypatch):
    monkeypatch.setattr("splitserve.worker.registration.REFRESH_INTERVAL", 0.05)
    names = NameServer(HERE, UNUSED)
    announced = registration(port, names)
    announced.enter(DisaggregationMode.DECODE, None)
    async with start_router(port) as one, start_router(port, THERE) as other:
        await until_known(one)
        assert await workers_at(other) == {}
        # A rollout: another router takes the place of one that ended.
        names.addresses = (HERE, THERE)
        await until_known(other)
        # Without a name server who is known stays so.
        names.addresses = None
        await announced.leave()
        assert await workers_at(one) == await workers_at(other) == {}
        assert announced._tasks == {}


async def test_every_router_behind_a_name_lets_go_of_a_worker_and_one_that_has_ended_blocks_none(port):
    async with start_router(port) as one, start_router(port, THERE) as other:
        announced = registration(port, NameServer(HERE, THERE))
        announced.enter(DisaggregationMode.DECODE, None)
        for router in (one, other):
            await until_known(router)
        names = NameServer(HERE, UNUSED, THERE)
        order = {"migrate": False, "force": False, "timeout": DEADLINE, "operator_key": None}
        url = f"http://routers.invalid:{port}"
        await drain_worker(url, WORKER, look_up=names.look_up, **order)
        for router in (one, other):
            assert (await workers_at(router))[WORKER]["draining"]
        await resume_worker(url, WORKER, look_up=names.look_up, operator_key=None)
        for router in (one, other):
            assert not (await workers_at(router))[WORKER]["draining"]
        unused = NameServer(UNUSED, "127.0.0.4")
        with pytest.raises(WorkerUnavailableError, match=r"at 127\.0\.0\.[34]: http.* does not answer"):
            await drain_worker(url, WORKER, look_up=unused.look_up, **order)
        names.addresses = None
        with pytest.raises(WorkerUnavailableError, match="has no address: no answer"):
            await drain_worker(url, WORKER, look_up=names.look_up, **order)
        await announced.leave()


async def test_a_router_that_refuses_a_drain_is_no_success_although_another_executes_it(port, monkeypatch):
    async with start_router(port) as one, start_router(port, THERE) as other:
        announced = registration(port, NameServer(HERE, THERE))
        announced.enter(DisaggregationMode.DECODE, None)
        for router in (one, other):
            await until_known(router)
        is_first = itertools.count()
        # The worker is needed at one of the two routers only.
        monkeypatch.setattr(WorkerRegistry, "needs", lambda *_: next(is_first) == 0)
        order = {"migrate": False, "force": False, "timeout": DEADLINE, "operator_key": None}
        names = NameServer(HERE, THERE)
        with pytest.raises(WorkerUnavailableError, match=r"no worker would serve requests.*other routers may have"):
            await drain_worker(f"http://routers.invalid:{port}", WORKER, look_up=names.look_up, **order)
        await announced.leave()


async def test_a_drain_has_a_deadline_over_all_routers(port, monkeypatch):
    async def busy(*_: Any) -> int:
        return 1

    monkeypatch.setattr("splitserve.deploy.router_client.RouterClient.num_running", busy)
    async with start_router(port) as one:
        announced = registration(port, NameServer(HERE, UNUSED))
        announced.enter(DisaggregationMode.DECODE, None)
        await until_known(one)
        with pytest.raises(DeadlineExceededError, match=r"after 0\.5 s \(stage: drain\): .* gets no new ones"):
            await drain_worker(one, WORKER, migrate=False, force=False, timeout=0.5, operator_key=None)
        await announced.leave()


async def test_one_address_is_connected_to_by_name_and_two_are_two_routers(monkeypatch):
    def entries(*addresses: str):
        async def getaddrinfo(host: str, *_: Any, **__: Any) -> list[tuple]:
            kinds = [(socket.AF_INET6 if ":" in a else socket.AF_INET, a) for a in addresses]
            return [(kind, socket.SOCK_STREAM, 6, "", (a, 0)) for kind, a in kinds]

        return getaddrinfo

    loop = asyncio.get_running_loop()
    for addresses, found in (
        (["10.0.0.1"], [None]),
        (["10.0.0.2", "10.0.0.1", "10.0.0.2"], ["10.0.0.1", "10.0.0.2"]),
        # Of a router that listens on one kind, as of `localhost`.
        (["::1", "127.0.0.1"], [None]),
        (["fd00::1", "fd00::2"], ["fd00::1", "fd00::2"]),
    ):
        monkeypatch.setattr(loop, "getaddrinfo", entries(*addresses))
        assert await look_up("http://routers:8000") == found
    monkeypatch.undo()
    assert await look_up("http://127.0.0.1:8000") == [None]


async def test_an_outage_of_the_router_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    module, has_ended = "splitserve.worker.registration", asyncio.Event()
    answers = iter([True, *[False] * 6, True, *[False] * 3])

    async def register(*_: Any, leave: bool = False, **__: Any) -> None:
        if leave:
            return
        if (answer := next(answers, None)) is None:
            has_ended.set()
            await asyncio.Event().wait()
        if not answer:
            raise WorkerUnavailableError("the router does not answer")

    monkeypatch.setattr(f"{module}.register_disaggregation_server", register)
    monkeypatch.setattr(f"{module}.REFRESH_INTERVAL", 0.0)
    monkeypatch.setattr(f"{module}._BACKOFF", (0.0, 0.0))
    caplog.set_level("INFO", module)
    registration = RouterRegistration(["http://r:1"], "h", 1, look_up=NameServer(HERE).look_up)
    registration.enter(DisaggregationMode.DECODE, None)
    await asyncio.wait_for(has_ended.wait(), DEADLINE)
    await registration.leave()
    assert [r.levelname for r in caplog.records] == ["INFO", "WARNING"] * 2
