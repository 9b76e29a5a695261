"""Two real prefill workers behind a cache-aware router: prompts that share a beginning find it computed."""

import asyncio
import time

import aiohttp
import pytest

from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.router.args import PrefillConfig
from support.router_world import start_router
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.process

DEADLINE = 60.0
PAGE = 16
EVENTS = '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}'
# Six documents of 300 tokens, a byte each, and questions about them.
DOCUMENTS = [f"document {i}: ".ljust(300, chr(ord("a") + i)) for i in range(6)]
WHOLE_PAGES = 300 // PAGE * PAGE


@pytest.fixture
def cluster(tmp_path):
    model = str(make_tiny_model("llama", tmp_path / "llama"))
    args = ["--max-total-tokens", "8000", "--page-size", str(PAGE), "--kv-events-config", EVENTS]
    router_args = ["--policy", "cache_aware", "--health-interval", "0.2"]
    with LocalCluster(
        LocalDeployment(
            model=model, prefill=2, decode=1, dtype="float32", threads=1, worker_args=args, router_args=router_args
        )
    ) as cluster:
        cluster.wait_ready(timeout=300)
        yield cluster


async def workers_of(session, router):
    async with session.get(f"{router}/workers") as response:
        return (await response.json())["workers"]


async def until(session, router, is_so):
    """The router's workers, as soon as `is_so` of each of them."""
    limit = time.monotonic() + DEADLINE
    workers = await workers_of(session, router)
    while not all(is_so(worker) for worker in workers):
        assert time.monotonic() < limit, workers
        await asyncio.sleep(0.05)
        workers = await workers_of(session, router)
    return workers


async def ask(session, router, text):
    """How many tokens of the prompt were cached."""
    body = {"text": text, "sampling_params": {"max_new_tokens": 2, "temperature": 0.0}}
    async with session.post(f"{router}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        return (await response.json())["meta_info"]["cached_tokens"]


async def test_prompts_go_to_the_worker_that_has_their_beginning(cluster):
    async with aiohttp.ClientSession() as session:
        router = cluster.router_url
        await until(session, router, lambda w: w["num_cached_blocks"] is not None)
        cached = [[await ask(session, router, f"{text}, question {i}?") for i in range(4)] for text in DOCUMENTS]
        assert [first for first, *_ in cached] == [0] * len(DOCUMENTS)
        assert min(min(rest) for _, *rest in cached) >= WHOLE_PAGES
        # A second router has only what the workers publish.
        told = await until(session, router, lambda w: w["num_cached_blocks"] > 0 or w["mode"] == "prefill")
        prefill = tuple(PrefillConfig(w["url"], w["bootstrap_port"]) for w in told if w["mode"] == "prefill")
        decode = tuple(w["url"] for w in told if w["mode"] == "decode")
        blocks = {w["url"]: w["num_cached_blocks"] for w in told}
        async with start_router(
            prefill=prefill, decode=decode, prefill_policy="cache_aware", health_interval=0.1
        ) as other:
            await until(session, other, lambda w: w["mode"] == "decode" or w["num_cached_blocks"] == blocks[w["url"]])
            found = [await ask(session, other, f"{text}, and another one?") for text in DOCUMENTS]
        assert min(found) >= WHOLE_PAGES
