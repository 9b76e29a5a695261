"""A request that kills or hangs workers: it ends after one retry, and the requests beside it are served."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from splitserve.router import exchange
from splitserve.router.access_log import shape_of
from splitserve.router.admission import IsolationTurn
from splitserve.router.args import PrefillConfig
from support.router_world import (
    FakeWorker,
    Handler,
    Pools,
    answers,
    dies,
    journals,
    never,
    reports,
    serve_pools,
    start_router,
    start_worker,
)

OK = {"text": "Paris"}
PROMPT = "a secret prompt"


LOSSES: dict[str, Handler] = {
    "dies": dies(),
    "its scheduler dies": reports("scheduler_lost", 503),
    "its peer reports the loss": reports("peer_lost", 500),
}


def num_tries(workers: list[FakeWorker]) -> int:
    return sum(len(worker.bodies) for worker in workers)


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which the partner of a worker that failed never reports anything."""
    monkeypatch.setattr(exchange, "GRACE_SECONDS", 0.0)


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("side", "stream"), [("prefill", False), ("prefill", True), ("decode", True)])
async def test_a_request_that_fails_two_workers_ends_with_its_id(
    stream: bool, side: str, loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    sides = ([LOSSES[loss]] * 3, [never()] * 3) if side == "prefill" else ([never()] * 3, [LOSSES[loss]] * 3)
    params = {"max_new_tokens": 7, "temperature": 0.5, "regex": "a secret (a|b)", "secret_field": 1}
    async with serve_pools(*sides) as pools:
        body = {"text": PROMPT, "stream": stream, "rid": "mine", "sampling_params": params}
        status, answer = await pools.post("/generate", body)
        error = json.loads(answer)["error"]
        assert (status, error["code"]) == (500, "poison_request")
        assert "request mine (stage: prefill, try 2)" in error["message"]
        assert "do not send it again" in error["message"]
        assert num_tries(getattr(pools, side)) == 2
        async with pools.client.get(pools.router + "/metrics") as response:
            assert "splitserve_router:poison_requests_total 1.0" in await response.text()
    shape = "prompts=1 prompt_tokens=0 prompt_bytes=15 max_tokens=7"
    (line,) = [r.getMessage() for r in caplog.records if "poison request" in r.getMessage()]
    assert f"rid=mine tries=2 route=/generate {shape} stream={str(stream).lower()}" in line
    assert "sampling=max_new_tokens,regex,seed,temperature grammar=regex" in line
    assert "secret" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_colocated_worker_that_dies_counts_too(stream: bool) -> None:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(start_worker(dies())) for _ in range(3)]
        router = await stack.enter_async_context(start_router(workers=tuple(w.url for w in workers)))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        body = {"prompt": [[1, 2], [3]], "stream": stream}
        async with client.post(router + "/v1/completions", json=body) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (500, "poison_request")
        assert num_tries(workers) == 2


async def test_a_worker_that_hangs_counts_as_one_that_dies() -> None:
    pools_options: dict[str, Any] = {"health_interval": 0.02, "hang_timeout": 0.5}

    def hangs(number: int) -> Handler:
        async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            prefills[number].is_stopped = True
            return await never()(request, body)

        return handler

    async with serve_pools([hangs(i) for i in range(3)], [never()], **pools_options) as pools:
        prefills = pools.prefill
        status, answer = await pools.post("/generate", {"text": PROMPT})
        assert (status, json.loads(answer)["error"]["code"]) == (500, "poison_request")
        assert num_tries(prefills) == 2


async def test_a_prompt_that_has_been_processed_is_not_suspected() -> None:
    """Its prefill worker has answered, or a token has come: what fails then is not the prompt's fault."""

    async def dies_after_prefill(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        while (await listed(pools))[pools.prefill[0].url]["num_running"]:
            pass
        return await dies()(request, body)

    async with serve_pools([answers({})], [*[dies_after_prefill] * 3, answers(OK)]) as pools:
        status, _ = await pools.post("/generate", {"text": PROMPT})
        assert (status, num_tries(pools.decode)) == (200, 4)
    decodes = [journals(9, until=n) for n in (1, 1, 1, 1)]
    async with serve_pools([answers({})], [*decodes, journals(9)]) as pools:
        status, body = await pools.post("/generate", {"text": PROMPT, "stream": True})
        assert (status, b"[DONE]" in body) == (200, True)
        assert num_tries(pools.decode) > 2


async def first_busy(pools: Pools) -> str:
    """URL of the decode worker that has a request."""
    async with asyncio.timeout(60):
        while True:
            workers = await listed(pools)
            busy = [d.url for d in pools.decode if workers[d.url]["num_running"] and not workers[d.url]["draining"]]
            if busy:
                return busy[0]


async def listed(pools: Pools) -> dict[str, dict[str, Any]]:
    async with pools.client.get(pools.router + "/workers") as response:
        return {worker["url"]: worker for worker in (await response.json())["workers"]}


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize("failure", [reports("over_capacity", 503), reports("worker_unavailable", 503)])
async def test_workers_that_live_and_reject_do_not_make_a_request_a_suspect(failure: Handler) -> None:
    async with serve_pools([never()] * 4, [failure, failure, failure, answers(OK)]) as pools:
        assert (await pools.post("/generate", {"text": PROMPT}))[0] == 200


async def test_a_worker_that_cannot_be_reached_does_not_count() -> None:
    gone = ("http://127.0.0.1:9", "http://127.0.0.1:19", "http://127.0.0.1:29")
    async with start_worker(answers({})) as p, start_worker(answers(OK)) as d:
        prefill = tuple(PrefillConfig(url, 1) for url in (*gone, p.url))
        async with (
            start_router(prefill=prefill, decode=(d.url,), health_interval=60) as router,
            aiohttp.ClientSession() as client,
            client.post(router + "/generate", json={"text": "a"}) as response,
        ):
            assert response.status == 200


async def test_requests_that_an_operator_moves_are_not_suspects() -> None:
    async def serves_the_third_try(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (answers(OK) if body["dispatch"]["attempt"] == 2 else never())(request, body)

    async with serve_pools([never()], [serves_the_third_try] * 3, max_prefill_retries=0) as pools:
        request = asyncio.create_task(pools.post("/generate", {"text": PROMPT}))
        for _ in range(2):
            url = await first_busy(pools)
            order = {"url": url, "migrate": True}
            async with pools.client.post(pools.router + "/workers/drain", json=order) as response:
                assert response.status == 200
        assert (await request)[0] == 200


class MortalWorkers:
    """Workers that lose every open connection when the poison request reaches one of them."""

    def __init__(self, num_requests: int) -> None:
        self._left = num_requests
        self._all_arrived = asyncio.Event()
        self._open: dict[str, list[web.Request]] = {}
        self.max_suspects = 0

    async def handle(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        there = self._open.setdefault(request.host, [])
        there.append(request)
        try:
            if body["dispatch"]["attempt"] == 0:
                self._left -= 1
                if self._left == 0:
                    self._all_arrived.set()
                await self._all_arrived.wait()
            else:
                self.max_suspects = max(self.max_suspects, len(there))
                for _ in range(100):
                    await asyncio.sleep(0)
            if body["text"] == "poison":
                for other in list(there):
                    assert other.transport is not None
                    other.transport.abort()
            elif body["dispatch"]["attempt"] == 0 and request.host == self.poisoned:
                await asyncio.Event().wait()
            return await journals(2)(request, body)
        finally:
            there.remove(request)

    poisoned = ""


async def test_requests_beside_a_poison_request_are_served() -> None:
    num_requests = 24
    mortal = MortalWorkers(num_requests)
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(start_worker(mortal.handle)) for _ in range(3)]
        # Policy round robin: the first request goes to the first worker.
        mortal.poisoned = workers[0].url.removeprefix("http://")
        router = await stack.enter_async_context(start_router(workers=tuple(w.url for w in workers)))
        client = await stack.enter_async_context(aiohttp.ClientSession())

        async def send(text: str) -> tuple[int, bytes]:
            async with client.post(router + "/generate", json={"text": text, "stream": True}) as response:
                return response.status, await response.read()

        poison = asyncio.create_task(send("poison"))
        await asyncio.wait_for(workers[0].arrived.wait(), 60)
        others = await asyncio.gather(*(send("innocent") for _ in range(num_requests - 1)))
        assert {status for status, _ in others} == {200}
        assert all(b"[DONE]" in body for _, body in others)
        status, body = await poison
        assert (status, json.loads(body)["error"]["code"]) == (500, "poison_request")
        assert mortal.max_suspects == 1


async def test_a_suspect_that_waits_until_its_time_is_over_is_not_sent() -> None:
    is_over = asyncio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await is_over.wait()
        return web.json_response(OK)

    async with AsyncExitStack() as stack:
        mortal = await stack.enter_async_context(start_worker(dies()))
        other = await stack.enter_async_context(start_worker(slow))
        router = await stack.enter_async_context(start_router(workers=(mortal.url, other.url), hang_timeout=60.0))
        client = await stack.enter_async_context(aiohttp.ClientSession())

        async def send(**fields: Any) -> tuple[int, bytes]:
            async with client.post(router + "/generate", json={"text": PROMPT, **fields}) as response:
                return response.status, await response.read()

        # Policy round robin: the first and the third go to the worker that dies, then both to the other.
        first = asyncio.create_task(send())
        await asyncio.wait_for(other.arrived.wait(), 60)
        second = asyncio.create_task(send())
        status, body = await send(timeout=0.2)
        is_over.set()
        assert (status, json.loads(body)["error"]["code"]) == (504, "deadline_exceeded")
        assert {(await task)[0] for task in (first, second)} == {200}


async def test_a_turn_ends_by_itself_and_nobody_waits_for_ever() -> None:
    lock = asyncio.Lock()
    first = IsolationTurn([lock], wait=60.0, limit=0.01)
    await first.begin()
    second = IsolationTurn([lock], wait=60.0, limit=60.0)
    await asyncio.wait_for(second.begin(), 60)
    third = IsolationTurn([lock], wait=0.01, limit=60.0)
    await asyncio.wait_for(third.begin(), 60)
    third.end()
    first.end()
    assert lock.locked()
    second.end()
    second.end()
    assert not lock.locked()


async def test_a_client_that_leaves_while_it_waits_holds_no_turn() -> None:
    free, taken = asyncio.Lock(), asyncio.Lock()
    await taken.acquire()
    turn = IsolationTurn([free, taken], wait=60.0, limit=60.0)
    waiting = asyncio.create_task(turn.begin())
    await asyncio.sleep(0)
    assert free.locked()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    turn.end()
    assert not free.locked()


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/generate", {"input_ids": [1, 2, 3]}, "prompts=1 prompt_tokens=3 prompt_bytes=0 max_tokens=- stream=false"),
        ("/generate", {"text": ["ab", "c"], "sampling_params": [{"n": 2}]}, "prompts=2 prompt_tokens=0 prompt_bytes=3"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 4, "top_p": 0.5}, "max_tokens=4 stream=false sampling=top_p"),
        ("/v1/completions", {"prompt": "x", "max_tokens": "secret"}, "max_tokens=-"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "secret"}], "response_format": {"type": "json_object"}},
            "messages=1 prompt_bytes=36 max_tokens=- stream=false sampling=- grammar=json_object",
        ),
        ("/v1/chat/completions", {"messages": "secret", "response_format": {"type": "secret"}}, "messages=0"),
        ("/generate", {"sampling_params": "secret"}, "sampling=- grammar=-"),
    ],
)
def test_a_shape_has_sizes_and_no_text(path: str, body: dict[str, Any], words: str) -> None:
    shape = shape_of(path, body)
    assert words in shape
    assert "secret" not in shape
