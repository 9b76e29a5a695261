"""Workers that cannot form a pair: clients get 503, operators the reason, and other pairs serve."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from aiohttp import web

from splitserve.core.clock import ManualClock
from splitserve.core.errors import IncompatiblePeerError, WorkerUnavailableError
from splitserve.core.request import DisaggregationMode
from splitserve.router.args import LBArgs
from splitserve.router.registry import MISFIT_SECONDS, WorkerRegistry
from splitserve.router.upstream import misfit_in
from splitserve.router.worker import WorkerPair
from splitserve.transfer.peers import BootstrapAddress, PrefillPeer
from support.router_world import Pools, answers, never, serve_pools

PREFILL, DECODE, NULL = DisaggregationMode.PREFILL, DisaggregationMode.DECODE, DisaggregationMode.NULL
DEADLINE = 60.0
OK = {"text": "Paris"}
DIFFERENCE = "prefill and decode differ: model fingerprint 1f against 2e"
PEER = PrefillPeer(BootstrapAddress("10.0.0.7", 8998, 1))
MESSAGE = f"request r (stage: handshake): {IncompatiblePeerError(7, f'{PEER}: {DIFFERENCE}').message}"
INCOMPATIBLE = {"error": {"message": MESSAGE, "type": "server_error", "param": None, "code": "incompatible_peer"}}


async def refuses(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """It generates by itself, and with no partner."""
    if request.path == "/generate":
        return await answers(INCOMPATIBLE, IncompatiblePeerError.http_status)(request, body)
    return web.json_response({})


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def registry(clock: ManualClock) -> WorkerRegistry:
    made = WorkerRegistry(LBArgs(probe=False), clock)
    for url, mode in (("p1", PREFILL), ("p2", PREFILL), ("d1", DECODE), ("d2", DECODE)):
        made.add(url, mode, 1 if mode is PREFILL else None)
    return made


def part(registry: WorkerRegistry, *pairs: tuple[str, str]) -> None:
    for prefill, decode in pairs:
        registry.add_misfit(WorkerPair(registry.get(prefill), registry.get(decode)), DIFFERENCE)


def chosen(registry: WorkerRegistry) -> set[tuple[str, str]]:
    pairs = [registry.select() for _ in range(12)]
    return {(pair.prefill.url, pair.decode.url) for pair in pairs if isinstance(pair, WorkerPair)}


def test_the_difference_is_read_without_addresses() -> None:
    assert misfit_in(json.dumps(INCOMPATIBLE).encode()) == DIFFERENCE
    other = {"error": {**INCOMPATIBLE["error"], "message": "no idea"}}
    assert misfit_in(json.dumps(other).encode()) == "versions, layouts or models differ"
    for body in (b"", b"[]", b'{"error": "x"}', json.dumps({"error": {"code": "engine_error", "message": MESSAGE}})):
        assert misfit_in(body if isinstance(body, bytes) else body.encode()) is None


def test_pairs_that_do_not_fit_are_not_chosen(registry: WorkerRegistry) -> None:
    part(registry, ("p1", "d2"), ("p2", "d1"))
    assert chosen(registry) == {("p1", "d1"), ("p2", "d2")}
    part(registry, ("p1", "d1"))
    assert chosen(registry) == {("p2", "d2")}


def test_where_no_pair_fits_the_choice_and_ready_say_so(registry: WorkerRegistry) -> None:
    part(registry, *((p, d) for p in ("p1", "p2") for d in ("d1", "d2")))
    with pytest.raises(WorkerUnavailableError, match="no prefill and decode worker that take requests fit together"):
        registry.select()
    reason = registry.unready_reason()
    assert reason is not None
    assert DIFFERENCE in reason
    registry.add("n", NULL)
    assert registry.select() is registry.get("n")
    assert registry.unready_reason() is None


@pytest.mark.parametrize("event", ["time", "restart", "replacement", "departure"])
def test_a_misfit_is_forgotten_with_time_and_when_a_worker_comes_back(
    registry: WorkerRegistry, clock: ManualClock, event: str
) -> None:
    part(registry, *((p, d) for p in ("p1", "p2") for d in ("d1", "d2")))
    d1 = registry.get("d1")
    # It announces itself every few seconds: that is no reason.
    registry.add("d1", DECODE)
    registry.forget_gone()
    assert len(d1.misfits) == 2
    if event == "time":
        clock.advance(MISFIT_SECONDS)
    elif event == "restart":
        d1.mark_unhealthy()
        d1.mark_healthy()
    else:
        registry.remove("d1")
        if event == "replacement":
            registry.add("d1", DECODE)
    registry.forget_gone()
    if event == "departure":
        assert set(registry.get("p1").misfits) == {registry.get("d2")}
        return
    assert ("p1", "d1") in chosen(registry)
    part(registry, ("p1", "d1"))
    assert ("p1", "d1") not in chosen(registry)


@pytest.mark.parametrize(
    ("parted", "is_needed"), [((), False), ((("p1", "d2"),), False), ((("p1", "d2"), ("p2", "d2")), True)]
)
def test_a_worker_that_fits_no_partner_stands_in_for_none(
    registry: WorkerRegistry, parted: tuple[tuple[str, str], ...], is_needed: bool
) -> None:
    part(registry, *parted)
    d1 = registry.get("d1")
    assert registry.needs(d1) is is_needed
    assert registry.has_stand_in(d1) is not is_needed
    for url in ("p1", "p2"):
        registry.get(url).is_draining = True
    # No partner is there that d2 could differ from.
    assert registry.has_stand_in(d1)


def test_who_was_replaced_meanwhile_is_not_blamed(registry: WorkerRegistry) -> None:
    pair = WorkerPair(registry.get("p1"), registry.get("d1"))
    registry.remove("d1")
    registry.add("d1", DECODE)
    registry.add_misfit(pair, DIFFERENCE)
    assert not registry.get("p1").misfits


async def get(pools: Pools, path: str) -> tuple[int, Any]:
    async with pools.client.get(pools.router + path) as response:
        return response.status, json.loads(await response.read())


async def until_ready_says(pools: Pools, text: str) -> None:
    async with asyncio.timeout(DEADLINE):
        while text not in json.dumps((await get(pools, "/ready"))[1]):
            pass


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_gets_503_and_operators_the_reason(is_stream: bool) -> None:
    async with serve_pools([never()], [refuses], max_retries=0) as pools:
        status, body = await pools.post("/generate", {"text": "a", "stream": is_stream})
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (503, "worker_unavailable")
        assert not re.search(r"10\.0\.0\.7|127\.0\.0\.1|1f against", error["message"])
        workers = {w["mode"]: w for w in (await get(pools, "/workers"))[1]["workers"]}
        assert workers["prefill"]["incompatible"] == [{"url": pools.decode[0].url, "reason": DIFFERENCE}]
        assert workers["decode"]["incompatible"] == [{"url": pools.prefill[0].url, "reason": DIFFERENCE}]
        ready, answer = await get(pools, "/ready")
        assert ready == 503
        assert DIFFERENCE in answer["error"]["message"]
        # From then on nothing is sent to them in vain.
        assert (await pools.post("/generate", {"text": "a"}))[0] == 503
        assert len(pools.decode[0].bodies) == 1


async def test_another_pair_serves_and_the_next_request_goes_there_at_once() -> None:
    async with serve_pools([never()], [refuses, answers(OK)], max_retries=0) as pools:
        pools.prefill[0].handler = answers({})
        for _ in range(4):
            status, body = await pools.post("/generate", {"text": "a"})
            assert (status, json.loads(body)) == (200, OK)
        assert [len(d.bodies) for d in pools.decode] == [1, 4]


async def test_a_probe_finds_out_and_a_later_one_that_they_fit_now() -> None:
    async with serve_pools([answers({})], [refuses], probe=True, health_interval=0.1) as pools:
        await until_ready_says(pools, DIFFERENCE)
        reasons = [w["reason"] for w in (await get(pools, "/workers"))[1]["workers"]]
        assert any(reason and "incompatible with http" in reason for reason in reasons)
        pools.decode[0].handler = answers(OK)
        await until_ready_says(pools, '"ready": true')
        assert (await pools.post("/generate", {"text": "a"}))[0] == 200


async def test_a_drain_that_leaves_only_a_pair_that_does_not_fit_is_refused() -> None:
    async with serve_pools([never()], [refuses, answers(OK)], max_retries=0) as pools:
        pools.prefill[0].handler = answers({})
        assert (await pools.post("/generate", {"text": "a"}))[0] == 200
        for order in ({"migrate": True, "force": True}, {}):
            assert (await pools.post("/workers/drain", {"url": pools.decode[1].url, **order}))[0] == 503
        assert (await pools.post("/generate", {"text": "a"}))[0] == 200
