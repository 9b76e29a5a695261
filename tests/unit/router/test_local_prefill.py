"""`--disaggregate-above`: a decode worker alone serves a request if it has to compute little of its prompt."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.clock import ManualClock
from splitserve.core.errors import ConfigError
from splitserve.core.request import DisaggregationMode
from splitserve.observe.events.schema import BlockIndex, BlockStored
from splitserve.router.args import LBArgs, PrefillConfig
from splitserve.router.prefixes import CachedPrefixes, PromptBlocks
from splitserve.router.worker import Worker
from support.router_world import (
    FakeWorker,
    Handler,
    answers,
    dies,
    journals,
    serve_pair,
    serve_pools,
    start_router,
    start_worker,
    streams,
)
from support.telling_worker import SIZE, PublishingWorker, chain

OK = {"text": "ok"}
SHORT, LONG = list(range(10)), list(range(100, 150))


def blocks(tokens: list[int]) -> PromptBlocks:
    return PromptBlocks(len(tokens), {SIZE: chain(tokens)})


def holding(*prompts_of_rank: list[int], is_certain: bool = True) -> Worker:
    """A decode worker with a data parallel rank for each of these prompts, which that has cached."""
    indexes = []
    for tokens in prompts_of_rank:
        index, names = BlockIndex(), chain(tokens)
        index.apply(BlockStored(names, None, tokens[: len(names) * SIZE], SIZE))
        indexes.append(index)
    worker = Worker("http://d:1", DisaggregationMode.DECODE)
    worker.prefixes = CachedPrefixes(SIZE, indexes, ManualClock(), is_certain=is_certain)
    return worker


@given(st.integers(1, 30), st.integers(0, 30))
def test_what_is_cached_need_not_be_computed_but_for_the_last_token(length: int, num_cached: int) -> None:
    tokens = list(range(length))
    worker = holding(tokens[:num_cached])
    whole = min(length, num_cached) // SIZE * SIZE
    assert worker.num_uncached_tokens([blocks(tokens)]) == max(1, length - whole)


def test_a_batch_counts_as_its_longest_prompt_and_ranks_as_the_one_that_has_least() -> None:
    worker = holding(LONG, LONG[: 2 * SIZE])
    assert worker.num_uncached_tokens([blocks(LONG)]) == 50 - 2 * SIZE
    assert worker.num_uncached_tokens([blocks(SHORT), blocks(LONG[:12])]) == 10


def test_blocks_that_may_lack_their_window_pages_do_not_count_but_attract_requests() -> None:
    worker = holding(LONG, is_certain=False)
    assert worker.num_uncached_tokens([blocks(LONG)]) == 50
    assert worker.num_cached_tokens({SIZE: chain(LONG)}) == 50 // SIZE * SIZE


def test_blocks_that_are_only_expected_do_not_count() -> None:
    worker = holding([])
    assert worker.prefixes is not None
    worker.prefixes.expect(chain(LONG), 0)
    assert worker.num_uncached_tokens([blocks(LONG)]) == 50


def test_of_a_worker_that_tells_nothing_the_whole_prompt_counts() -> None:
    assert Worker("http://d:1", DisaggregationMode.DECODE).num_uncached_tokens([blocks(LONG)]) == 50


def test_none_is_too_few() -> None:
    with pytest.raises(ConfigError, match="--disaggregate-above must be at least 1"):
        LBArgs(disaggregate_above=0)


def generating(handler: Handler) -> Handler:
    """Any other question is answered with nothing."""

    async def handle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (handler if request.path == "/generate" else answers({}))(request, body)

    return handle


def served(worker: FakeWorker) -> list[dict[str, Any]]:
    generates = ("/generate", "/v1/completions")
    return [body for path, body in zip(worker.paths, worker.bodies, strict=True) if path in generates]


async def metric(client: aiohttp.ClientSession, router: str, name: str) -> float:
    async with client.get(f"{router}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"splitserve_router:{name}"))


async def test_short_prompts_go_to_decode_alone_and_long_ones_to_the_pair() -> None:
    async with serve_pair(answers({}), answers(OK), disaggregate_above=10) as pair:
        bodies: list[tuple[str, dict[str, Any], bool]] = [
            ("/generate", {"input_ids": SHORT}, True),
            ("/generate", {"input_ids": LONG}, False),
            ("/v1/completions", {"prompt": SHORT}, True),
            ("/generate", {"input_ids": [SHORT, SHORT[1:]]}, True),
            ("/generate", {"input_ids": [SHORT, LONG]}, False),
            ("/v1/completions", {"prompt": [LONG, SHORT]}, False),
            # The router cannot read it: a worker returns the error.
            ("/generate", {"input_ids": "nonsense"}, False),
        ]
        num_paired = 0
        for path, body, is_alone in bodies:
            assert (await pair.post(path, body))[0] == 200
            sent = served(pair.decode)[-1]
            num_paired += not is_alone
            assert len(pair.prefill.bodies) == num_paired
            assert (sent.get("local_prefill"), "bootstrap_room" in sent) == (True if is_alone else None, not is_alone)
            assert sent["rid"]
        assert await metric(pair.client, pair.router, "local_prefills_total") == 3


async def test_a_clients_own_room_does_not_come_to_a_worker_that_serves_alone() -> None:
    async with serve_pair(answers({}), answers(OK), disaggregate_above=10) as pair:
        await pair.post("/generate", {"input_ids": SHORT, "bootstrap_room": 5, "bootstrap_host": "x"})
        assert not [name for name in served(pair.decode)[0] if name.startswith("bootstrap_")]


async def test_without_the_option_every_prompt_goes_to_a_pair() -> None:
    async with serve_pair(answers({}), answers(OK)) as pair:
        await pair.post("/generate", {"input_ids": [1], "local_prefill": True})
        assert len(pair.prefill.bodies) == 1
        assert "bootstrap_room" in pair.decode.bodies[0]


async def test_the_access_log_says_what_was_decided_by(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "splitserve.router.access_log")
    async with serve_pair(answers({}), answers(OK), disaggregate_above=10) as pair:
        await pair.post("/generate", {"input_ids": SHORT})
        await pair.post("/generate", {"input_ids": LONG})
    alone, paired = (r.getMessage() for r in caplog.records if r.getMessage().startswith("request "))
    assert "uncached_tokens=10 " in alone
    assert "prefill=" not in alone
    assert "uncached_tokens=50 " in paired
    assert "prefill=http" in paired


async def test_short_prompts_are_served_where_no_prefill_worker_is_left() -> None:
    async with serve_pair(dies(), answers(OK), disaggregate_above=10) as pair:
        status, _, _ = await pair.post("/generate", {"input_ids": SHORT})
        assert (status, pair.prefill.bodies) == (200, [])


async def test_a_decode_worker_that_fails_alone_is_followed_by_another() -> None:
    async with serve_pools([answers({})], [generating(dies()), answers(OK)], disaggregate_above=10) as pools:
        assert (await pools.post("/generate", {"input_ids": SHORT}))[0] == 200
        assert [len(served(w)) for w in (*pools.prefill, *pools.decode)] == [0, 1, 1]


@pytest.mark.parametrize(
    ("status", "code", "side"), [(500, "engine_error", "decode"), (400, "invalid_request", "client")]
)
async def test_an_error_of_a_decode_worker_that_serves_alone_is_its_own_or_the_clients(
    status: int, code: str, side: str
) -> None:
    refusal = {"error": {"message": "no", "type": "server_error", "code": code}}
    async with serve_pair(answers({}), answers(refusal, status), disaggregate_above=10) as pair:
        assert (await pair.post("/generate", {"input_ids": SHORT}))[0] == status
        assert await metric(pair.client, pair.router, f'errors_total{{route="/generate",side="{side}"') == 1


@pytest.mark.parametrize(("limit", "is_alone"), [(13, True), (12, False)])
async def test_a_stream_that_moves_counts_what_was_generated_with_its_prompt(limit: int, is_alone: bool) -> None:
    decode = [generating(journals(5, until=3)), generating(journals(5))]
    async with serve_pools([streams()], decode, disaggregate_above=limit) as pools:
        status, body = await pools.post("/generate", {"input_ids": SHORT, "stream": True})
        assert (status, body.count(b"data: {")) == (200, 5)
        (first,), (second,) = (served(w) for w in pools.decode)
        assert first["local_prefill"] is True
        assert ("bootstrap_room" not in second) is is_alone
        assert len(second["dispatch"]["told"]) == 3
        assert len(pools.prefill[0].bodies) == (0 if is_alone else 1)


async def test_a_stream_of_a_pair_may_go_on_at_a_decode_worker_alone() -> None:
    """The second one has most of the prompt in its cache."""
    knows = PublishingWorker()
    async with told_pool(knows, journals(5), journals(5, until=2), disaggregate_above=12) as world:
        knows.hold(LONG)
        await world.until_known(knows, len(LONG) // SIZE)
        sent = await world.generate(LONG)
        assert [served(w)[-1].get("local_prefill") for w in sent] == [None, True]


@dataclass
class ToldPool:
    router: str
    client: aiohttp.ClientSession
    knows: FakeWorker
    other: FakeWorker

    async def until_known(self, worker: PublishingWorker, num_blocks: int) -> None:
        async with asyncio.timeout(60):
            while True:
                async with self.client.get(f"{self.router}/workers") as response:
                    known = {w["url"]: w["num_cached_blocks"] for w in (await response.json())["workers"]}
                if known[worker.url] == num_blocks:
                    return
                await asyncio.sleep(0.02)

    async def generate(self, tokens: list[int]) -> list[FakeWorker]:
        """Which workers it came to, in order."""
        body = {"input_ids": tokens, "stream": True}
        async with self.client.post(f"{self.router}/generate", json=body) as response:
            text = await response.text()
            assert (response.status, text.count("data: {")) == (200, 5), text
        return [self.other, self.knows]


@contextlib.asynccontextmanager
async def told_pool(
    knows: PublishingWorker, handler: Handler, other: Handler, **options: Any
) -> AsyncIterator[ToldPool]:
    """A prefill worker and two decode workers. The first one to be probed publishes nothing."""

    async def handle(request: Any, body: dict[str, Any]) -> Any:
        return await (handler if request.path == "/generate" else knows.handle)(request, body)

    async with contextlib.AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(start_worker(streams()))
        silent = await stack.enter_async_context(start_worker(generating(other)))
        knows.fake = await stack.enter_async_context(start_worker(handle))
        assert knows.publisher is not None
        stack.callback(knows.publisher.shutdown)
        router = start_router(
            prefill=(PrefillConfig(prefill.url, 8998),),
            decode=(silent.url, knows.url),
            health_interval=0.05,
            **options,
        )
        url = await stack.enter_async_context(router)
        client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))
        yield ToldPool(url, await stack.enter_async_context(client), knows.fake, silent)
