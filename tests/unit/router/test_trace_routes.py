"""Tests of the routes for traces: what clients and operators get of requests through a router with scripted workers."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from splitserve.api.responses import with_trace
from splitserve.api.schemas import JOURNAL_HEADER
from splitserve.core.errors import ConfigError
from splitserve.core.timeline import Span, encode_trace
from splitserve.router.args import LBArgs
from splitserve.router.balancer import MiniLoadBalancer
from support.router_world import FakeWorker, after, answers, serve_pair, start_router, start_worker

ALICE, BOB, ROOT = "alice-0123456789abcdef", "bob-0123456789abcdef", "root-0123456789abcdef"
SPANS = [Span("tokenize", 50.0, 50.1), Span("decode", 50.1, 50.2, {"steps": 2})]
REPORT = encode_trace("null", "clock of another host", (50.0, 50.2), [(0, SPANS)])


def key_file(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)
    return path


async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert body["dispatch"]["report"] is True
    if body.get("text") == "fail":
        error = {"message": "no", "type": "invalid_request_error", "code": "invalid_request"}
        return web.Response(status=400, body=with_trace(json.dumps({"error": error}).encode(), REPORT))
    if not body.get("stream"):
        # The text contains what begins a trace.
        return web.Response(body=with_trace(json.dumps({"text": "\n:trace x\n\n"}).encode(), REPORT))
    response = web.StreamResponse(headers={"content-type": "text/event-stream", JOURNAL_HEADER: "1"})
    await response.prepare(request)
    line = {"index": 0, "token_ids": [1, 2], "num_prompt_tokens": 9, "num_cached_tokens": 4}
    for event in (b'data: {"a": 1}', b": " + json.dumps(line).encode()):
        await response.write(event + b"\n\n")
    await response.write(b":trace " + REPORT + b"\n\ndata: [DONE]\n\n")
    return response


async def get(url: str, path: str, key: str | None = None) -> tuple[int, Any]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession() as client, client.get(url + path, headers=headers) as response:
        return response.status, await response.json()


async def generate(url: str, key: str | None = None, headers: Any = None, **body: Any) -> tuple[str, bytes]:
    """Return the header x-request-id and the body of the answer."""
    own = {**(headers or {}), **({} if key is None else {"Authorization": f"Bearer {key}"})}
    async with aiohttp.ClientSession() as client, client.post(f"{url}/generate", json=body, headers=own) as response:
        return response.headers["x-request-id"], await response.read()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_finished_request_has_a_trace_under_its_rid(stream: bool):
    async with start_worker(answer) as worker, start_router(workers=(worker.url,)) as url:
        name, body = await generate(url, rid="mine", text="x", stream=stream)
        status, report = await get(url, "/v1/trace/mine")
        missing, _ = await get(url, "/v1/trace/other")
        _, listed = await get(url, "/v1/traces")
    assert (name, status, missing) == ("mine", 200, 404)
    if stream:
        assert b"trace" not in body
    else:
        assert json.loads(body) == {"text": "\n:trace x\n\n"}
    names = {stage["name"] for stage in report["stages"]}
    assert {"router_receive", "router_choose", "router_dispatch", "request_network", "tokenize", "decode"} <= names
    total = sum(stage["exclusive_ms"] for stage in report["stages"]) + report["unaccounted_ms"]
    assert total == pytest.approx(report["ttft_ms"])
    assert report["clocks"][0]["worker"] == worker.url
    assert report["workers"] == {"null": worker.url}
    assert [trace["rid"] for trace in listed["traces"]] == ["mine"]
    if stream:
        assert (report["prompt_tokens"], report["num_cached_tokens"], report["output_tokens"]) == (9, 4, 2)


async def test_a_request_is_found_by_the_id_in_its_header():
    async with start_worker(answer) as worker, start_router(workers=(worker.url,)) as url:
        generated, _ = await generate(url, text="x")
        given, _ = await generate(url, text="x", headers={"x-request-id": "from-my-proxy"})
        first, second = await get(url, f"/v1/trace/{generated}"), await get(url, "/v1/trace/from-my-proxy")
        by_id, chat = await get(url, f"/v1/trace/cmpl-{generated}"), await get(url, f"/v1/trace/chatcmpl-{generated}")
    assert given == "from-my-proxy"
    assert (first[0], second[0]) == (200, 200)
    assert by_id == chat == first
    assert first[1]["rid"] == generated != second[1]["rid"]


async def test_a_trace_starts_when_the_client_sent_the_request():
    seen: list[Any] = []

    async def keep(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seen.append(request.headers.get("x-request-start"))
        return await answer(request, body)

    async with start_worker(keep) as worker, start_router(workers=(worker.url,)) as url:
        before = time.time() - 5.0
        await generate(url, rid="early", text="x", headers={"x-request-start": f"t={before:.6f}"})
        await generate(url, rid="wrong", text="x", headers={"X-Request-Start": "yesterday"})
        await generate(url, rid="none", text="x")
        early, wrong, none = [(await get(url, f"/v1/trace/{rid}"))[1] for rid in ("early", "wrong", "none")]
        async with aiohttp.ClientSession() as client, client.get(f"{url}/metrics") as response:
            metrics = await response.text()
    assert [report["start"] for report in (early, wrong, none)] == ["client", "ignored", "router"]
    first = early["stages"][0]
    assert (first["name"], first["where"], first["start_ms"]) == ("client_network", "network", 0.0)
    assert first["end_ms"] >= 5000.0
    assert 4000.0 < first["exclusive_ms"] <= first["end_ms"]
    total = sum(stage["exclusive_ms"] for stage in early["stages"]) + early["unaccounted_ms"]
    assert total == pytest.approx(early["ttft_ms"])
    assert early["started_at"] == pytest.approx(before, abs=1e-5)
    assert early["e2e_ms"] > 5000.0 > wrong["e2e_ms"]
    for report in (wrong, none):
        assert {stage["name"] for stage in report["stages"]}.isdisjoint({"client_network"})
    # Metrics do not depend on clocks of clients, and the workers do not get the header.
    assert 'time_to_first_token_seconds_bucket{le="5.0",route="/generate"} 3.0' in metrics
    assert seen == [None, None, None]


async def test_failed_requests_are_listed_with_their_error():
    async with start_worker(answer) as worker, start_router(workers=(worker.url,), trace_sample=0.0) as url:
        _, body = await generate(url, rid="bad", text="fail")
        _, listed = await get(url, "/v1/traces?errors=true")
        _, report = await get(url, "/v1/trace/bad")
    assert json.loads(body)["error"]["code"] == "invalid_request"
    assert [(trace["rid"], trace["status"], trace["error"]) for trace in listed["traces"]] == [
        ("bad", 400, "invalid_request")
    ]
    assert "tokenize" in {stage["name"] for stage in report["stages"]}
    assert report["error_message"] == "no"


async def test_a_trace_has_the_error_that_the_client_received_on_one_short_line():
    async def fail(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        text = f"no memory at http://10.0.0.5:30000/x\nand {'more ' * 100}end"
        raise web.HTTPInternalServerError(
            text=json.dumps({"error": {"message": text, "type": "server_error", "code": "engine_error"}})
        )

    async with start_worker(fail) as worker, start_router(workers=(worker.url,)) as url:
        _, answered = await generate(url, rid="bad", text="x")
        _, report = await get(url, "/v1/trace/bad")
    received, traced = json.loads(answered)["error"]["message"], report["error_message"]
    assert "10.0.0.5" not in traced
    assert len(traced) <= 300
    beginning, end = traced.split(" ... ")
    assert beginning == received.replace("\n", " ")[: len(beginning)]
    assert received.endswith(end)


def test_the_export_needs_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "splitserve.router.otel", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"needs opentelemetry\S*: pip install 'splitserve\[otel\]'"):
        MiniLoadBalancer(LBArgs(workers=("http://127.0.0.1:1",), otlp_traces_endpoint="http://127.0.0.1:1"))


async def test_an_answered_request_has_no_error_in_its_trace():
    async with start_worker(answer) as worker, start_router(workers=(worker.url,)) as url:
        await generate(url, rid="good", text="x")
        _, report = await get(url, "/v1/trace/good")
    assert (report["error"], report["error_message"]) == ("", "")


@pytest.mark.parametrize(("own", "shown"), [("from-my-proxy", True), ("bad", False), ("two words", False)])
async def test_the_log_line_of_a_failure_has_the_clients_own_id(own: str, shown: bool, caplog: Any):
    async with start_worker(answer) as worker, start_router(workers=(worker.url,)) as url:
        await generate(url, rid="bad", text="fail", headers={"x-request-id": own})
    [line] = [message for message in caplog.messages if message.startswith("request failed")]
    assert line.startswith(
        "request failed rid=bad request_id=from-my-proxy route=" if shown else "request failed rid=bad route="
    )


async def test_a_retry_is_a_failed_attempt_of_the_trace():
    async def lose(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    def first_bad(workers: list[FakeWorker]) -> Any:
        async def handler(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return await (lose if sum(len(w.bodies) for w in workers) == 1 else answer)(request, body)

        return handler

    workers: list[FakeWorker] = []
    async with start_worker(first_bad(workers)) as one, start_worker(first_bad(workers)) as other:
        workers += [one, other]
        async with start_router(workers=(one.url, other.url)) as url:
            await generate(url, rid="r", text="x")
            _, report = await get(url, "/v1/trace/r")
    assert (report["attempts"], report["retries"], report["migrations"]) == (2, 1, 0)
    [failed] = [stage for stage in report["stages"] if stage["name"] == "failed_attempt"]
    assert failed["attributes"]["kind"] == "retry"
    assert failed["attributes"]["worker"] in (one.url, other.url)


async def test_a_client_gets_its_own_traces_and_an_operator_all(tmp_path: Path):
    keys = {
        "api_key_file": key_file(tmp_path / "clients", f"{ALICE} alice", f"{BOB} bob"),
        "operator_key_file": key_file(tmp_path / "operators", f"{ROOT} root"),
    }
    async with start_worker(answer) as worker, start_router(workers=(worker.url,), **keys) as url:
        await generate(url, ALICE, rid="of-alice", text="x")
        await generate(url, BOB, rid="of-bob", text="x")
        single = [(await get(url, "/v1/trace/of-alice", key))[0] for key in (ALICE, BOB, ROOT, None)]
        lists = [(await get(url, "/v1/traces", key))[1].get("traces", []) for key in (ALICE, BOB, ROOT, None)]
    assert single == [200, 404, 200, 401]
    assert [{trace["rid"] for trace in found} for found in lists] == [
        {"of-alice"},
        {"of-bob"},
        {"of-alice", "of-bob"},
        set(),
    ]


async def test_without_client_keys_traces_are_for_operators(tmp_path: Path):
    keys = {"operator_key_file": key_file(tmp_path / "operators", f"{ROOT} root")}
    async with start_worker(answer) as worker, start_router(workers=(worker.url,), **keys) as url:
        await generate(url, rid="r", text="x")
        single = [(await get(url, "/v1/trace/r", key))[0] for key in (ROOT, None)]
    assert single == [200, 401]


async def test_a_running_request_has_no_trace_yet_and_an_unreadable_one_has_an_id():
    async with start_worker(answer) as worker, start_router(workers=(worker.url,)) as url:
        async with aiohttp.ClientSession() as client, client.post(f"{url}/generate", data=b"no json") as response:
            name = response.headers["x-request-id"]
        found, report = await get(url, f"/v1/trace/{name}")
        negative, _ = await get(url, "/v1/traces?limit=-1")
    assert (response.status, found, report["rid"], negative) == (400, 200, name, 400)
    assert report["error"] == "invalid_request"


async def test_a_client_with_the_whole_answer_gets_the_trace_though_the_prefill_has_not_answered() -> None:
    released = asyncio.Event()

    async with serve_pair(after(released, answers({})), answers({"text": "a"})) as pair:
        status, _, _ = await pair.post("/generate", {"text": "x", "rid": "r"})
        # It may send the next request of the same id.
        assert (await pair.post("/generate", {"text": "x", "rid": "r"}))[0] == 200
        trace = asyncio.create_task(get(pair.router, "/v1/trace/r"))
        while not trace.done() and not released.is_set():
            # The router answers a later request, so it has received the one for the trace.
            await get(pair.router, "/workers")
            released.set()
        found, report = await trace
    assert (status, found, report["rid"]) == (200, 200, "r")


async def test_the_error_for_a_running_request_is_another_than_for_an_unknown_one():
    entered, released = asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        entered.set()
        await released.wait()
        return await answer(request, body)

    async with start_worker(slow) as worker, start_router(workers=(worker.url,)) as url:
        running = asyncio.create_task(generate(url, rid="slow", text="x", headers={"x-request-id": "from-my-proxy"}))
        await entered.wait()
        _, about_running = await get(url, "/v1/trace/slow")
        _, about_own_id = await get(url, "/v1/trace/from-my-proxy")
        _, about_unknown = await get(url, "/v1/trace/unknown")
        released.set()
        await running
    assert "is running" in about_running["error"]["message"]
    assert "is running" in about_own_id["error"]["message"]
    assert "check the id" in about_unknown["error"]["message"]
