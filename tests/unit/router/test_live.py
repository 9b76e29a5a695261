"""The live view before scripted workers: what it shows, to which key, and what it costs without readers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest

from splitserve.core.request import DisaggregationMode
from splitserve.observe.live import LiveWorker, WorkerSample
from splitserve.router import live as live_module
from splitserve.router import live_samples
from splitserve.router.args import LBArgs, PrefillConfig
from splitserve.router.balancer import MiniLoadBalancer
from splitserve.router.client_stream import ClientStream
from splitserve.router.live import LiveView, Viewer
from splitserve.router.live_events import LiveEventLog, WorkerChanges
from splitserve.router.live_samples import SILENCE_SECONDS, SampledWorker, rates_between
from splitserve.router.registry import WorkerRegistry
from splitserve.router.worker import Worker
from support.router_world import Rooms, answers, dies, journals, serve_pools, start_router, start_worker

PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
ALICE, BOB, ROOT = "alice-0123456789abcdef", "bob-0123456789abcdef", "root-0123456789abcdef"
SAMPLE = WorkerSample(
    role="decode",
    model="tiny",
    status="ready",
    running=2,
    waiting_reason="kv_pool",
    kv_usage=0.25,
    kv_tokens_total=4096,
)


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let samples and measurements, on which most tests wait, be ten times as frequent."""
    for module in (live_module, live_samples):
        monkeypatch.setattr(module, "INTERVAL", 0.1)


@contextlib.asynccontextmanager
async def subscribed(
    client: aiohttp.ClientSession, url: str, key: str | None = None
) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with client.get(f"{url}/v1/live", headers=headers) as response:
        assert response.status == 200, await response.text()

        async def events() -> AsyncIterator[dict[str, Any]]:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

        yield events()


async def until(updates: AsyncIterator[dict[str, Any]], holds: Any) -> dict[str, Any]:
    """Return the first update for which `holds` is true."""
    async with asyncio.timeout(60):
        async for update in updates:
            if holds(update):
                return update
    raise AssertionError("the stream has ended")


def states(update: dict[str, Any]) -> dict[str, str]:
    return {worker["url"]: worker["state"] for worker in update["workers"]}


async def test_an_update_has_router_workers_links_and_finished_requests() -> None:
    async with serve_pools([answers({})], [journals(3)]) as pools:
        pools.decode[0].sample = SAMPLE
        assert (await pools.post("/generate", {"text": "a", "stream": True, "rid": "r1"}))[0] == 200
        async with subscribed(pools.client, pools.router) as updates:
            first = await anext(updates)
            assert first["can_operate"] is True
            assert [(r["rid"], r["state"], r["output_tokens"]) for r in first["requests"]] == [("r1", "done", 3)]
            assert states(first) == {w.url: "ready" for w in (*pools.prefill, *pools.decode)}
            sampled = await until(updates, lambda u: u["model"] == "tiny")
            assert sampled["requests"] == []
            (decode,) = (w for w in sampled["workers"] if w["role"] == "decode")
            assert (decode["running"], decode["kv_usage"], decode["kv_tokens_total"]) == (2, 0.25, 4096)
            assert decode["waiting_reason"] == "kv_pool"


async def test_a_running_request_is_listed_with_its_link_until_it_ends_and_latencies_are_measured() -> None:
    go_on = asyncio.Event()
    async with serve_pools([answers({})], [journals(4, until=2, go_on=go_on)]) as pools:
        sent = asyncio.create_task(pools.post("/generate", {"text": "a", "stream": True, "rid": "r1"}))
        async with subscribed(pools.client, pools.router) as updates:
            running = await until(updates, lambda u: u["requests"] and u["requests"][0]["output_tokens"] == 2)
            assert [(r["rid"], r["state"]) for r in running["requests"]] == [("r1", "running")]
            assert [(x["prefill"], x["decode"], x["requests"]) for x in running["links"]] == [
                (pools.prefill[0].url, pools.decode[0].url, 1)
            ]
            go_on.set()
            assert (await sent)[0] == 200
            done = await until(updates, lambda u: u["requests"] and u["requests"][0]["state"] == "done")
            assert done["requests"][0]["status"] == 200
            measured = (
                done
                if done["router"]["itl_p50_ms"] is not None
                else await until(updates, lambda u: u["router"]["itl_p50_ms"] is not None)
            )
            assert measured["router"]["itl_p99_ms"] >= measured["router"]["itl_p50_ms"] >= 0


async def test_a_request_without_a_worker_is_waiting_and_on_no_link() -> None:
    async with serve_pools([answers({})], [dies()], worker_wait_timeout=60, health_interval=600) as pools:
        sent = asyncio.create_task(pools.post("/generate", {"text": "a", "rid": "r1"}))
        async with subscribed(pools.client, pools.router) as updates:
            await until(updates, lambda u: [(r["rid"], r["state"]) for r in u["requests"]] == [("r1", "waiting")])
            # Bytes of the last second keep a link in the list.
            await until(updates, lambda u: u["links"] == [] and u["router"]["waiting"] == 1)
        sent.cancel()


def test_requests_in_queues_of_workers_are_not_running() -> None:
    live, balancer = view()
    balancer.running.update({i: (SimpleNamespace(is_at_router=i == 0), None) for i in range(9)})

    def queued(in_flight: int) -> int:
        values = {"reason": "", "state": "ready", "in_flight": in_flight}
        workers = [
            LiveWorker(url="p", name="p", role="prefill", running=1, waiting=2, **values),
            # It counts a request from its arrival, also while its prompt is computed.
            LiveWorker(url="d", name="d", role="decode", running=3, waiting=4, **values),
        ]
        figures = live._figures(workers, 1.0, 0)
        assert (figures.running, figures.waiting) == (8, 1)
        return figures.queued

    assert queued(7) == 3
    # Others are of another router.
    assert queued(2) == 1


async def test_a_worker_that_is_gone_is_seen_at_once_however_rare_health_checks_are() -> None:
    rooms = Rooms()
    async with contextlib.AsyncExitStack() as stack:
        p = await stack.enter_async_context(start_worker(answers({}), rooms=rooms))
        fragile = contextlib.AsyncExitStack()
        d = await fragile.enter_async_context(start_worker(answers({}), rooms=rooms, is_decode=True))
        url = await stack.enter_async_context(
            start_router(prefill=(PrefillConfig(p.url),), decode=(d.url,), health_interval=600.0)
        )
        d.sample = p.sample = SAMPLE
        client = await stack.enter_async_context(aiohttp.ClientSession())
        async with subscribed(client, url) as updates:
            await until(updates, lambda u: u["model"] == "tiny")
            await fragile.aclose()
            lost = await until(updates, lambda u: states(u)[d.url] == "unhealthy")
            assert [(e["kind"], e["worker"]) for e in lost["events"]] == [("worker_lost", d.url)]
            assert states(lost)[p.url] == "ready"
            # Its figures are not those of its last sample.
            assert next(w for w in lost["workers"] if w["url"] == d.url)["running"] == 0


async def test_orders_and_moved_requests_are_events() -> None:
    async with (
        serve_pools([answers({})], [journals(4, until=2), journals(4)]) as pools,
        subscribed(pools.client, pools.router) as updates,
    ):
        await anext(updates)
        assert (await pools.post("/generate", {"text": "a", "stream": True, "rid": "r1"}))[0] == 200
        moved = await until(updates, lambda u: any(e["kind"] == "migration" for e in u["events"]))
        (event,) = (e for e in moved["events"] if e["kind"] == "migration")
        # A drain with `migrate` is no failure.
        assert event["text"] == "A request continues, because its decode worker failed or drains."
        assert (event["rid"], event["worker"]) == ("r1", pools.decode[0].url)
        assert (await pools.post("/workers/drain", {"url": pools.decode[1].url}))[0] == 200
        drained = await until(updates, lambda u: states(u)[pools.decode[1].url] == "draining")
        assert "drain" in [e["kind"] for e in drained["events"]]
        assert (await pools.post("/workers/resume", {"url": pools.decode[1].url}))[0] == 200
        await until(updates, lambda u: "resume" in [e["kind"] for e in u["events"]])
        target = f"{pools.router}/workers?url={pools.decode[0].url}"
        async with pools.client.delete(target) as response:
            assert response.status == 200
        gone = await until(updates, lambda u: states(u).get(pools.decode[0].url) == "gone")
        assert "worker_removed" in [e["kind"] for e in gone["events"]]


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    found = {}
    texts = {"api_key_file": f"{ALICE} alice\n{BOB} bob\n", "operator_key_file": f"{ROOT} root\n"}
    for option, text in texts.items():
        found[option] = tmp_path / option
        found[option].write_text(text)
        found[option].chmod(0o600)
    return found


async def test_a_client_sees_its_own_requests_and_no_addresses_and_an_operator_sees_all(keys) -> None:
    async with serve_pools([answers({})], [journals(2)], **keys) as pools:
        pools.decode[0].sample = pools.prefill[0].sample = SAMPLE
        for path in ("/v1/live", "/v1/charts"):
            async with pools.client.get(pools.router + path) as response:
                assert response.status == 401
        for key, rid in ((ALICE, "of-alice"), (BOB, "of-bob")):
            headers = {"authorization": f"Bearer {key}"}
            body = {"text": "a", "stream": True, "rid": rid}
            assert (await pools.post("/generate", body, headers))[0] == 200
        async with (
            subscribed(pools.client, pools.router, ALICE) as of_alice,
            subscribed(pools.client, pools.router, ROOT) as of_root,
        ):
            first, whole = await anext(of_alice), await anext(of_root)
            await until(of_alice, lambda u: u["model"] == "tiny")
        assert (first["can_operate"], [r["rid"] for r in first["requests"]]) == (False, ["of-alice"])
        assert (whole["can_operate"], {r["rid"] for r in whole["requests"]}) == (True, {"of-alice", "of-bob"})
        assert "127.0.0.1" not in json.dumps(first)
        assert {w["url"] for w in first["workers"]} == {"worker-1", "worker-2"}
        headers = {"authorization": f"Bearer {ALICE}"}
        async with pools.client.get(f"{pools.router}/v1/charts", headers=headers) as response:
            assert "127.0.0.1" not in await response.text()


async def test_the_number_of_subscribers_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(live_module, "MAX_SUBSCRIBERS", 1)
    async with start_router() as router, aiohttp.ClientSession() as client, subscribed(client, router) as updates:
        await anext(updates)
        async with client.get(f"{router}/v1/live") as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "over_capacity"


async def test_the_router_ends_although_a_subscriber_stays() -> None:
    router = start_router(stop_seconds=600.0)
    url = await router.__aenter__()
    async with aiohttp.ClientSession() as client, subscribed(client, url) as updates:
        await anext(updates)
        async with asyncio.timeout(60):
            await router.__aexit__(None, None, None)
        assert [update async for update in updates] == []


async def test_charts_have_a_point_per_second_with_series_of_router_and_workers() -> None:
    async with serve_pools([answers({})], [answers({})]) as pools:
        pools.decode[0].sample = SAMPLE
        async with asyncio.timeout(60):
            found: dict[str, Any] = {"time": []}
            while f"kv_usage:{pools.decode[0].url}" not in found.get("series", {}):
                async with pools.client.get(f"{pools.router}/v1/charts") as response:
                    found = await response.json()
        assert {"running", "waiting", "tokens_per_s", "requests_per_s", "loop_lag_ms"} <= found["series"].keys()
        assert {len(values) for values in found["series"].values()} == {len(found["time"])}
        async with pools.client.get(f"{pools.router}/v1/charts?since=soon") as response:
            assert response.status == 400


def view(**options: Any) -> tuple[LiveView, MiniLoadBalancer]:
    balancer = MiniLoadBalancer(LBArgs(probe=False, **options))
    return balancer.live, balancer


async def test_a_slow_subscriber_gets_merged_updates_and_equal_positions_share_their_bytes() -> None:
    live, _ = view()
    fast, same, slow = (live.updates(Viewer()) for _ in range(3))
    for stream in (fast, same, slow):
        await anext(stream)
    for number in range(3):
        live.events.add("retry", "", f"event {number}")
        live.publish()
        assert (await anext(fast)) == (await anext(same))
    merged = msgspec.json.decode((await anext(slow))[len(b"data: ") :])
    assert [event["text"] for event in merged["events"]] == ["event 0", "event 1", "event 2"]
    for stream in (fast, same, slow):
        await stream.aclose()


async def test_an_event_between_two_equal_subscribers_is_lost_by_neither() -> None:
    live, _ = view()
    first, second = live.updates(Viewer()), live.updates(Viewer())
    seen: list[str] = []
    for stream in (first, second):
        await anext(stream)
    live.events.add("retry", "", "one")
    live.publish()
    await anext(first)
    live.events.add("retry", "", "two")
    for _ in range(2):
        update = msgspec.json.decode((await anext(second))[len(b"data: ") :])
        seen += [event["text"] for event in update["events"]]
        live.publish()
    assert seen == ["one", "two"]
    for stream in (first, second):
        await stream.aclose()


async def test_without_subscribers_no_request_is_listed() -> None:
    live, _ = view()
    stream = live.updates(Viewer())
    await anext(stream)
    version = live.requests.version
    await stream.aclose()
    live.publish()
    assert live.requests.version == version


def changes() -> tuple[WorkerChanges, LiveEventLog, list[float]]:
    now = [100.0]
    log = LiveEventLog(lambda: now[0])
    return WorkerChanges(log, lambda: now[0]), log, now


def test_changes_of_workers_become_events_once() -> None:
    found, log, now = changes()
    worker = Worker("http://a:1", DECODE)
    for _ in range(2):
        found.compare([worker])
    worker.mark_unhealthy()
    for _ in range(2):
        found.compare([worker])
    worker.mark_healthy()
    found.compare([worker])
    found.compare([Worker("http://a:1", PREFILL)])
    found.compare([])
    assert [event.kind for event in log.after(0)] == [
        "worker_joined",
        "worker_lost",
        "worker_back",
        "role_changed",
        "worker_removed",
    ]
    assert list(found.gone) == ["http://a:1"]
    now[0] += 61
    found.compare([])
    assert not found.gone


def test_the_reason_of_a_removal_does_not_repeat_it() -> None:
    found, log, _ = changes()
    worker = Worker("http://a:1", DECODE)
    found.compare([worker])
    worker.mark_unhealthy()
    found.compare([worker])
    found.compare([])
    assert found.gone[worker.url].reason == "it did not answer"
    assert log.after(0)[-1].text == "A decode worker was removed: it did not answer."


@pytest.mark.parametrize(
    ("leave", "reason"),
    [
        # The supervisor removes a worker that has ended.
        (lambda registry, url: registry.remove(url), "it has ended, or an operator removed it"),
        (lambda registry, url: registry.deregister(url), "it deregistered, because it stops, fails"),
        (lambda registry, url: registry.deregister(url, "its weights are being replaced"), "its weights are being"),
    ],
)
def test_the_reason_of_a_removal_distinguishes_the_end_of_a_worker_from_its_own_deregistration(leave, reason) -> None:
    found, _, _ = changes()
    registry = WorkerRegistry()
    registry.add("http://a:1", DECODE)
    found.compare(registry.all())
    leave(registry, "http://a:1")
    found.compare(registry.all())
    assert found.gone["http://a:1"].reason.startswith(reason)


def test_a_role_switch_is_no_drain() -> None:
    found, log, _ = changes()
    worker = Worker("http://a:1", DECODE)
    found.compare([worker])
    worker.is_draining, worker.switching_to = True, PREFILL
    found.compare([worker])
    worker.is_draining, worker.switching_to = False, None
    found.compare([worker])
    assert [event.kind for event in log.after(0)] == ["worker_joined"]


async def test_output_tokens_of_a_running_request_are_counted_once_per_line() -> None:
    async def nothing(*_: Any) -> Any:
        raise AssertionError("unused")

    client = ClientStream(nothing, nothing)
    client.lines += [b'{"token_ids":[1,2]}']
    assert client.count_tokens() == 2
    # A line that was counted is not read again.
    client.lines[0] = b"broken"
    client.lines += [b'{"token_ids":[3]}']
    assert client.count_tokens() == 3
    client.lines += [b"broken"]
    assert client.count_tokens() is None


def test_rates_are_those_between_two_samples() -> None:
    before = WorkerSample(role="decode", model="m", status="ready")
    after = msgspec.structs.replace(
        before,
        num_steps=10,
        step_seconds=0.5,
        output_tokens=40,
        computed_tokens=900,
        prefix_queries=100,
        prefix_hits=25,
        transfer_bytes=4000,
    )
    found = rates_between(before, after, 2.0)
    assert (found.tokens_per_s, found.step_ms, found.prefix_hit_rate) == (20.0, 50.0, 0.25)
    assert found.transfer_bytes_per_s == 2000.0
    prefill = msgspec.structs.replace(after, role="prefill")
    assert rates_between(before, prefill, 2.0).tokens_per_s == 450.0


def test_a_restarted_worker_has_no_rates_until_its_second_sample() -> None:
    found = SampledWorker()
    found.take(WorkerSample(role="decode", model="m", status="ready", num_steps=50, output_tokens=500), 1.0)
    found.take(WorkerSample(role="decode", model="m", status="ready", num_steps=2, output_tokens=20), 2.0)
    assert found.rates.tokens_per_s is None
    found.take(WorkerSample(role="decode", model="m", status="ready", num_steps=3, output_tokens=30), 3.0)
    assert found.rates.tokens_per_s == 10.0


def test_the_rates_of_a_long_step_stay_until_its_worker_is_unready() -> None:
    found = SampledWorker()
    for second in range(3):
        sample = WorkerSample(
            role="decode", model="m", status="ready", running=1, num_steps=min(second, 1), output_tokens=10 * second
        )
        found.take(sample, float(second))
        assert found.rates.tokens_per_s == (10.0 if second else None)
    found.take(msgspec.structs.replace(sample, status="unready"), 5.0)
    assert (found.rates.tokens_per_s, found.rates.step_ms) == (2.5, None)
    found.take(msgspec.structs.replace(sample, status="unready"), 6.0)
    assert found.rates.tokens_per_s == 0.0


async def test_a_worker_that_does_not_answer_is_shown_as_unhealthy_after_some_seconds() -> None:
    live, balancer = view(decode=("http://a:1",))
    now = [0.0]
    live.sampler._clock = lambda: now[0]
    live.sampler.workers["http://a:1"] = SampledWorker(SAMPLE, silent_since=0.0)
    (worker,) = balancer.registry.all()
    assert live.sampler.describe(worker).state == "ready"
    now[0] = SILENCE_SECONDS
    assert live.sampler.describe(worker).state == "unhealthy"


async def test_the_bytes_of_a_prefill_worker_are_divided_among_its_links() -> None:
    live, _ = view()
    sampled = SampledWorker(SAMPLE)
    sampled.rates.transfer_bytes_per_s = 1000.0
    live.sampler.workers["p"] = sampled
    live.requests._finished_on.update({("p", "d1"): 3, ("p", "d2"): 1})
    live.measure()
    links = {(x.prefill, x.decode): (x.requests, x.bytes_per_s) for x in live.update(Viewer()).links}
    assert links == {("p", "d1"): (0, 750), ("p", "d2"): (0, 250)}
