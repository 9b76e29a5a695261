"""A router and workers that publish real KV events: prompts go to the worker with their blocks, even if events fail."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import tokenizers
from aiohttp import web
from tokenizers import decoders, models, pre_tokenizers

from splitserve.observe.events.schema import BlockRemoved
from splitserve.router.args import PrefillConfig
from splitserve.router.cache_follower import PromptReader
from support.router_world import Rooms, answers, never, start_router, start_worker
from support.telling_worker import SIZE, PublishingWorker, chain

DEADLINE = 60.0
TEXT = "the quick brown fox jumps over the lazy dog"


def byte_tokenizer() -> tokenizers.Tokenizer:
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


PROMPT = byte_tokenizer().encode(TEXT).ids


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Tokenizer of a model."""
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


class Client:
    def __init__(self, session: aiohttp.ClientSession, router: str) -> None:
        self._session = session
        self._router = router

    async def generate(self, **body: Any) -> None:
        async with self._session.post(f"{self._router}/generate", json=body) as response:
            assert response.status == 200, await response.text()

    async def remove(self, worker: PublishingWorker) -> None:
        async with self._session.delete(f"{self._router}/workers", params={"url": worker.url}) as response:
            assert response.status == 200

    async def add(self, worker: PublishingWorker) -> None:
        body = {"mode": "null", "registry_url": worker.url}
        async with self._session.post(f"{self._router}/workers", json=body) as response:
            assert response.status == 200

    async def until_known(self, worker: PublishingWorker, num_blocks: int | None) -> None:
        """Wait until the router has so many blocks of the worker. None: it has no index of it."""
        limit = time.monotonic() + DEADLINE
        while (known := await self._num_cached_blocks(worker)) != num_blocks:
            assert time.monotonic() < limit, f"{known} blocks are known instead of {num_blocks}"
            await asyncio.sleep(0.02)

    async def _num_cached_blocks(self, worker: PublishingWorker) -> int | None:
        async with self._session.get(f"{self._router}/workers") as response:
            known = {w["url"]: w["num_cached_blocks"] for w in (await response.json())["workers"]}
        found: int | None = known[worker.url]
        return found


@contextlib.asynccontextmanager
async def routed(*workers: PublishingWorker, **options: Any) -> AsyncIterator[Client]:
    """Colocated workers behind a cache-aware router."""
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            worker.fake = await stack.enter_async_context(start_worker(worker.handle))
            if worker.publisher is not None:
                stack.callback(lambda worker=worker: worker.publisher.shutdown())
        settings = {"policy": "cache_aware", "health_interval": 0.05, **options}
        url = await stack.enter_async_context(start_router(workers=tuple(w.url for w in workers), **settings))
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE)))
        yield Client(session, url)


async def test_a_prompt_goes_where_events_say_that_it_is_cached(folder) -> None:
    workers = [PublishingWorker(folder) for _ in range(3)]
    workers[1].hold(PROMPT)
    async with routed(*workers) as client:
        await client.until_known(workers[1], len(PROMPT) // SIZE)
        workers[2].hold([200, 201, 202, 203, 204])
        await client.until_known(workers[2], 1)
        for _ in range(4):
            await client.generate(text=TEXT)
            await client.generate(input_ids=PROMPT)
            await client.generate(input_ids=[[200, 201, 202, 203], [1, 2, 3, 4]])
        assert [w.num_served for w in workers] == [0, 8, 4]


async def test_an_evicted_prefix_no_longer_draws_its_prompts() -> None:
    workers = [PublishingWorker(), PublishingWorker()]
    workers[0].hold(PROMPT)
    workers[1].hold(PROMPT[: 2 * SIZE])
    async with routed(*workers) as client:
        await client.until_known(workers[0], len(PROMPT) // SIZE)
        await client.until_known(workers[1], 2)
        await client.generate(input_ids=PROMPT)
        workers[0].tell(BlockRemoved(chain(PROMPT)[1:]))
        await client.until_known(workers[0], 1)
        await client.generate(input_ids=PROMPT)
        assert [w.num_served for w in workers] == [1, 1]


async def test_a_worker_whose_events_come_from_elsewhere_is_followed_there() -> None:
    workers = [PublishingWorker(), PublishingWorker()]
    workers[0].hold(PROMPT)
    async with routed(*workers) as client:
        await client.until_known(workers[0], len(PROMPT) // SIZE)
        workers[0].restart()
        await client.until_known(workers[0], 0)
        workers[0].hold(PROMPT[:SIZE])
        await client.until_known(workers[0], 1)


def num_subscriptions() -> int:
    return sum("KVEventSubscriber.run" in repr(task.get_coro()) for task in asyncio.all_tasks())


async def test_a_worker_that_leaves_is_forgotten_and_followed_again_when_it_comes_back() -> None:
    worker = PublishingWorker()
    worker.hold(PROMPT)
    async with routed(worker) as client:
        await client.until_known(worker, len(PROMPT) // SIZE)
        assert num_subscriptions() == 1
        await client.remove(worker)
        limit = time.monotonic() + DEADLINE
        while num_subscriptions():
            assert time.monotonic() < limit
            await asyncio.sleep(0.02)
        await client.add(worker)
        await client.until_known(worker, len(PROMPT) // SIZE)


async def test_a_worker_that_was_lost_is_followed_anew() -> None:
    worker = PublishingWorker()
    worker.hold(PROMPT)
    async with routed(worker) as client:
        await client.until_known(worker, len(PROMPT) // SIZE)
        assert worker.fake is not None
        worker.fake.health_status = 503
        limit = time.monotonic() + DEADLINE
        while worker.fake.paths.count("/kv_index") < 2:
            assert time.monotonic() < limit
            await asyncio.sleep(0.02)
        await client.until_known(worker, len(PROMPT) // SIZE)


class TwoRanks(PublishingWorker):
    """Prefill worker that reports two data parallel ranks, and was restarted with one."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks: list[int | None] = []

    def _info(self) -> Any:
        info = super()._info()
        (place,) = info["kv_events"]["publishers"]
        info["kv_events"]["publishers"] = [place | {"dp_rank": rank} for rank in range(2)]
        return info

    async def handle(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path != "/generate":
            return await super().handle(request, body)
        self.ranks.append(body.get("data_parallel_rank"))
        if self.ranks[-1] in (None, 0):
            return web.json_response({"text": "ok"})
        problem = {"message": "must be in [0, 1)", "type": "invalid_request_error", "param": "data_parallel_rank"}
        return web.json_response({"error": problem | {"code": "invalid_request"}}, status=400)


async def test_a_rank_that_the_router_chose_and_the_worker_lacks_is_no_error_of_the_client() -> None:
    worker, rooms = TwoRanks(), Rooms()
    assert worker.publisher is not None

    async def decodes(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Wait for a KV transfer that does not begin."""
        return await (never() if body.get("data_parallel_rank") == 1 else answers({"text": "ok"}))(request, body)

    async with (
        start_worker(worker.handle, rooms=rooms) as prefill,
        start_worker(decodes, rooms=rooms, is_decode=True) as decode,
        start_router(
            prefill=(PrefillConfig(prefill.url, 8998),),
            decode=(decode.url,),
            prefill_policy="cache_aware",
            # So that the stale caches are not dropped by a check.
            health_interval=600,
        ) as router,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE)) as session,
    ):
        worker.fake = prefill
        client = Client(session, router)
        await client.until_known(worker, 0)
        # Different prompts, so that rank 1 gets one soon. Then the router forgets the ranks.
        for i in range(100):
            await client.generate(input_ids=[i] * SIZE)
            if worker.ranks[-1] is None:
                break
        assert set(worker.ranks[:-2]) <= {0}
        assert worker.ranks[-2:] == [1, None]
        body = {"input_ids": PROMPT, "data_parallel_rank": 1}
        async with session.post(f"{router}/generate", json=body) as response:
            assert response.status == 400
        assert worker.ranks[-2:] == [None, 1]
    worker.publisher.shutdown()


async def test_workers_that_tell_nothing_serve_by_load_and_that_is_said_once(caplog) -> None:
    worker = PublishingWorker(tells=False)
    with caplog.at_level(logging.WARNING, "splitserve.router.cache_follower"):
        async with routed(worker) as client:
            limit = time.monotonic() + DEADLINE
            while worker.fake is not None and worker.fake.paths.count("/server_info") < 3:
                assert time.monotonic() < limit
                await asyncio.sleep(0.02)
            await client.generate(text=TEXT)
            assert worker.num_served == 1
    assert [r.getMessage() for r in caplog.records if "publishes no KV events" in r.getMessage()] == [
        f"worker url={worker.url} publishes no KV events, so cache_aware chooses it by load alone: start it with "
        "--kv-events-config"
    ]


@pytest.mark.parametrize("folder", ["", "/nowhere/at/all"])
async def test_text_goes_by_load_where_no_tokenizer_can_be_had_and_that_is_said_once(folder, caplog) -> None:
    worker = PublishingWorker(folder)
    with caplog.at_level(logging.WARNING, "splitserve.router.cache_follower"):
        async with routed(worker) as client:
            await client.until_known(worker, 0)
            await client.generate(text=TEXT)
            await client.generate(text=TEXT)
            assert worker.num_served == 2
    assert sum("there is no tokenizer" in r.getMessage() for r in caplog.records) == 1


async def test_the_routers_own_model_reads_prompts_where_workers_name_none(folder) -> None:
    workers = [PublishingWorker(), PublishingWorker()]
    workers[1].hold(PROMPT)
    async with routed(*workers, model=folder) as client:
        await client.until_known(workers[1], len(PROMPT) // SIZE)
        for _ in range(4):
            await client.generate(text=TEXT)
        assert [w.num_served for w in workers] == [0, 4]


async def test_nothing_is_followed_and_no_prompt_is_read_for_other_policies(folder, monkeypatch) -> None:
    monkeypatch.setattr("splitserve.router.cache_follower.hash_prompts", None)
    worker = PublishingWorker(folder)
    async with routed(worker, policy="least_load") as client:
        await client.generate(text=TEXT)
        assert worker.fake is not None
        assert "/server_info" not in worker.fake.paths


async def test_a_damaged_tokenizer_is_logged_and_requests_go_by_load(folder, tmp_path, caplog) -> None:
    shutil.copytree(folder, damaged := tmp_path / "damaged")
    (damaged / "tokenizer.json").write_text("{")
    reader = PromptReader()
    try:
        await reader.load(str(damaged))
        assert await reader.read("/generate", {"text": TEXT}, 100, {SIZE}) == ()
    finally:
        reader.close()
    assert f"tokenizer of model {damaged} cannot be loaded" in caplog.text


@pytest.mark.parametrize("body", [{"text": 5}, {}, {"input_ids": [2**70] * SIZE}, {"input_ids": []}])
async def test_what_cannot_be_read_has_no_blocks_and_a_worker_says_what_is_wrong_with_it(body) -> None:
    reader = PromptReader()
    try:
        assert await reader.read("/generate", body, 100, {SIZE}) == ()
    finally:
        reader.close()


async def test_prompts_are_read_beside_the_event_loop(monkeypatch) -> None:
    monkeypatch.setattr("splitserve.router.cache_follower.hash_prompts", lambda *_: [threading.get_ident()])
    reader = PromptReader()
    try:
        assert await reader.read("/generate", {"text": TEXT}, 100, {SIZE}) != [threading.get_ident()]
    finally:
        reader.close()


async def test_prompts_of_other_sizes_do_not_wait_for_a_long_one(monkeypatch) -> None:
    may_end = threading.Event()

    def read(path: str, body: Any, *_: Any) -> list[int]:
        size = len(body["text"])
        if size > 300_000:
            may_end.wait(60)
        return [size]

    monkeypatch.setattr("splitserve.router.cache_follower.hash_prompts", read)
    reader = PromptReader()
    try:
        body = {"text": "x" * 400_000}
        long = [asyncio.ensure_future(reader.read("/generate", body, 400_012, {SIZE})) for _ in range(3)]
        await asyncio.sleep(0)
        for size in (10, 100_000):
            assert await reader.read("/generate", {"text": "x" * size}, size + 12, {SIZE}) == [size]
        may_end.set()
        assert await asyncio.gather(*long) == [[400_000]] * 3
    finally:
        may_end.set()
        reader.close()


async def test_a_prompt_that_takes_too_long_to_read_is_served_without(monkeypatch, caplog) -> None:
    monkeypatch.setattr("splitserve.router.cache_follower.READ_TIMEOUT", 0.05)
    reader = PromptReader()
    stands_still = asyncio.Event()
    monkeypatch.setattr(reader, "_run", lambda size, work: stands_still.wait())
    try:
        assert await reader.read("/generate", {"text": TEXT}, 100, {SIZE}) == ()
    finally:
        reader.close()
    assert "prompt not read, its request goes by load: TimeoutError" in caplog.text
