"""Workers die under streams of a tiny random model: every stream ends with the output of an undisturbed run.

`make soak` also stops workers instead of killing them, and restarts all of them in turn under load.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import httpx
import psutil
import pytest
import torch

from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.process.child import POLL_INTERVAL, ChildProcess
from splitserve.tools.chaos.faults import PROGRAM, Fault, FaultOrder, FaultStage
from splitserve.tools.chaos.injector import signal_worker
from splitserve.tools.chaos.streams import StreamOutcome, follow, make_requests, open_session
from splitserve.tools.client import sum_samples
from support.processes import unended
from support.streams import follow_all
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.process

PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
NUM_TOKENS = 96
# Tokens of streams that must not have ended when the client's kill arrives late: seconds of decoding.
MANY_TOKENS = 1000
# Seconds that all streams of a test may take.
DEADLINE = 120.0


def run(url: str, count: int) -> dict[int, StreamOutcome]:
    return follow_all(url, make_requests(count, NUM_TOKENS), timeout=DEADLINE)


def run_long(url: str, disturb: Callable[[], object] | None = None) -> dict[int, StreamOutcome]:
    """Run two long streams, each event of which has only new tokens. `disturb`: see `follow_all`."""
    return follow_all(url, make_requests(4, MANY_TOKENS)[3:] * 2, timeout=DEADLINE, disturb=disturb, after=3)


def check_same(outcomes: dict[int, StreamOutcome], expected: dict[int, StreamOutcome]) -> None:
    assert {i: problem for i, o in outcomes.items() if (problem := o.difference(expected[i]))} == {}


def migrations(url: str) -> float:
    return sum_samples(url, kind="migration").get("splitserve_router:retries_total", 0.0)


def kill_and_restart(cluster: LocalCluster, child: ChildProcess) -> None:
    signal_worker(child, signal.SIGKILL)
    cluster.restart(child)


@contextmanager
def serving(folder: Any, *router_args: str, prefill: int = 2, decode: int = 2) -> Iterator[LocalCluster]:
    model = str(make_tiny_model("llama", folder / "llama", dtype=torch.bfloat16))
    args = ["--max-total-tokens", "20000"]
    with LocalCluster(
        LocalDeployment(
            model=model,
            prefill=prefill,
            decode=decode,
            threads=1,
            worker_args=args,
            router_args=router_args,
        ),
        worker_program=PROGRAM,
    ) as cluster:
        cluster.wait_ready(timeout=300)
        yield cluster


def test_streams_outlive_their_workers_and_wait_for_the_restart_of_the_last_one(tmp_path):
    # Fork servers of other tests may still be children of this process.
    before = set(psutil.Process().children(recursive=True))
    with serving(tmp_path, "--worker-wait-timeout", str(DEADLINE)) as cluster:
        url = cluster.router_url
        expected = run(url, 6)
        first, second = cluster.children_of(DECODE)
        # Late in the streams, so that the front end has sent tokens before its scheduler dies. On a busy machine it may
        # lag so far behind that it has sent none. Then the requests begin again.
        FaultOrder.give(first.ready_path, Fault(FaultStage.MID_STREAM, signal.SIGKILL, skip=NUM_TOKENS * 3 // 4))
        check_same(run(url, 6), expected)
        assert sum_samples(url)["splitserve_router:retries_total"] > 0
        # Nothing of these prompts may be cached, because the fault waits for a computed chunk.
        for child in (*cluster.children_of(PREFILL), second):
            httpx.post(f"{child.ready.url}/flush_cache").raise_for_status()
        # No stream changes if a prefill worker dies in the middle of a write.
        order = FaultOrder.give(
            cluster.children_of(PREFILL)[0].ready_path, Fault(FaultStage.MID_TRANSFER, signal.SIGKILL)
        )
        check_same(run(url, 6), expected)
        assert order.is_taken
        # No other decode worker is left.
        expected, before_kill = run_long(url), migrations(url)
        check_same(run_long(url, lambda: kill_and_restart(cluster, second)), expected)
        assert migrations(url) > before_kill
    left = set(psutil.Process().children(recursive=True)) - before
    assert not unended(left)


def test_a_request_that_kills_its_prefill_worker_twice_ends_and_the_third_worker_serves_on(tmp_path):
    with serving(tmp_path, prefill=3, decode=1) as cluster:
        url = cluster.router_url
        orders = [
            FaultOrder.give(c.ready_path, Fault(FaultStage.QUEUED, signal.SIGKILL))
            for c in cluster.children_of(PREFILL)
        ]
        response = httpx.post(f"{url}/generate", json={"text": "a poison", "rid": "mine"}, timeout=DEADLINE)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (500, "poison_request")
        assert "request mine (stage: prefill, try 2)" in error["message"]
        assert sorted(order.is_taken for order in orders) == [False, True, True]
        (left,) = (order for order in orders if not order.is_taken)
        assert left.withdraw()
        assert httpx.post(f"{url}/generate", json={"text": "harmless"}, timeout=DEADLINE).status_code == 200


@pytest.mark.soak
def test_streams_outlive_a_decode_worker_that_is_stopped(tmp_path):
    with serving(tmp_path, "--hang-timeout", "3", "--health-interval", "0.5") as cluster:
        expected = run(cluster.router_url, 12)
        first, _ = cluster.children_of(DECODE)
        FaultOrder.give(first.ready_path, Fault(FaultStage.MID_STREAM, signal.SIGSTOP, skip=NUM_TOKENS // 3))
        try:
            check_same(run(cluster.router_url, 12), expected)
            assert migrations(cluster.router_url) > 0
        finally:
            signal_worker(first, signal.SIGCONT)


@pytest.mark.soak
def test_every_worker_is_restarted_under_load_and_no_request_notices(tmp_path):
    with serving(tmp_path) as cluster:
        url = cluster.router_url
        expected = run(url, 12)
        asyncio.run(_restart_all(cluster, expected))
        assert migrations(url) > 0


async def _restart_all(cluster: LocalCluster, expected: dict[int, StreamOutcome]) -> None:
    is_over, round_ended = False, asyncio.Event()
    requests = make_requests(len(expected), NUM_TOKENS)
    async with open_session(DEADLINE) as client:

        async def load() -> None:
            while not is_over:
                outcomes = {i: StreamOutcome() for i in expected}
                await asyncio.gather(*(follow(client, cluster.router_url, requests[i], o) for i, o in outcomes.items()))
                check_same(outcomes, expected)
                round_ended.set()

        running = asyncio.create_task(load())
        for role in (PREFILL, DECODE):
            for child in cluster.children_of(role):
                await _restart(cluster, client, child)
                # Requests run during each restart. One that fails shows at once, not when all is over.
                round_ended.clear()
                waiting = asyncio.create_task(round_ended.wait())
                await asyncio.wait({waiting, running}, timeout=DEADLINE, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                assert round_ended.is_set(), running.result() if running.done() else "no round of requests ended"
        is_over = True
        await running


async def _restart(cluster: LocalCluster, client: aiohttp.ClientSession, child: Any) -> None:
    assert child.ready is not None
    url = child.ready.url
    order = {"url": url, "migrate": True}
    async with client.post(f"{cluster.router_url}/workers/drain", json=order) as response:
        assert response.status == 200, await response.text()
    await asyncio.to_thread(_wait_idle, cluster, url)
    child.send_signal()
    assert await asyncio.to_thread(child.wait, 60.0)
    await asyncio.to_thread(cluster.restart, child)
    await asyncio.to_thread(cluster.wait_ready, 300.0)


def _wait_idle(cluster: LocalCluster, url: str) -> None:
    """Wait until the router has no request in flight there."""
    deadline = time.monotonic() + DEADLINE
    while True:
        workers = httpx.get(f"{cluster.router_url}/workers").json()["workers"]
        if not next(w for w in workers if w["url"] == url)["num_running"]:
            return
        assert time.monotonic() < deadline, workers
        time.sleep(POLL_INTERVAL)
