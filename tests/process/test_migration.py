"""Workers die under streams of a tiny random model: every stream ends with the output of an undisturbed run.

`make soak` also stops workers instead of killing them, and restarts all of them in turn under load.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx
import psutil
import pytest

from splitserve.core.request import DisaggregationMode
from splitserve.launch.child import POLL_INTERVAL, ChildProcess
from splitserve.launch.local import LocalCluster
from splitserve.testing.tiny_models import make_tiny_model

pytestmark = pytest.mark.process

PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
NUM_TOKENS = 160
# Seconds that all streams of a test may take.
DEADLINE = 120.0
LONG = {"max_tokens": NUM_TOKENS, "min_tokens": NUM_TOKENS, "return_token_ids": True}
OUTPUT = {"type": "array", "items": {"type": "integer"}, "minItems": 40, "maxItems": 60}


@dataclass
class Answer:
    """One choice of a stream, put together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Any = None


@dataclass
class Outcome:
    choices: dict[int, Answer] = field(default_factory=lambda: defaultdict(Answer))
    usage: Any = None
    num_events: int = 0
    error: Any = None
    is_done: bool = False

    def take(self, data: dict[str, Any]) -> None:
        self.num_events += 1
        if "error" in data:
            self.error = data["error"]
        elif "meta_info" in data:
            self._take_native(data)
        else:
            self._take_openai(data)

    def _take_native(self, data: dict[str, Any]) -> None:
        """Everything so far."""
        meta, answer = data["meta_info"], self.choices[data.get("index", 0)]
        assert data["output_ids"][: len(answer.token_ids)] == answer.token_ids
        answer.text, answer.token_ids, answer.finish = data["text"], data["output_ids"], meta["finish_reason"]
        answer.logprobs = [entry[0] for entry in meta.get("output_token_logprobs", [])]

    def _take_openai(self, data: dict[str, Any]) -> None:
        """What is new."""
        if usage := data.get("usage"):
            self.usage = (usage["prompt_tokens"], usage["completion_tokens"])
        for choice in data["choices"]:
            answer = self.choices[choice["index"]]
            answer.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            answer.token_ids += choice.get("token_ids", [])
            answer.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
            answer.finish = choice["finish_reason"]


def request(i: int) -> tuple[str, dict[str, Any]]:
    """The i-th request: all forms in turn, no two with the same prompt."""
    prompt = [(i * 37 + j * 11) % 250 for j in range(20 + 7 * i)]
    drawn = {"temperature": 0.9, "top_p": 0.95, "seed": i}
    penal = {"frequency_penalty": 0.3, "repetition_penalty": 1.1}
    native = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    forms: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"input_ids": prompt, "sampling_params": {"temperature": 0.0, **native}}),
        ("/generate", {"input_ids": prompt, "sampling_params": {**drawn, **penal, **native}, "return_logprob": True}),
        ("/v1/completions", {"prompt": prompt, "n": 2, "logprobs": 1, **drawn, **LONG}),
        ("/v1/completions", {"prompt": prompt, "temperature": 0, **LONG, "stream_options": {"include_usage": True}}),
        ("/v1/completions", {"prompt": prompt, "json_schema": OUTPUT, **drawn, **LONG, "min_tokens": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": f"say {i}"}], **drawn, **penal, **LONG}),
    ]
    path, body = forms[i % len(forms)]
    return path, body | {"stream": True}


async def follow(client: aiohttp.ClientSession, url: str, i: int, outcome: Outcome, on_event: Callable[[], None]):
    path, body = request(i)
    async with client.post(url + path, json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                outcome.is_done = True
            elif line.startswith(b"data: "):
                outcome.take(json.loads(line[6:]))
                on_event()
            else:
                assert line == b"\n", line


def run(url: str, numbers: range, disturb: Callable[[], None] = lambda: None, after: int = 0) -> dict[int, Outcome]:
    """All these requests at once. `disturb` is called when each has had `after` events."""
    outcomes = {i: Outcome() for i in numbers}
    disturbed = False

    def on_event() -> None:
        nonlocal disturbed
        if not disturbed and all(o.num_events >= after for o in outcomes.values()):
            disturbed = True
            disturb()

    async def run_all() -> None:
        limits = aiohttp.ClientTimeout(total=DEADLINE)
        async with aiohttp.ClientSession(timeout=limits, read_bufsize=1 << 22) as client:
            await asyncio.gather(*(follow(client, url, i, outcomes[i], on_event) for i in numbers))

    asyncio.run(run_all())
    assert disturbed
    return outcomes


def check_same(outcomes: dict[int, Outcome], expected: dict[int, Outcome]) -> None:
    for i, outcome in outcomes.items():
        assert outcome.error is None, (i, outcome.error)
        assert outcome.is_done
        assert outcome.usage == expected[i].usage
        for index, answer in expected[i].choices.items():
            found = outcome.choices[index]
            assert (found.token_ids, found.text, found.finish) == (answer.token_ids, answer.text, answer.finish), i
            assert found.logprobs == pytest.approx(answer.logprobs, abs=1e-3)


def children(cluster: LocalCluster, role: DisaggregationMode) -> list[ChildProcess]:
    return [child for r, child in cluster._workers if r is role and child.exit_code is None]


def kill(child: ChildProcess) -> None:
    """Front end and scheduler at once, as a machine goes."""
    assert child.ready is not None
    for pid in (*child.ready.scheduler_pids, child.pid):
        os.kill(pid, signal.SIGKILL)


def migrations(url: str) -> int:
    async def ask() -> str:
        async with aiohttp.ClientSession() as client, client.get(f"{url}/metrics") as response:
            return await response.text()

    lines = [line for line in asyncio.run(ask()).splitlines() if line.startswith("splitserve_router:retries_total")]
    return sum(int(float(line.split()[-1])) for line in lines if 'kind="migration"' in line)


@contextmanager
def serving(folder: Any, *router_args: str) -> Iterator[LocalCluster]:
    model = str(make_tiny_model("llama", folder / "llama"))
    args = ["--max-total-tokens", "20000"]
    with LocalCluster(
        model, prefill=2, decode=2, dtype="float32", threads=1, worker_args=args, router_args=router_args
    ) as cluster:
        cluster.wait_ready(timeout=300)
        yield cluster


def test_streams_outlive_their_decode_worker_and_the_last_ones_end_with_an_error(tmp_path):
    with serving(tmp_path) as cluster:
        url, numbers = cluster.router_url, range(6)
        expected = run(url, numbers)
        first, second = children(cluster, DECODE)
        outcomes = run(url, numbers, lambda: kill(first), after=3)
        check_same(outcomes, expected)
        assert migrations(url) > 0
        # A prefill that is gone is not noticed at all: nothing has been sent when it fails.
        kill(children(cluster, PREFILL)[0])
        check_same(run(url, numbers), expected)
        # Nobody is left.
        for outcome in run(url, numbers, lambda: kill(second), after=3).values():
            assert outcome.is_done
            assert "stage: streaming" in outcome.error["message"]
            assert "decode worker" in outcome.error["message"]
    assert not [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.soak
def test_streams_outlive_a_decode_worker_that_is_stopped(tmp_path):
    with serving(tmp_path, "--hang-timeout", "3", "--health-interval", "0.5") as cluster:
        expected = run(cluster.router_url, range(12))
        first, _ = children(cluster, DECODE)
        assert first.ready is not None
        pids = (*first.ready.scheduler_pids, first.pid)
        try:
            check_same(
                run(cluster.router_url, range(12), lambda: [os.kill(p, signal.SIGSTOP) for p in pids], after=3),
                expected,
            )
            assert migrations(cluster.router_url) > 0
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


@pytest.mark.soak
def test_every_worker_is_restarted_under_load_and_no_request_notices(tmp_path):
    with serving(tmp_path) as cluster:
        url, numbers = cluster.router_url, range(12)
        expected = run(url, numbers)
        asyncio.run(_restart_all(cluster, expected))
        assert migrations(url) > 0


async def _restart_all(cluster: LocalCluster, expected: dict[int, Outcome]) -> None:
    is_over = False
    num_rounds = 0
    limits = aiohttp.ClientTimeout(total=DEADLINE)
    async with aiohttp.ClientSession(timeout=limits, read_bufsize=1 << 22) as client:

        async def load() -> None:
            nonlocal num_rounds
            while not is_over:
                outcomes = {i: Outcome() for i in expected}
                await asyncio.gather(
                    *(follow(client, cluster.router_url, i, o, lambda: None) for i, o in outcomes.items())
                )
                check_same(outcomes, expected)
                num_rounds += 1

        running = asyncio.create_task(load())
        for role in (PREFILL, DECODE):
            for child in children(cluster, role):
                await _restart(cluster, client, role, child)
                # A failed request shows at once, not when all is over.
                assert not running.done(), running.result()
        is_over = True
        await running
    assert num_rounds > 4


async def _restart(cluster: LocalCluster, client: aiohttp.ClientSession, role: DisaggregationMode, child: Any) -> None:
    assert child.ready is not None
    url = child.ready.url
    order = {"url": url, "migrate": True}
    async with client.post(f"{cluster.router_url}/workers/drain", json=order) as response:
        assert response.status == 200, await response.text()
    await asyncio.to_thread(_wait_idle, cluster, url)
    child.send_signal()
    assert await asyncio.to_thread(child.wait, 60.0)
    child.close()
    cluster._workers.remove((role, child))
    cluster.add_worker(role, f"{child.name}-again")
    await asyncio.to_thread(cluster.wait_ready, 300.0)


def _wait_idle(cluster: LocalCluster, url: str) -> None:
    """Until the router has nothing under way there."""
    deadline = time.monotonic() + DEADLINE
    while True:
        workers = httpx.get(f"{cluster.router_url}/workers").json()["workers"]
        if not next(w for w in workers if w["url"] == url)["num_running"]:
            return
        assert time.monotonic() < deadline, workers
        time.sleep(POLL_INTERVAL)
