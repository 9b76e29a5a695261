"""A stream that breaks anywhere and continues at another worker is, byte for byte, the stream without a break."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from splitserve.api.schemas import JOURNAL_HEADER, TRACE_COMMENT, GenerateBody
from splitserve.core.timeline import Stage, WorkerTrace
from splitserve.server.generate_route import samples_of
from splitserve.server.native import read_generate

from .conftest import StartWorker, Worker
from .server_fakes import SteppedScheduler

NATIVE, COMPLETION, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
# A character of three tokens, what might begin a stop string, and one.
TEXT = "a€bSTxSTOPyz"
CASES = {
    "native": (
        NATIVE,
        {"text": TEXT, "sampling_params": {"max_new_tokens": 20, "stop": ["STOP"], "min_new_tokens": 14}},
    ),
    "native stop": (NATIVE, {"text": TEXT, "sampling_params": {"max_new_tokens": 20, "stop": ["STOP"]}}),
    "native with logprobs": (
        NATIVE,
        {
            "text": TEXT,
            "sampling_params": {"max_new_tokens": 5},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
        },
    ),
    "native batch": (
        NATIVE,
        {"text": ["a€b", "xSTOP"], "sampling_params": {"max_new_tokens": 7, "n": 2, "stop": ["STOP"]}},
    ),
    "completion": (COMPLETION, {"prompt": TEXT, "max_tokens": 14, "stop": ["STOP"], "no_stop_trim": True, **USAGE}),
    "completion with echo and logprobs": (
        COMPLETION,
        {"prompt": TEXT, "max_tokens": 6, "echo": True, "logprobs": 2, "return_token_ids": True, **USAGE},
    ),
    "completion of two": (COMPLETION, {"prompt": ["a€b", "xSTOP"], "n": 2, "max_tokens": 7, "stop": "STOP", **USAGE}),
    "chat": (CHAT, {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 40, "stop": ["STx"], **USAGE}),
    "chat of two with logprobs": (
        CHAT,
        {"messages": [{"role": "user", "content": "€"}], "n": 2, "max_tokens": 18, "logprobs": True, "top_logprobs": 1},
    ),
    "native with hidden states": (
        NATIVE,
        {"text": TEXT, "sampling_params": {"max_new_tokens": 14, "stop": ["STOP"]}, "return_hidden_states": True},
    ),
    "completion with hidden states": (
        COMPLETION,
        {"prompt": TEXT, "max_tokens": 14, "stop": ["STOP"], "return_hidden_states": True, **USAGE},
    ),
    "special token at the end": (COMPLETION, {"prompt": [97, 98, 257], "max_tokens": 9}),
}


@pytest.fixture
async def stepped(start_worker: StartWorker) -> AsyncIterator[Worker]:
    """A worker that streams one delta per token."""
    async with start_worker(hidden_states=True) as worker:
        worker.front.scheduler = SteppedScheduler()
        yield worker


async def stream(worker: Any, path: str, body: dict[str, Any], **dispatch: Any) -> list[bytes]:
    """Its events and lines."""
    dispatch = {"created": 17, "journal": True, **dispatch}
    response = await worker.http.post(path, json={**body, "stream": True, "rid": "r", "dispatch": dispatch})
    assert response.status_code == 200, response.text
    assert response.headers[JOURNAL_HEADER] == "1"
    *events, rest = response.content.split(b"\n\n")
    assert rest == b""
    return events


def steady(event: bytes) -> Any:
    """An event without what only time decides."""
    if not event.startswith(b"data: {"):
        return event
    data = json.loads(event[6:])
    for name in ("e2e_latency", "timeline"):
        data.get("meta_info", {}).pop(name, None)
    return data


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_that_goes_on_anywhere_is_the_stream_that_never_broke(name, stepped) -> None:
    path, body = CASES[name]
    whole = await stream(stepped, path, body)
    ends = [i for i, event in enumerate(whole) if event.startswith(b":")]
    assert len(ends) > 2
    for attempt, end in enumerate([-1, *ends], start=1):
        seen, lines = whole[: end + 1], [msgspec.Raw(e[1:]) for e in whole[: end + 1] if e.startswith(b":")]
        told = json.loads(msgspec.json.encode(lines))
        rest = await stream(stepped, path, body, told=told, attempt=attempt)
        assert [steady(e) for e in seen + rest] == [steady(e) for e in whole], f"after {len(lines)} deltas"


async def test_a_break_in_the_middle_of_a_continued_stream_is_continued_too(stepped) -> None:
    path, body = CASES["completion with echo and logprobs"]
    whole = await stream(stepped, path, body)
    lines = [json.loads(e[1:]) for e in whole if e.startswith(b":")]
    second = await stream(stepped, path, body, told=lines[:2], attempt=1)
    told = lines[:2] + [json.loads(e[1:]) for e in second if e.startswith(b":")][:2]
    third = await stream(stepped, path, body, told=told, attempt=2)
    assert [steady(e) for e in third] == [steady(e) for e in whole[-len(third) :]]


async def test_the_trace_of_a_continued_stream_begins_with_its_own_tokens(live_worker) -> None:
    """Tokens of earlier attempts came with the request, before its scheduler sent any."""
    body = {"text": "abcdef", "sampling_params": {"max_new_tokens": 6}}
    told = [{"index": 0, "token_ids": [97]}]
    rest = await stream(live_worker, NATIVE, body, told=told, attempt=1, report=True)
    (trace,) = [e.removeprefix(TRACE_COMMENT) for e in rest if e.startswith(TRACE_COMMENT)]
    (sample,) = msgspec.json.decode(trace, type=WorkerTrace).samples
    spans = {span.name: span for span in sample.spans}
    received = spans[Stage.TO_FRONT_END]
    assert received.start <= received.end == spans[Stage.DETOKENIZE].start <= spans[Stage.DETOKENIZE].end


async def test_what_is_over_is_not_generated_again(stepped) -> None:
    path, body = CASES["native batch"]
    whole = await stream(stepped, path, body)
    lines = [json.loads(e[1:]) for e in whole if e.startswith(b":")]
    num_before = len(stepped.front.scheduler.received)
    assert await stream(stepped, path, body, told=lines, attempt=1) == [b"data: [DONE]"]
    assert len(stepped.front.scheduler.received) == num_before


async def test_a_try_may_follow_another_that_still_runs_here_and_both_end_by_the_clients_name(live_worker) -> None:
    live_worker.scheduler.hold_after = 1
    body = {"text": "abc", "rid": "mine", "sampling_params": {"max_new_tokens": 9}, "stream": True}
    async with live_worker.http.stream("POST", NATIVE, json=body) as first:
        assert first.status_code == 200
        again = body | {"dispatch": {"attempt": 1}}
        async with live_worker.http.stream("POST", NATIVE, json=again) as second:
            assert second.status_code == 200
            lines = second.aiter_lines()
            frame = await anext(lines)
            assert json.loads(frame.removeprefix("data: "))["meta_info"]["id"] == "mine"
            assert live_worker.front.requests.num_open_samples == 2
            refused = await live_worker.http.post(NATIVE, json=body)
            assert refused.status_code == 400
            answer = await live_worker.http.post("/abort_request", json={"rid": "mine"})
            assert answer.json()["num_aborted"] == 2


async def test_requests_of_a_router_have_rids_of_their_own_before_they_are_admitted(worker) -> None:
    body = GenerateBody(text="abc", rid="mine", dispatch={"attempt": 0})
    found = [samples_of(worker.front, body, "mine", read_generate(worker.front, body, "mine")) for _ in range(2)]
    assert [[sample.id for sample in fanout.samples] for fanout in found] == [["mine"], ["mine"]]
    assert found[0].names != found[1].names


@pytest.mark.parametrize("attempt", [0, 1])
async def test_a_request_of_a_router_may_follow_one_with_its_id_that_has_not_ended_here(live_worker, attempt) -> None:
    live_worker.scheduler.hold_after = 1
    body = {"text": "abc", "rid": "mine", "sampling_params": {"max_new_tokens": 9}, "stream": True}
    body["dispatch"] = {"attempt": attempt}
    async with live_worker.http.stream("POST", NATIVE, json=body) as first:
        assert first.status_code == 200
        async with live_worker.http.stream("POST", NATIVE, json=body) as second:
            assert second.status_code == 200
            lines = second.aiter_lines()
            frame = await anext(lines)
            assert json.loads(frame.removeprefix("data: "))["meta_info"]["id"] == "mine"
            batch = {"text": ["abc", "b"], "rid": ["mine", "other"], "sampling_params": {"max_new_tokens": 1}}
            third = await live_worker.http.post(NATIVE, json=batch | {"dispatch": {}})
            assert third.status_code == 200
            assert live_worker.front.requests.num_open_samples == 2


async def test_time_that_passed_before_counts(worker) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 2}, "dispatch": {"attempt": 1, "elapsed": 1000.0}}
    answer = await worker.http.post(NATIVE, json=body)
    assert answer.json()["meta_info"]["e2e_latency"] >= 1000.0


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ([{"index": 1, "token_ids": [1]}], "no sample 1"),
        ([{"index": 0, "token_ids": [258]}], r"must be in \[0, 258\)"),
        ([{"index": 0, "token_ids": [1, 2, 3]}], "all that it may have"),
        ([{"index": 0, "token_ids": [1], "logprobs": [{"token_id": 1, "logprob": -1.0}]}], "1 logprobs of 1 tokens"),
        ([{"token_ids": [1]}], "required field `index`"),
        (7, "Expected `array`"),
    ],
)
async def test_a_past_that_cannot_be_is_refused(worker, told, message) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 3}, "stream": True, "dispatch": {"told": told}}
    response = await worker.http.post(NATIVE, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "dispatch"
    assert re.search(message, error["message"]), error


async def test_without_a_journal_a_stream_has_no_lines(worker) -> None:
    response = await worker.http.post(NATIVE, json={"text": "abc", "stream": True})
    assert JOURNAL_HEADER not in response.headers
    assert b"\n: " not in response.content
