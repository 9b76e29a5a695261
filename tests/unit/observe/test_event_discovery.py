"""From a worker's URL to its events: who publishes what, and the whole index of a rank."""

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from splitserve.observe.events.schema import BlockStored, IndexSnapshot
from splitserve.observe.events.subscriber import find_publishers, follow, load_index

SNAPSHOT = {
    "next_sequence": 7,
    "ts": 1.5,
    "events": [
        {
            "type": "BlockStored",
            "block_hashes": [-5],
            "parent_block_hash": None,
            "token_ids": [1, 2],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
        }
    ],
}


@pytest.fixture
async def worker():
    """Answers as a worker does; `info` is its server info."""
    app = web.Application()
    info = {"version": "1"}

    async def server_info(request):
        return web.json_response(info)

    async def kv_index(request):
        if request.query["dp_rank"] != "1":
            raise web.HTTPServiceUnavailable
        return web.json_response(SNAPSHOT)

    app.router.add_get("/server_info", server_info)
    app.router.add_get("/kv_index", kv_index)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        yield session, f"http://{server.host}:{server.port}", info


async def test_a_wildcard_address_is_that_of_the_worker(worker):
    session, url, info = worker
    assert await find_publishers(session, url) is None
    info["kv_events"] = {
        "topic": "kv",
        "block_size": 16,
        "dp_size": 2,
        "publishers": [
            {"dp_rank": 0, "endpoint": "tcp://*:7000", "replay_endpoint": ""},
            {"dp_rank": 1, "endpoint": "tcp://10.0.0.9:7001", "replay_endpoint": "tcp://*:7101"},
        ],
    }
    found = await find_publishers(session, url)
    assert (found.topic, found.block_size) == ("kv", 16)
    assert [(p.endpoint, p.replay_endpoint) for p in found.publishers] == [
        ("tcp://127.0.0.1:7000", ""),
        ("tcp://10.0.0.9:7001", "tcp://127.0.0.1:7101"),
    ]
    assert not found.has_window_pages
    info["internal_states"] = [{"window_pages_total": 0}, {"window_pages_total": 9}]
    assert (await find_publishers(session, url)).has_window_pages
    snapshot = await follow(session, url, found, 1)._load_index()
    assert snapshot == IndexSnapshot(7, 1.5, [BlockStored([-5], None, [1, 2], 2)])


async def test_a_publisher_that_connects_out_cannot_be_followed(worker):
    session, url, info = worker
    publishers = [{"dp_rank": 0, "endpoint": "", "replay_endpoint": ""}]
    info["kv_events"] = {"topic": "", "block_size": 16, "publishers": publishers}
    assert await find_publishers(session, url) is None


async def test_a_worker_that_cannot_be_asked_is_an_error_of_the_system(worker):
    session, url, _ = worker
    with pytest.raises(OSError, match="503"):
        await load_index(session, url, 0)
    with pytest.raises(OSError, match=r"127\.0\.0\.1:1/server_info"):
        await find_publishers(session, "http://127.0.0.1:1")


async def test_a_worker_that_is_not_understood_is_no_worker_that_tells_nothing(worker):
    session, url, info = worker
    info["kv_events"] = {"topic": "", "block_size": 16, "publishers": []}
    assert await find_publishers(session, url) is None
    info["kv_events"] = {"publisher": "zmq", "endpoint_port_base": 5557}
    with pytest.raises(OSError, match="server_info: Object missing required field"):
        await find_publishers(session, url)


@pytest.mark.parametrize(
    ("block_size", "ranks", "problem"),
    [
        (0, [0], "Expected `int` >= 1"),
        (-16, [0], "Expected `int` >= 1"),
        (16, [1], "not those of ranks 0 to 0"),
        (16, [0, 0], "not those of ranks 0 to 1"),
        (16, [0, 2], "not those of ranks 0 to 1"),
    ],
)
async def test_impossible_block_sizes_and_ranks_are_refused(worker, block_size, ranks, problem):
    """A block size of 0 would end the reading of all prompts, for all workers."""
    session, url, info = worker
    publishers = [{"dp_rank": rank, "endpoint": "tcp://*:7000"} for rank in ranks]
    info["kv_events"] = {"topic": "", "block_size": block_size, "publishers": publishers}
    with pytest.raises(OSError, match=problem):
        await find_publishers(session, url)


async def test_an_answer_that_is_nested_too_deeply_is_refused():
    app = web.Application()

    async def deep(request):
        return web.Response(body=b'{"x": ' + b"[" * 200_000)

    app.router.add_get("/server_info", deep)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        with pytest.raises(OSError, match="server_info: "):
            await find_publishers(session, f"http://{server.host}:{server.port}")
