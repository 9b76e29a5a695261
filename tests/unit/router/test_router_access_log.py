"""The access log: the line of a request that succeeded, failed, migrated, or was disconnected."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.router_world import (
    answers,
    journals,
    never,
    serve_pair,
    serve_pools,
    start_router,
    start_worker,
    streams,
)

KEY = "alice-0123456789abcdef"
NAME = "splitserve.router.access_log"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
DONE = b"data: [DONE]\n\n"


class Lines(logging.Handler):
    """The fields of each line, as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: asyncio.Queue[dict[str, str]] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        first, *words = record.getMessage().split(" ")
        assert first == "request"
        self.seen.put_nowait(dict(word.split("=", 1) for word in words))

    async def next(self) -> dict[str, str]:
        return await asyncio.wait_for(self.seen.get(), 60)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    handler, logger = Lines(), logging.getLogger(NAME)
    caplog.set_level(logging.INFO, NAME)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def at_once() -> asyncio.Event:
    passed = asyncio.Event()
    passed.set()
    return passed


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


async def test_a_line_names_the_request_its_workers_and_its_times(lines: Lines) -> None:
    async with serve_pair(answers({}), answers({"usage": USAGE})) as pair:
        await pair.post("/v1/completions", {"prompt": "a", "rid": "r-1"})
        line = await lines.next()
        times = [float(line.pop(name)) for name in ("queued_s", "router_s", "ttft_s", "duration_s")]
        assert times == sorted(times)
        assert times[0] == 0
        assert line == {
            "rid": "r-1",
            "route": "/v1/completions",
            "key": "-",
            "status": "200",
            "side": "-",
            "prompt_tokens": "7",
            "uncached_tokens": "-",
            "output_tokens": "3",
            "tries": "1",
            "prefill": pair.prefill.url,
            "decode": pair.decode.url,
        }
        assert lines.seen.empty()


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        (answers({"usage": USAGE, "choices": [{"logprobs": [None, {}]}]}), ("7", "3")),
        (answers({"meta_info": {"id": "x", **USAGE}}), ("7", "3")),
        (answers([{"meta_info": USAGE}, {"meta_info": USAGE}]), ("14", "6")),
        (answers({"text": "a"}), ("-", "-")),
        (answers({"usage": "none", "text": 1}), ("-", "-")),
        (answers({"usage": USAGE, "text": "x" * (1 << 20)}), ("-", "-")),
        (streams(event({"a": 1}), event({"choices": [], "usage": USAGE}), DONE), ("7", "3")),
        (streams(event({"meta_info": {"prompt_tokens": 7, "completion_tokens": 1}}), DONE), ("7", "1")),
        (streams(event({"a": 1}), DONE), ("-", "-")),
        (journals(5), ("-", "5")),
        (journals(5, until=5, then=event({"usage": USAGE}), go_on=at_once()), ("7", "3")),
    ],
)
async def test_tokens_are_counted_where_a_worker_told_them(lines: Lines, answer: Any, tokens: tuple[str, str]) -> None:
    async with start_worker(answer) as worker, start_router(workers=(worker.url,)) as url:
        async with aiohttp.ClientSession() as client, client.post(url + "/generate", json={"stream": True}) as response:
            await response.read()
        line = await lines.next()
        assert (line["prompt_tokens"], line["output_tokens"], line["null"]) == (*tokens, worker.url)


async def test_a_line_names_the_caller_and_not_the_key(lines: Lines, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY} alice\n")
    async with start_router(api_key_file=tmp_path / "keys") as url, aiohttp.ClientSession() as client:
        async with client.post(url + "/generate", json={}, headers={"Authorization": f"Bearer {KEY}"}) as response:
            assert response.status == 503
        line = await lines.next()
        assert (line["key"], line["status"], line["side"], line["tries"]) == ("alice", "503", "router", "0")
        assert KEY not in str(line)


async def test_a_body_that_is_not_understood_has_no_id_and_no_tries(lines: Lines) -> None:
    async with serve_pair(answers({}), answers({})) as pair:
        await pair.post("/generate", None, raw=b"{")
        line = await lines.next()
        assert (line["rid"], line["status"], line["side"], line["tries"], line["router_s"]) == (
            "-",
            "400",
            "client",
            "0",
            "-",
        )


@pytest.mark.parametrize("rid", ["a b\nrequest rid=x", "é" * 200, ["a", "b"], "", {"a": " "}])
async def test_whatever_a_client_calls_its_request_stays_one_word(lines: Lines, rid: Any) -> None:
    async with serve_pair(answers({}), answers({})) as pair:
        await pair.post("/generate", {"text": "a", "rid": rid})
        line = await lines.next()
        assert (line["route"], line["status"]) == ("/generate", "200")
        assert len(line["rid"]) < 1000


async def test_a_request_that_moved_names_its_last_workers_and_counts_its_tries(lines: Lines) -> None:
    async with serve_pools([answers({})], [journals(5, until=2), journals(5)]) as pools:
        status, _ = await pools.post("/generate", {"text": "a", "stream": True})
        line = await lines.next()
        assert (status, line["status"], line["tries"], line["output_tokens"]) == (200, "200", "2", "5")
        assert line["decode"] == pools.decode[1].url


async def test_a_stream_that_fails_half_way_has_the_status_of_its_error(lines: Lines) -> None:
    async with serve_pair(answers({}), streams(event({"a": 1}), die=True)) as pair:
        status, _, _ = await pair.post("/generate", {"text": "a", "stream": True})
        line = await lines.next()
        assert (status, line["status"], line["side"]) == (200, "502", "decode")


async def test_a_client_that_leaves_is_a_499_on_its_own_side(lines: Lines) -> None:
    async with serve_pair(never(), never()) as pair:
        async with aiohttp.ClientSession() as client:
            asking = asyncio.ensure_future(client.post(pair.router + "/generate", json={"text": "a"}))
            await asyncio.wait_for(pair.decode.arrived.wait(), 60)
            asking.cancel()
        line = await lines.next()
        assert (line["status"], line["side"], line["ttft_s"], line["tries"]) == ("499", "client", "-", "1")


async def test_without_the_option_there_is_no_line(lines: Lines) -> None:
    async with serve_pair(answers({}), answers({}), access_log=False) as pair:
        await pair.post("/generate", {"text": "a"})
        await pair.post("/generate", {"text": "a"})
    assert lines.seen.empty()
