"""The load generator against a small server: counts, times, the two loops, and errors."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from aiohttp import web

from splitserve.tools.bench.load import Endpoint, complete, num_tokens_of, run_load
from splitserve.tools.bench.stats import StreamRecord
from splitserve.tools.bench.workload import LoadRequest, Prompt
from splitserve.tools.client import RequestFailedError, first_model, open_session, parse_event
from support.fake_openai import FakeOpenAI
from support.router_world import start_worker


def request(number, max_tokens=3, send_at=0.0):
    return LoadRequest(Prompt(ids=[number, number + 1], text=f" {number}"), max_tokens, send_at)


async def load(api, requests, *, endpoint=None, **how):
    async with api.serving() as url:
        return await run_load(Endpoint(url, "m", **(endpoint or {})), requests, timeout=60.0, **how)


async def one(api, max_tokens=3, **endpoint):
    """The record of one stream."""
    async with api.serving() as url, open_session(10.0) as session:
        record = StreamRecord(0.0)
        await complete(session, Endpoint(url, "m", **endpoint), request(1, max_tokens), record)
        return record


async def test_every_token_is_timed_at_the_client_after_the_server_wrote_it():
    api = FakeOpenAI()
    record = await one(api, max_tokens=20)
    (written_at,) = api.written_at
    assert record.sent_at <= written_at[0]
    assert len(record.arrived_at) == len(written_at) == 20
    assert all(written <= arrived for written, arrived in zip(written_at, record.arrived_at, strict=True))
    assert list(record.arrived_at) == sorted(record.arrived_at)
    assert (record.num_prompt_tokens, record.num_output_tokens, len(record.itls)) == (2, 20, 19)


async def test_tokens_of_one_frame_arrive_together_and_all_count():
    record = await one(FakeOpenAI(tokens_a_frame=4), max_tokens=10)
    assert (len(record.arrived_at), record.num_output_tokens) == (3, 10)


async def test_without_token_ids_usage_says_how_many_tokens_frames_held():
    record = await one(FakeOpenAI(tokens_a_frame=2, with_token_ids=False), max_tokens=8)
    assert (len(record.arrived_at), record.num_output_tokens) == (4, 8)


async def test_tokens_that_did_not_arrive_do_not_count_whatever_usage_has():
    with pytest.raises(RequestFailedError, match="8 of 10 tokens"):
        await one(FakeOpenAI(lost=2), max_tokens=10)


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_a_closed_loop_keeps_its_concurrency_and_never_exceeds_it(concurrency):
    # No request is answered before so many have arrived.
    api = FakeOpenAI(num_together=concurrency)
    result = await load(api, [request(i) for i in range(20)], concurrency=concurrency)
    assert (result.num_failed, len(result.records)) == (0, 20)
    assert api.max_running == concurrency
    assert sorted(body["prompt"] for body in api.bodies) == [[i, i + 1] for i in range(20)]


async def test_an_open_loop_sends_on_while_nothing_is_answered():
    # No request is answered before all have arrived.
    api = FakeOpenAI(num_together=6)
    began = time.perf_counter()
    result = await load(api, [request(i, send_at=i / 100) for i in range(6)])
    assert len(result.records) == 6
    sent = sorted(r.sent_at for r in result.records)
    assert all(sent_at - began >= i / 100 for i, sent_at in enumerate(sent))


async def test_times_of_an_open_loop_begin_when_a_request_is_due_so_a_late_client_does_not_shorten_them():
    # It was due before the run began, as if the client had no time for it until then.
    result = await load(FakeOpenAI(), [request(1, send_at=-5.0)])
    assert result.records[0].ttft >= 5.0
    closed = await load(FakeOpenAI(), [request(1, send_at=-5.0)], concurrency=1)
    assert closed.records[0].e2e < 5.0


@pytest.mark.parametrize("concurrency", [2, None])
async def test_nothing_is_sent_after_the_duration_and_what_is_under_way_ends(concurrency):
    api = FakeOpenAI()
    result = await load(
        api, (request(i, send_at=i / 100) for i in itertools.count()), concurrency=concurrency, duration=0.1
    )
    assert len(result.records) == len(api.bodies) > 0
    assert result.num_failed == 0
    if concurrency is None:
        assert len(api.bodies) == 10


async def test_failed_requests_are_counted_by_what_they_said_and_the_load_goes_on():
    result = await load(FakeOpenAI(fails_every=3), [request(i) for i in range(9)], concurrency=1)
    assert (len(result.records), result.num_failed) == (6, 3)
    ((message, count),) = result.errors.items()
    assert (count, "HTTP 503" in message, "no room" in message) == (3, True, True)
    with pytest.raises(RequestFailedError, match=r"3 of 9 requests failed: .*no room"):
        result.complete()


@pytest.mark.parametrize(
    ("api", "message"),
    [
        (FakeOpenAI(fails_every=1), "HTTP 503.*no room"),
        (FakeOpenAI(error="the worker died"), "the worker died"),
        (FakeOpenAI(short_by=1), "2 of 3 tokens"),
        (FakeOpenAI(short_by=3), "0 of 3 tokens"),
    ],
)
async def test_a_stream_that_fails_or_falls_short_is_an_error(api, message):
    with pytest.raises(RequestFailedError, match=message):
        await one(api)


async def test_a_server_that_never_answers_fails_the_request_at_its_deadline():
    async with FakeOpenAI(num_together=2).serving() as url:
        result = await run_load(Endpoint(url, "m"), [request(1)], concurrency=1, timeout=0.2)
    assert [("deadline" in message, count) for message, count in result.errors.items()] == [(True, 1)]


async def test_a_server_that_is_not_there_fails_the_request():
    result = await run_load(Endpoint("http://127.0.0.1:1", "m"), [request(1)], concurrency=1)
    assert list(result.errors) == [
        "no server answers at 127.0.0.1:1 (Connection refused): start one, or give the URL of another"
    ]


def test_a_server_that_is_not_there_is_named_with_the_remedy():
    with pytest.raises(
        RequestFailedError, match=r"^no server answers at 127.0.0.1:1 \(Connection refused\): start one"
    ):
        first_model("http://127.0.0.1:1")


async def test_a_server_that_offers_no_model_is_named():
    async with FakeOpenAI().serving() as url:
        with pytest.raises(RequestFailedError, match="/other/v1/models names no model"):
            await asyncio.to_thread(first_model, f"{url}/other")


async def test_the_key_of_the_environment_is_shown(monkeypatch):
    monkeypatch.setenv("SPLITSERVE_API_KEY", "a-key-0123456789")
    seen = []

    async def handler(request, _):
        seen.append(request.headers.get("authorization"))
        return web.json_response({"data": [{"id": "m"}]})

    async with start_worker(handler) as server:
        assert await asyncio.to_thread(first_model, server.url) == "m"
        await run_load(Endpoint(server.url, "m"), [request(1)], concurrency=1, timeout=60.0)
    assert seen == ["Bearer a-key-0123456789"] * 2


def test_a_request_asks_for_exactly_so_many_tokens_in_token_ids():
    body = Endpoint("http://x", "m").body(request(4, 7))
    assert (body["prompt"], body["max_tokens"], body["model"]) == ([4, 5], 7, "m")
    assert body["stream"]
    assert body["ignore_eos"]
    assert body["stream_options"] == {"include_usage": True}


def test_prompts_go_as_text_and_fields_are_replaced_or_left_out_where_a_server_wants_it():
    endpoint = Endpoint("http://x", "m", prompt_as_text=True, extra_body={"ignore_eos": None, "seed": 5})
    body = endpoint.body(request(4))
    assert (body["prompt"], body["seed"], "ignore_eos" in body) == (" 4", 5, False)
    with pytest.raises(RequestFailedError, match="token ids"):
        endpoint.body(LoadRequest(Prompt(ids=[1], text=""), 1))


@pytest.mark.parametrize(
    ("line", "count"),
    [
        (b'data: {"choices": []}\n', 0),
        (b'data: {"choices": [{"text": "", "token_ids": null}]}\n', 0),
        (b'data: {"choices": [{"text": "", "token_ids": []}]}\n', 0),
        (b'data: {"choices": [{"text": "", "token_ids": [9]}]}\n', 1),
        (b'data: {"choices": [{"text": "word"}]}\n', 1),
        (b'data: {"choices": [{"token_ids": [1, 2]}, {"token_ids": [3]}]}\n', 3),
    ],
)
def test_frames_of_a_stream_count_their_tokens(line, count):
    assert num_tokens_of(parse_event(line)) == count


@pytest.mark.parametrize("line", [b"\n", b": a comment\n", b"data: [DONE]\n", b"event: x\n"])
def test_lines_without_a_frame_are_passed_over(line):
    assert parse_event(line) is None


@pytest.mark.parametrize("error", [b'{"message": "gone"}', b'"gone"'])
def test_an_error_frame_is_an_error_in_either_form(error):
    with pytest.raises(RequestFailedError, match="gone"):
        parse_event(b'data: {"error": ' + error + b"}\n")


async def test_failures_that_differ_in_the_id_of_the_request_are_counted_together(monkeypatch):
    messages = [f"request {number:032x} (stage: queue): {what}" for number, what in enumerate(("full", "full", "gone"))]
    failures = iter(messages)

    async def fail(*_):
        raise RequestFailedError(next(failures))

    monkeypatch.setattr("splitserve.tools.bench.load.complete", fail)
    result = await run_load(Endpoint("http://h:1", "m"), [request(i) for i in range(3)], concurrency=1)
    assert result.errors == {messages[0]: 2, messages[2]: 1}
