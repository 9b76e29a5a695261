"""`splitserve top`: what it prints of a router, and what it says if there is none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rich.console import Console

from splitserve.core.errors import OptionError
from splitserve.observe.live import LiveEvent, LiveLink, LiveRouter, LiveUpdate, LiveWorker
from splitserve.observe.trace import TraceSummary
from splitserve.tools import top
from splitserve.tools.client import RequestFailedError
from splitserve.tools.options import TopOptions
from splitserve.tools.top import LivePicture, render, run_top
from support.router_world import answers, journals, serve_pools, start_router
from support.traces import trace_summary

ROUTER = LiveRouter(
    running=5,
    waiting=1,
    queued=3,
    requests_per_s=3.5,
    tokens_per_s=1234.0,
    ttft_p50_ms=51.25,
    ttft_p99_ms=None,
    itl_p50_ms=9.5,
    itl_p99_ms=None,
    loop_lag_ms=0.5,
)


def summary(number: int, **fields: Any) -> TraceSummary:
    values: dict[str, Any] = {"trace_id": f"{number:032x}", "started_at": 1000.0}
    return trace_summary(f"r{number}", **(values | fields))


def update(**fields: Any) -> LiveUpdate:
    values: dict[str, Any] = {
        "now": 1003.0,
        "version": "1",
        "model": "tiny",
        "can_operate": True,
        "router": ROUTER,
        "workers": [],
        "links": [],
        "requests": [],
        "events": [],
    }
    return LiveUpdate(**(values | fields))


def text_of(picture: LivePicture, num_requests: int = 10, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(render(picture, num_requests))
    return capture.get()


def test_the_picture_has_router_workers_links_requests_and_events() -> None:
    worker = LiveWorker(
        url="http://d:1",
        name="d:1",
        role="decode",
        state="unhealthy",
        reason="refused",
        in_flight=1,
        running=12,
        queues={"transfer": 2, "grammar": 0},
        waiting_reason="kv_pool",
        kv_usage=0.61,
        step_ms=20.25,
    )
    picture = LivePicture()
    event = LiveEvent(1002.0, "worker_lost", "http://d:1", "", "A decode worker does not answer.")
    picture.add(
        update(
            workers=[worker],
            links=[LiveLink("http://p:1", "http://d:1", 4, 2_500_000.0)],
            requests=[
                summary(1, state="running", status=0),
                summary(3, state="running", status=0, ttft_ms=None),
                summary(4, state="waiting", status=0, ttft_ms=None),
                summary(2, error="engine_error", status=500),
            ],
            events=[event],
        )
    )
    text = text_of(picture)
    assert "running 2  waiting 1 at the router, 3 on workers" in text
    rows = [line.split() for line in text.splitlines() if "/generate" in line]
    states = {row[0]: row[2] for row in rows}
    assert states == {"r1": "streaming", "r3": "dispatched", "r4": "waiting", "r2": "500"}
    for words in ("tiny", "1,234 tok/s", "TTFT p50 51.2 ms", "d:1", "unhealthy", "61%"):
        assert words in text
    for words in (
        "transfer 2  waits: kv_pool  refused",
        "20.2",
        "2.5",
        "dispatched",
        "3.00",
        "engine_error",
        "does not answer",
    ):
        assert words in text
    assert "grammar" not in text


def test_a_terminal_of_80_columns_has_all_figures() -> None:
    worker = LiveWorker(
        url="http://127.0.0.1:42165",
        name="127.0.0.1:42165",
        role="prefill",
        state="unhealthy",
        reason="connection refused",
        in_flight=1,
        running=12,
        waiting=7,
        queues={"bootstrap": 12, "inflight": 34},
        kv_usage=0.61,
        step_ms=20.25,
        tokens_per_s=12345.5,
        prefix_hit_rate=0.62,
        transfer_gb_s=0.875,
    )
    picture = LivePicture()
    rid = "0123456789abcdef0123456789abcdef"
    long = summary(1, route="/v1/chat/completions", ttft_ms=12345.6, output_tokens=98765, error="engine_error")
    long.rid = rid
    link = LiveLink("http://127.0.0.1:42165", "http://127.0.0.1:42166", 4, 2_500_000.0)
    picture.add(update(workers=[worker], links=[link], requests=[long]))
    lines = text_of(picture, width=80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    values = ["prefill", "unhealthy", "12", "7", "61%", "20.2", "12,345.5", "62%", "0.875"]
    [row] = [line.split() for line in lines if "unhealthy" in line]
    assert row[1:] == values
    assert row[0].startswith("127")
    assert row[0].endswith("65")
    assert "  bootstrap 12 inflight 34  connection refused" in lines
    [row] = [line.split() for line in lines if "/v1/chat" in line]
    assert row[1:] == ["/v1/chat/completions", "200", "0.25", "12,345.6", "98765", "0"]
    assert (row[0][:4], row[0][-4:]) == ("0123", "cdef")
    assert "  engine_error" in lines
    # With more room, the id is complete.
    assert rid in text_of(picture, width=100)


def test_requests_are_updated_and_bounded_and_running_ones_come_first() -> None:
    picture = LivePicture()
    picture.add(update(requests=[summary(n) for n in range(1500)]))
    picture.add(update(requests=[summary(1499, output_tokens=99), summary(3, state="running")]))
    assert len(picture.requests) == 1000
    assert [(r.rid, r.output_tokens) for r in picture.latest(3)] == [("r3", 7), ("r1499", 99), ("r1498", 7)]


async def test_once_prints_one_picture_of_a_real_router(capsys: pytest.CaptureFixture[str]) -> None:
    async with serve_pools([answers({})], [journals(3)]) as pools:
        body = {"text": "a", "stream": True, "rid": "my-request"}
        assert (await pools.post("/generate", body))[0] == 200
        assert await asyncio.to_thread(run_top, TopOptions(url=pools.router, once=True)) == 0
        out = capsys.readouterr().out
        assert await asyncio.to_thread(run_top, TopOptions(router=pools.router, once=True)) == 0
        assert "my-request" in out
        assert "my-request" in capsys.readouterr().out
        assert pools.decode[0].url.removeprefix("http://") in out


async def test_a_router_that_sends_no_update_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "_SILENCE_SECONDS", 0.05)
    is_closed = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        is_closed.set()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(RequestFailedError, match=r"no update arrived for 0\.05 s"):
            await asyncio.to_thread(run_top, TopOptions(url=url, once=True))
        await is_closed.wait()


def test_two_urls_are_an_error() -> None:
    with pytest.raises(OptionError, match=r"--url does not go together with the argument http://a:1: give one URL"):
        run_top(TopOptions(router="http://a:1", url="http://b:1"))


async def test_a_missing_key_is_an_error_that_names_it(tmp_path, capsys, monkeypatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("root-0123456789abcdef root\n")
    keys.chmod(0o600)
    async with start_router(operator_key_file=keys) as router:
        options = TopOptions(url=router, once=True)
        with pytest.raises(
            RequestFailedError, match=r"no API key.*; set the key in the environment variable SPLITSERVE_API_KEY"
        ):
            await asyncio.to_thread(run_top, options)
        monkeypatch.setenv("SPLITSERVE_API_KEY", "other-0123456789abcdef")
        with pytest.raises(
            RequestFailedError, match="; the key sent is that in the environment variable SPLITSERVE_API_KEY"
        ):
            await asyncio.to_thread(run_top, options)
        monkeypatch.setenv("SPLITSERVE_API_KEY", "root-0123456789abcdef")
        assert await asyncio.to_thread(run_top, options) == 0
