"""A real worker that publishes its cache: a subscriber with only its URL builds the worker's own index."""

import asyncio
import time

import aiohttp
import pytest

from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.observe.events import subscriber as subscriber_module
from splitserve.observe.events.schema import BlockIndex
from splitserve.observe.events.subscriber import find_publishers, follow, load_index
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.process

DEADLINE = 60.0
EVENTS = (
    '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0", "topic": "kv@w"}'
)
PROMPTS = [[(i * 37 + j * 11) % 250 for j in range(40 + 9 * i)] for i in range(4)]


@pytest.fixture
def worker(tmp_path):
    model = str(make_tiny_model("llama", tmp_path / "llama"))
    args = ["--max-total-tokens", "1000", "--kv-events-config", EVENTS]
    with LocalCluster(
        LocalDeployment(model=model, prefill=0, decode=0, null=1, dtype="float32", threads=1, worker_args=args)
    ) as cluster:
        cluster.wait_ready(timeout=300)
        yield cluster.urls(DisaggregationMode.NULL)[0]


async def held_by(session, url):
    index = BlockIndex()
    index.replace((await load_index(session, url, 0)).events)
    return index.blocks()


async def agreed(subscriber, session, url, *, is_empty):
    """The index that both have, as soon as they do."""
    limit = time.monotonic() + DEADLINE
    while (held := await held_by(session, url)) != subscriber.index.blocks() or (not held) != is_empty:
        assert time.monotonic() < limit, f"{len(held)} blocks are held, {len(subscriber.index)} are known"
        await asyncio.sleep(0.05)
    return held


async def test_a_subscriber_holds_what_a_real_worker_holds(worker, monkeypatch):
    # On a busy machine the worker may need more than the usual time for a replay.
    monkeypatch.setattr(subscriber_module, "_REPLAY_TIMEOUT", DEADLINE)
    async with aiohttp.ClientSession() as session:
        info = await find_publishers(session, worker)
        assert (info.topic, info.block_size, len(info.publishers)) == ("kv@w", 16, 1)
        subscriber = follow(session, worker, info, 0)
        task = asyncio.create_task(subscriber.run())
        for prompt in PROMPTS:
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4, "temperature": 0.0}}
            async with session.post(f"{worker}/generate", json=body) as response:
                assert response.status == 200
        held = await agreed(subscriber, session, worker, is_empty=False)
        assert set(held.values()) == {frozenset({"GPU"})}
        for prompt in PROMPTS:
            assert subscriber.index.match(prompt, 16) == len(prompt) // 16 * 16
        async with session.post(f"{worker}/flush_cache") as response:
            assert (await response.json())["num_pages_freed"] == len(held)
        await agreed(subscriber, session, worker, is_empty=True)
        assert subscriber.num_loads == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
