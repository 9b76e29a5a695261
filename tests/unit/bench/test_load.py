"""The load generator against a small HTTP server that streams as ours does."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from splitserve.bench.load import LoadError, num_tokens_of, run_streams


class FakeApi:
    """Answers a completion when `num_together` requests are there, one frame a token."""

    def __init__(self, num_together=1, *, status=200, error=None, short_by=0):
        self.bodies = []
        self.num_together = num_together
        self.together = asyncio.Event()
        self.status = status
        self.error = error
        self.short_by = short_by

    async def handle(self, request):
        body = await request.json()
        self.bodies.append(body)
        if len(self.bodies) >= self.num_together:
            self.together.set()
        async with asyncio.timeout(10):
            await self.together.wait()
        if self.status != 200:
            return web.json_response({"error": {"message": "no room"}}, status=self.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for token in range(body["max_tokens"] - self.short_by):
            await response.write(frame({"choices": [{"index": 0, "text": "x", "token_ids": [token]}]}))
        if self.error:
            await response.write(frame({"error": {"message": self.error}}))
        await response.write(frame({"choices": [], "usage": {"completion_tokens": 3}}))
        await response.write(b"data: [DONE]\n\n")
        return response


def frame(data):
    return b"data: " + json.dumps(data).encode() + b"\n\n"


async def run(api, num_streams, max_tokens=3, timeout=10.0):
    app = web.Application()
    app.router.add_post("/v1/completions", api.handle)
    async with TestServer(app) as server:
        prompts = [[i, i + 1] for i in range(num_streams)]
        return await run_streams(str(server.make_url("")).rstrip("/"), "m", prompts, max_tokens, timeout)


async def test_all_streams_run_at_once_and_every_token_is_timed():
    api = FakeApi(num_together=5)
    records = await run(api, 5)
    assert [r.num_output_tokens for r in records] == [3] * 5
    for r in records:
        assert r.sent_at < r.arrived_at[0]
        assert list(r.arrived_at) == sorted(r.arrived_at)
    assert sorted(body["prompt"] for body in api.bodies) == [[i, i + 1] for i in range(5)]


async def test_streams_ask_for_exactly_so_many_tokens():
    api = FakeApi()
    await run(api, 1, max_tokens=7)
    (body,) = api.bodies
    assert body["stream"]
    assert body["ignore_eos"]
    assert (body["max_tokens"], body["model"]) == (7, "m")


@pytest.mark.parametrize(
    ("api", "message"),
    [
        (lambda: FakeApi(status=503), "HTTP 503.*no room"),
        (lambda: FakeApi(error="the worker died"), "the worker died"),
        (lambda: FakeApi(short_by=1), "2 of 3 tokens"),
    ],
)
async def test_a_stream_that_fails_or_falls_short_fails_the_run(api, message):
    with pytest.raises(LoadError, match=message):
        await run(api(), 2)


async def test_a_server_that_never_answers_fails_the_run_at_the_deadline():
    with pytest.raises(LoadError, match="TimeoutError"):
        await run(FakeApi(num_together=2), 1, timeout=0.2)


async def test_a_server_that_is_not_there_fails_the_run():
    with pytest.raises(LoadError, match="Cannot connect"):
        await run_streams("http://127.0.0.1:1", "m", [[1]], 1)


@pytest.mark.parametrize(
    ("line", "count"),
    [
        (b"\n", 0),
        (b": a comment\n", 0),
        (b"data: [DONE]\n", 0),
        (b'data: {"choices": []}\n', 0),
        (b'data: {"choices": [{"text": "", "token_ids": null}]}\n', 0),
        (b'data: {"choices": [{"token_ids": [1, 2]}, {"token_ids": [3]}]}\n', 3),
    ],
)
def test_lines_of_a_stream_count_their_tokens(line, count):
    assert num_tokens_of(line) == count
