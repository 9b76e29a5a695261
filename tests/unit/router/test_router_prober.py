"""Ready means a proven path: a worker that joins or returns is probed alone and in a pair before it gets requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import pytest
from aiohttp import web

from splitserve.core.clock import ManualClock
from splitserve.core.request import DisaggregationMode
from splitserve.router.args import LBArgs, PrefillConfig
from splitserve.router.registry import Avoid, WorkerRegistry
from splitserve.router.worker import JOINED, LOST, WorkerPair, WorkerProof
from support.router_world import FakeWorker, answers, start_router, start_worker

PREFILL, DECODE, NULL = DisaggregationMode.PREFILL, DisaggregationMode.DECODE, DisaggregationMode.NULL
DEADLINE = 60.0


# -- pure -----------------------------------------------------------------------------------------------------------


def test_pauses_between_probes_grow_up_to_a_bound_and_start_again_when_it_was_lost() -> None:
    proof = WorkerProof.wanted(is_held=False)
    pauses = []
    for _ in range(8):
        now = proof.next_at
        assert proof.is_due(now)
        proof.fail("no", now)
        pauses.append(proof.next_at - now)
        assert not proof.is_due(proof.next_at - 0.001)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    proof.begin_anew()
    assert (proof.doubt, proof.is_due(0.0)) == (LOST, True)
    proof.succeed()
    assert not proof.is_due(1e9)


def test_nobody_is_in_doubt_where_nobody_probes() -> None:
    registry = WorkerRegistry(LBArgs(probe=False))
    registry.add("d", DECODE)
    worker = registry.get("d")
    worker.mark_unhealthy()
    worker.mark_healthy()
    assert worker.unready_reason is None


@pytest.fixture
def registry() -> WorkerRegistry:
    registry = WorkerRegistry(LBArgs(), ManualClock())
    registry.add("p", PREFILL, 1)
    registry.add("d1", DECODE)
    registry.add("d2", DECODE)
    return registry


def decodes(registry: WorkerRegistry, avoid: Avoid | None = None) -> set[str]:
    pairs = [registry.select(avoid=avoid or Avoid()) for _ in range(6)]
    return {pair.decode.url for pair in pairs if isinstance(pair, WorkerPair)}


def test_who_joins_beside_a_proven_one_is_held_back_until_it_is_proven(registry: WorkerRegistry) -> None:
    d1, d2 = registry.get("d1"), registry.get("d2")
    d1.proof.succeed()
    d2.proof.succeed()
    registry.add("d3", DECODE)
    assert registry.get("d3").unready_reason == JOINED
    assert decodes(registry) == {"d1", "d2"}
    # A request that failed there should try the new worker, as there is no other.
    assert decodes(registry, Avoid(failed={d1: 0.0, d2: 0.0})) == decodes(registry, Avoid(suspects={d1, d2})) == {"d3"}
    # A request that ends well is a proof.
    registry.get("d3").forgive()
    assert decodes(registry) == {"d1", "d2", "d3"}


def test_those_that_were_there_first_share_the_load_until_a_probe_fails(registry: WorkerRegistry) -> None:
    assert [w.unready_reason for w in registry.all()] == [JOINED] * 3
    registry.get("d1").proof.succeed()
    assert decodes(registry) == {"d1", "d2"}
    registry.get("d2").proof.fail("no", 0.0)
    assert decodes(registry) == {"d1"}
    registry.get("d1").proof.fail("no", 0.0)
    assert decodes(registry) == {"d1", "d2"}


def test_who_was_lost_is_in_doubt_when_it_comes_back(registry: WorkerRegistry) -> None:
    for worker in registry.all():
        worker.proof.succeed()
    d1 = registry.get("d1")
    d1.mark_unhealthy()
    d1.mark_unhealthy()
    d1.mark_healthy()
    assert d1.unready_reason == LOST
    assert decodes(registry) == {"d2"}


@pytest.mark.parametrize(
    ("workers", "ready", "reason"),
    [
        ([], [], "no prefill worker is registered and no decode worker is registered"),
        ([("p", PREFILL)], ["p"], "no decode worker is registered"),
        (
            [("p", PREFILL), ("d", DECODE), ("e", DECODE)],
            ["p"],
            "no decode worker is ready (2 not proven)",
        ),
        ([("n", NULL)], [], "no colocated worker is ready (1 not proven)"),
        (
            [("p", PREFILL), ("n", NULL)],
            ["p"],
            "no decode worker is registered and no colocated worker is ready (1 not proven)",
        ),
        ([("p", PREFILL), ("d", DECODE), ("e", DECODE)], ["p", "e"], None),
        ([("p", PREFILL), ("n", NULL)], ["n"], None),
    ],
)
def test_ready_means_one_whole_path(
    workers: list[tuple[str, DisaggregationMode]], ready: list[str], reason: str | None
) -> None:
    registry = WorkerRegistry(LBArgs(), ManualClock())
    for url, mode in workers:
        registry.add(url, mode, 1 if mode is PREFILL else None)
    for url in ready:
        registry.get(url).proof.succeed()
    assert registry.unready_reason() == reason


def test_the_reason_counts_who_is_away_and_who_drains(registry: WorkerRegistry) -> None:
    for worker in registry.all():
        worker.proof.succeed()
    registry.get("d1").mark_unhealthy()
    registry.get("d2").is_draining = True
    assert registry.unready_reason() == "no decode worker is ready (1 unhealthy, 1 draining)"


# -- with workers ---------------------------------------------------------------------------------------------------


@dataclass
class Scripted:
    """A worker with changing answers to probes."""

    generates: int = 200
    hands_over: int = 200
    # Rooms that probes and requests came with.
    rooms: list[int] = field(default_factory=list)
    rids: list[str] = field(default_factory=list)
    # Tokens that probes requested.
    num_tokens: list[int] = field(default_factory=list)
    fake: FakeWorker | None = None
    hangs: bool = False
    # It generates from then on. None: at once.
    begins: asyncio.Event | None = None

    @property
    def url(self) -> str:
        assert self.fake is not None
        return self.fake.url

    async def handle(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.hangs:
            await asyncio.Event().wait()
        if request.path == "/health_generate":
            if self.begins is not None:
                await self.begins.wait()
            return web.json_response({}, status=self.generates)
        if request.path == "/generate":
            self.rids.append(body["rid"])
            if body.get("dispatch", {}).get("probe"):
                self.num_tokens.append(body["sampling_params"]["max_new_tokens"])
            self.rooms.append(body.get("bootstrap_room"))
            return web.json_response({"text": "ok"}, status=self.hands_over)
        return web.json_response({})

    @property
    def num_served(self) -> int:
        """Requests that were no probes."""
        return sum(not rid.startswith("probe-") for rid in self.rids)


class World:
    def __init__(self, router: str, client: aiohttp.ClientSession) -> None:
        self.router = router
        self.client = client

    async def get(self, path: str) -> tuple[int, str]:
        async with self.client.get(self.router + path) as response:
            return response.status, await response.text()

    async def worker(self, scripted: Scripted) -> dict[str, Any]:
        async with self.client.get(f"{self.router}/workers") as response:
            workers = (await response.json())["workers"]
        found: dict[str, Any] = next(w for w in workers if w["url"] == scripted.url)
        return found

    async def until(self, scripted: Scripted, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        limit = time.monotonic() + DEADLINE
        while not is_so(state := await self.worker(scripted)):
            assert time.monotonic() < limit, state
            await asyncio.sleep(0.01)
        return state

    async def until_ready(self, *workers: Scripted) -> None:
        for worker in workers:
            await self.until(worker, lambda state: bool(state["ready"]))

    async def generate(self) -> int:
        async with self.client.post(f"{self.router}/generate", json={"text": "a"}) as response:
            return response.status


@asynccontextmanager
async def probed(
    prefill: list[Scripted], decode: list[Scripted], null: list[Scripted] | None = None, **options: Any
) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        for scripted in (*prefill, *decode, *(null or [])):
            scripted.fake = await stack.enter_async_context(start_worker(scripted.handle))
        router = start_router(
            prefill=tuple(PrefillConfig(w.url, 8998) for w in prefill),
            decode=tuple(w.url for w in decode),
            workers=tuple(w.url for w in null or []),
            **{"probe": True, "health_interval": 0.02, **options},
        )
        url = await stack.enter_async_context(router)
        client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE))
        yield World(url, await stack.enter_async_context(client))


async def test_a_pair_is_ready_when_each_generates_and_both_have_served_a_request_together() -> None:
    p, d = Scripted(), Scripted()
    async with probed([p], [d]) as world:
        await world.until_ready(p, d)
        assert (await world.get("/ready"))[0] == 200
        for worker in (p, d):
            assert worker.fake is not None
            assert worker.fake.paths[:2] == ["/get_model_info", "/health_generate"]
        assert set(p.rooms) == set(d.rooms)
        assert None not in p.rooms
        _, metrics = await world.get("/metrics")
        assert 'splitserve_router:workers_ready{mode="decode"} 1.0' in metrics
        assert 'splitserve_router:probes_total{outcome="ok"} 2.0' in metrics


@pytest.mark.parametrize("status", [404, 405])
async def test_workers_that_cannot_be_asked_are_trusted(status: int) -> None:
    """Workers of other projects, for example."""
    p, d = Scripted(generates=status, hands_over=status), Scripted(generates=status)
    async with probed([p], [d]) as world:
        await world.until_ready(p, d)


@pytest.mark.parametrize("has_key", [False, True])
async def test_workers_that_want_another_key_are_not_ready_and_say_which(tmp_path: Path, has_key: bool) -> None:
    keys = tmp_path / "keys"
    keys.write_text("router-0123456789abcdef\n")
    keys.chmod(0o600)
    p, d = Scripted(generates=401, hands_over=401), Scripted(generates=401, hands_over=401)
    async with probed([p], [d], worker_key_file=keys if has_key else None) as world:
        state = await world.until(d, lambda state: "--worker-key-file" in state["reason"])
        assert ("does not take this router's key" in state["reason"]) is has_key
        assert (await world.get("/ready"))[0] == 503
        assert (await world.get("/health_generate"))[0] != 200


async def test_a_colocated_worker_is_ready_when_it_generates() -> None:
    worker = Scripted()
    async with probed([], [], [worker]) as world:
        await world.until_ready(worker)
        assert (await world.get("/ready"))[0] == 200
        assert worker.rids == []


async def test_a_worker_without_a_partner_waits_and_is_proven_when_one_joins() -> None:
    p, d = Scripted(), Scripted()
    async with probed([p], []) as world, start_worker(d.handle) as d.fake:
        state = await world.until(p, lambda state: "no decode worker" in state["reason"])
        assert state["ready"] is False
        status, body = await world.get("/ready")
        assert (status, "no decode worker is registered" in body) == (503, True)
        async with world.client.post(
            f"{world.router}/register", json={"mode": "decode", "registry_url": d.url}
        ) as response:
            assert response.status == 200
        await world.until_ready(p, d)


async def test_a_probe_with_a_proven_decode_worker_needs_no_place_in_its_running_batch() -> None:
    p, q, d = Scripted(), Scripted(), Scripted()
    async with probed([p], [d]) as world, start_worker(q.handle) as q.fake:
        await world.until_ready(p, d)
        assert set(d.num_tokens) == set(p.num_tokens) == {2}
        joins = {"mode": "prefill", "registry_url": q.url, "bootstrap_port": 8998}
        async with world.client.post(f"{world.router}/register", json=joins) as response:
            assert response.status == 200
        await world.until_ready(q)
        assert set(q.num_tokens) == {1}


async def test_workers_that_wait_for_a_partner_are_probed_as_soon_as_it_generates() -> None:
    # The next health check would be far too late.
    p, first, second = Scripted(begins=asyncio.Event()), Scripted(), Scripted()
    async with probed([p], [first, second], health_interval=600.0) as world:
        for worker in (first, second):
            await world.until(worker, lambda state: "no prefill worker" in state["reason"])
        assert p.begins is not None
        p.begins.set()
        await world.until_ready(p, first, second)


async def test_a_worker_that_fails_its_probes_gets_nothing_while_another_is_ready() -> None:
    p, good, dumb, deaf = Scripted(), Scripted(), Scripted(generates=503), Scripted(hands_over=500)
    async with probed([p], [good, dumb, deaf]) as world:
        await world.until_ready(p, good)
        reasons = [
            (await world.until(w, lambda state: "still to be probed" not in state["reason"]))["reason"]
            for w in (dumb, deaf)
        ]
        assert "it generates nothing: 503" in reasons[0]
        assert f"no KV transfer: decode worker {deaf.url}: 500" in reasons[1]
        assert [await world.generate() for _ in range(6)] == [200] * 6
        assert (good.num_served, dumb.num_served, deaf.num_served) == (6, 0, 0)
        # It is probed again, and then it counts.
        dumb.generates = 200
        await world.until_ready(dumb)
        assert [await world.generate() for _ in range(4)] == [200] * 4
        assert dumb.num_served == 2


async def test_a_worker_tries_another_partner_after_a_failure() -> None:
    p, broken, good = Scripted(), Scripted(hands_over=500), Scripted()
    async with probed([p], [broken, good]) as world:
        await world.until_ready(p, good)
        assert (await world.worker(broken))["ready"] is False


async def test_without_any_proof_requests_are_tried_as_they_always_were() -> None:
    p, d = Scripted(generates=500), Scripted(generates=500)
    async with probed([p], [d]) as world:
        await world.until(d, lambda state: "500" in state["reason"])
        assert (await world.get("/ready"))[0] == 503
        assert await world.generate() == 200
        # That was the proof.
        await world.until_ready(p, d)
        assert (await world.get("/ready"))[0] == 200


async def test_a_probe_that_hangs_ends_at_its_deadline_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitserve.router.health.PROBE_TIMEOUT", 0.2)
    # Without the earlier question for its context length, which has a longer timeout.
    monkeypatch.setattr("splitserve.router.health.read_context_length", AsyncMock())
    hung, good = Scripted(hangs=True), Scripted()
    async with probed([], [], [hung, good]) as world:
        await world.until_ready(good)
        state = await world.until(hung, lambda state: "it generates nothing" in state["reason"])
        assert "did not answer in time" in state["reason"]


async def test_a_worker_that_was_lost_is_probed_again_before_it_gets_requests() -> None:
    p, d1, d2 = Scripted(), Scripted(), Scripted()
    async with probed([p], [d1, d2]) as world:
        await world.until_ready(p, d1, d2)
        assert d1.fake is not None
        d1.generates, d1.fake.health_status = 500, 503
        await world.until(d1, lambda state: not state["healthy"])
        d1.fake.health_status = 200
        await world.until(d1, lambda state: "it generates nothing: 500" in (state["reason"] or ""))
        assert [await world.generate() for _ in range(4)] == [200] * 4
        assert (d1.num_served, d2.num_served) == (0, 4)


async def test_the_side_that_waits_is_told_to_stop_when_the_other_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitserve.router.health._GRACE", 0.05)
    p, d = Scripted(), Scripted(hands_over=500)

    async def waits(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path == "/generate":
            await asyncio.Event().wait()
        return web.json_response({})

    p.handle = waits  # type: ignore[method-assign]
    async with probed([p], [d]) as world:
        await world.until(p, lambda state: "no KV transfer" in (state["reason"] or ""))
        assert p.fake is not None
        async with asyncio.timeout(DEADLINE):
            await p.fake.cancelled.wait()


async def test_health_generate_goes_through_a_pair_and_says_who_failed() -> None:
    p, d = Scripted(), Scripted()
    async with probed([p], [d], probe=False) as world:
        assert (await world.get("/health_generate"))[0] == 200
        assert p.rooms == d.rooms
        assert len(p.rooms) == 1
        d.hands_over = 500
        status, body = await world.get("/health_generate")
        assert (status, "no KV transfer: decode worker (address: see the router's log): 500" in body) == (503, True)


async def test_health_generate_asks_a_colocated_worker_where_there_are_no_pairs() -> None:
    async with start_worker(answers({})) as worker, start_router(workers=(worker.url,)) as router:
        async with aiohttp.ClientSession() as client, client.get(f"{router}/health_generate") as response:
            assert response.status == 200
        assert worker.paths == ["/health_generate"]
