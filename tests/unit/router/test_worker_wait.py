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

from splitserve.core.clock import ManualClock
from splitserve.core.errors import NoWorkerError, WorkerUnavailableError
from splitserve.core.request import DisaggregationMode
from splitserve.router import app
from splitserve.router.args import LBArgs, PrefillConfig
from splitserve.router.registry import Avoid, WorkerRegistry
from splitserve.router.waiting import Wakeup, wait_reason
from splitserve.router.worker import Worker
from support.router_world import (
    DEADLINE,
    Pools,
    answers,
    dies,
    journals,
    reports,
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
        # And its trace has the reason; that of a request without a wait has none.
        assert await pools.post("/generate", {"text": "b"}) == (status, body)
        async with pools.client.get(pools.router + "/v1/traces?limit=2") as response:
            rids = [trace["rid"] for trace in (await response.json())["traces"]]
        reasons = []
        for rid in rids:
            async with pools.client.get(f"{pools.router}/v1/trace/{rid}") as response:
                stages = {stage["name"]: stage["attributes"] for stage in (await response.json())["stages"]}
                reasons.append(stages["router_choose"])
        assert reasons == [{}, {"reason": "no_decode_worker"}]


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


async def test_a_worker_that_failed_gets_the_request_again_after_its_scheduler_has_answered() -> None:
    async def decode(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (answers(OK) if body["dispatch"]["attempt"] else reports("peer_lost", 500))(request, body)

    async with serve_pair(answers({}), decode, **LONG) as pair:
        # The HTTP server of prefill answers, its scheduler hangs.
        pair.prefill.load_status = 504
        request = asyncio.create_task(pair.post("/generate", {"text": "a"}))
        await pair.prefill.asked_often.wait()
        # It registers again and again, as all workers do.
        order = {"registry_url": pair.prefill.url, "mode": "prefill", "bootstrap_port": 1}
        async with pair.client.post(pair.router + "/workers", json=order) as response:
            assert response.status == 200
        await waits(pair.client, pair.router)
        assert len(pair.prefill.bodies) == 1
        pair.prefill.load_status = 200
        status, body, _ = await request
        assert (status, json.loads(body)) == (200, OK)


@pytest.mark.parametrize(
    "code", ["kv_transfer_failed", "worker_unavailable", "memory_released", "ranks_lost", "worker_draining"]
)
async def test_the_only_pair_gets_a_request_again_if_the_failure_may_have_passed(code: str) -> None:
    async def decode(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (answers(OK) if body["dispatch"]["attempt"] else reports(code, 503))(request, body)

    async with serve_pair(answers({}), decode, **LONG) as pair:
        status, body, _ = await pair.post("/generate", {"text": "a"})
        assert (status, json.loads(body)) == (200, OK)


@pytest.mark.parametrize("code", ["over_capacity", "engine_error"])
async def test_the_only_pair_does_not_get_a_request_again_that_it_would_reject_again(code: str) -> None:
    async with serve_pair(answers({}), reports(code, 503), **LONG) as pair:
        status, body, _ = await pair.post("/generate", {"text": "a"})
        assert (status, json.loads(body)["error"]["code"]) == (503, code)
        assert len(pair.decode.bodies) == 1


async def test_after_the_timeout_the_error_states_the_wait() -> None:
    async with without_decode(worker_wait_timeout=0.01) as pools:
        data = json.dumps(STREAM | {"rid": "mine"}).encode()
        async with pools.client.post(pools.router + "/generate", data=data) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"], "retry-after" in response.headers) == (503, "decode", True)
        assert "request mine (stage: dispatch): none of the 1 decode worker(s)" in error["message"]
        assert "(waited 0." in error["message"]
        # Its trace has the wait, too.
        async with pools.client.get(pools.router + "/v1/trace/mine") as response:
            trace = await response.json()
        choices = [stage["attributes"] for stage in trace["stages"] if stage["name"] == "router_choose"]
        assert (choices, trace["attempts"]) == ([{"reason": "no_decode_worker"}], 0)


async def test_a_stream_ends_with_the_cause_and_the_wait_if_no_worker_returns() -> None:
    async def decode(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        pair.decode.health_status = 503
        return await journals(COUNT, until=1)(request, body)

    options: dict[str, Any] = {"worker_wait_timeout": 0.01, "health_interval": 0.05}
    async with serve_pair(answers({}), decode, **options) as pair:
        status, body, _ = await pair.post("/generate", STREAM)
        *_, last, _, _ = body.decode().split("\n\n")
        assert (status, body.count(b'{"i"')) == (200, 1)
        for part in ("stage: streaming", "decode worker went away", "answers or takes requests", "(waited 0."):
            assert part in last


async def test_the_wait_counts_as_time_of_the_request() -> None:
    async with without_decode() as pools:
        request = asyncio.create_task(pools.post("/generate", {"text": "a", "timeout": 50}))
        await waits(pools.client, pools.router)
        pools.decode[0].health_status = 200
        assert (await request)[0] == 200
        assert pools.decode[0].bodies[0]["timeout"] < 50


async def test_a_request_waits_no_longer_than_its_own_timeout() -> None:
    async with without_decode() as pools:
        status, body = await pools.post("/generate", {"text": "a", "timeout": 0.05, "rid": "mine"})
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (504, "deadline_exceeded")
        assert "its 0.05 s ended during a wait for a worker" in error["message"]
        assert "none of the 1 decode worker(s)" in error["message"]
        assert error["param"] == "decode"


@pytest.mark.parametrize(
    ("roles", "reason"), [("decode", "no_decode_worker"), ("prefill,decode", "no_worker"), (None, "no_worker")]
)
def test_the_reason_of_a_wait_names_the_role(roles: str | None, reason: str) -> None:
    assert wait_reason(NoWorkerError("none", param=roles)) == reason


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


async def test_a_request_does_not_wait_for_a_role_that_had_no_worker() -> None:
    async with (
        start_worker(answers({})) as prefill,
        start_router(prefill=(PrefillConfig(prefill.url, 1),), **LONG) as router,
        aiohttp.ClientSession() as client,
        client.post(router + "/generate", json={"text": "a"}) as response,
    ):
        assert response.status == 503
        assert "no decode worker is registered" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("path", ["/generate", "/tokenize"])
async def test_requests_to_a_restarted_router_wait_for_workers_to_register(path: str) -> None:
    async with (
        start_worker(answers(OK)) as worker,
        start_router(expects_workers=True, **LONG) as router,
        aiohttp.ClientSession() as client,
    ):
        request = asyncio.create_task(client.post(router + path, json={"text": "a", "prompt": "a"}))
        if path == "/generate":
            await waits(client, router)
        else:
            await asyncio.sleep(0)
        order = {"registry_url": worker.url, "mode": "null"}
        async with client.post(router + "/workers", json=order) as response:
            assert response.status == 200, await response.text()
        async with await request as response:
            assert (response.status, await response.json()) == (200, OK)


def test_a_router_waits_for_workers_if_it_inherited_its_listener(monkeypatch) -> None:
    expected = []

    def build(args: LBArgs, *, expects_workers: bool) -> Any:
        expected.append(expects_workers)
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "build_router_app", build)
    monkeypatch.setattr(app, "setup_logger", lambda *_: None)
    for fd in (None, 3):
        with pytest.raises(KeyboardInterrupt):
            app.run_router(LBArgs(), fd=fd)
    assert expected == [False, True]


async def test_an_engine_error_ends_the_request_although_a_later_failure_may_pass() -> None:
    codes = ["engine_error", "kv_transfer_failed"]

    async def decode(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await reports(codes[body["dispatch"]["attempt"]], 500)(request, body)

    async with serve_pools([answers({})] * 2, [decode], **LONG) as pools:
        assert (await pools.post("/generate", {"text": "a"}))[0] == 500
        assert len(pools.decode[0].bodies) == 2


async def test_a_waiting_request_is_sent_when_an_operator_resumes_a_worker() -> None:
    options: dict[str, Any] = {"worker_wait_timeout": DEADLINE, "health_interval": 60.0}
    async with serve_pools([answers({})], [answers(OK)], **options) as pools:
        order = {"url": pools.decode[0].url}
        assert (await pools.post("/workers/drain", order | {"force": True}))[0] == 200
        request = asyncio.create_task(pools.post("/generate", {"text": "a"}))
        await waits(pools.client, pools.router)
        assert (await pools.post("/workers/resume", order))[0] == 200
        assert (await request)[0] == 200


async def test_waiting_requests_do_not_delay_the_end_of_the_router() -> None:
    async with start_worker(answers(OK)) as worker, aiohttp.ClientSession() as client:
        worker.health_status = 503
        async with start_router(workers=(worker.url,), stop_seconds=DEADLINE, **LONG) as router:
            await until(client, router + "/workers", '"healthy":false')
            request = asyncio.create_task(client.post(router + "/generate", json={"text": "a"}))
            await waits(client, router)
        async with await request as response:
            assert (response.status, "this router stops" in await response.text()) == (503, True)


async def test_the_metrics_have_the_time_of_the_longest_wait() -> None:
    async with without_decode() as pools:
        request = asyncio.create_task(pools.post("/generate", {"text": "a"}))
        await waits(pools.client, pools.router)
        async with pools.client.get(pools.router + "/metrics") as response:
            lines = (await response.text()).splitlines()
        (waited,) = [
            line for line in lines if line.startswith('splitserve_router:queue_oldest_seconds{queue="worker"}')
        ]
        assert float(waited.split()[1]) > 0
        pools.decode[0].health_status = 200
        assert (await request)[0] == 200


async def test_other_routes_wait_too() -> None:
    async with start_worker(answers({"tokens": [1]})) as worker, start_router(workers=(worker.url,), **LONG) as router:
        worker.health_status = 503
        async with aiohttp.ClientSession() as client:
            await until(client, router + "/workers", '"healthy":false')

            async def tokenize() -> tuple[int, Any]:
                async with client.post(router + "/tokenize", json={"prompt": "a"}) as response:
                    return response.status, await response.json()

            request = asyncio.create_task(tokenize())
            await asyncio.sleep(0)
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


def test_an_incompatible_pair_is_not_waited_for_unless_another_worker_may_return() -> None:
    registry = WorkerRegistry()
    registry.add("p", PREFILL)
    registry.add("d", DECODE)
    registry.get("p").add_misfit(registry.get("d"), "page size", until=float("inf"))
    with pytest.raises(WorkerUnavailableError, match="fit together") as raised:
        registry.select()
    assert not isinstance(raised.value, NoWorkerError)
    registry.add("d2", DECODE)
    registry.get("d2").mark_unhealthy()
    with pytest.raises(NoWorkerError, match="fit together"):
        registry.select()


def test_colocated_workers_may_return_although_one_worker_of_a_pair_was_there() -> None:
    registry = WorkerRegistry()
    registry.add("n", NULL)
    registry.add("p", PREFILL)
    registry.remove("n")
    registry.remove("p")
    with pytest.raises(NoWorkerError, match=r"^no colocated worker is registered"):
        registry.select()


def test_a_health_check_that_began_before_the_failure_does_not_count() -> None:
    clock = ManualClock()
    worker, avoid = Worker("d", DECODE, clock=clock), Avoid()
    clock.advance(1.0)
    avoid.add_failed(worker, clock.now())
    worker.mark_healthy(asked_at=0.5)
    assert avoid.excludes(worker)
    clock.advance(1.0)
    assert worker.mark_healthy()
    assert not avoid.excludes(worker)
    # It could get requests before, too.
    assert not worker.mark_healthy()


def test_failures_that_may_pass_do_not_cover_others() -> None:
    one, two = Worker("1", DECODE), Worker("2", DECODE)
    avoid = Avoid()
    avoid.add_suspects([one, two], may_pass=True)
    avoid.add_suspects([one], may_pass=False)
    avoid.add_suspects([one, two], may_pass=True)
    assert (avoid.suspects, list(avoid.passing)) == ({one, two}, [two])


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
