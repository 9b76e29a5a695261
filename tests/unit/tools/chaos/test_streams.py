"""Equality of streams, and the report of a chaos run about a stream."""

import asyncio
import copy
import json

import pytest

from splitserve.tools.chaos.run import chaos_report
from splitserve.tools.chaos.streams import (
    StreamOutcome,
    StreamRequest,
    Tally,
    follow_undisturbed,
    make_requests,
)
from splitserve.tools.client import RequestFailedError
from support.router_world import answers, start_worker, streams
from support.streams import follow_all


def event(**choice):
    return {"choices": [{"index": 0, "finish_reason": None, **choice}]}


def outcome(*events, is_done=True):
    found = StreamOutcome(is_done=is_done)
    for data in events:
        found.take(data)
    return found


EVENTS = (
    event(text="a", token_ids=[1], logprobs={"token_logprobs": [-0.5]}),
    event(text="bc", token_ids=[2, 3], logprobs={"token_logprobs": [-1.0, -2.0]}, finish_reason="length"),
    {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}},
)
EXPECTED = outcome(*EVENTS)


def test_the_same_stream_in_other_pieces_is_equal():
    other = outcome(
        event(text="", token_ids=[]),
        event(text="ab", token_ids=[1, 2], logprobs={"token_logprobs": [-0.5, -1.0000001]}),
        event(text="c", token_ids=[3], logprobs={"token_logprobs": [-2.0]}, finish_reason="length"),
        EVENTS[2],
    )
    assert other.difference(EXPECTED) == ""


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda o: o.choices[0].token_ids.append(3), "token_ids"),
        (lambda o: o.choices[0].token_ids.pop(), "token_ids"),
        (lambda o: setattr(o.choices[0], "text", "abcc"), "text"),
        (lambda o: setattr(o.choices[0], "finish", "stop"), "finish"),
        (lambda o: o.choices[0].logprobs.pop(), "2 logprobs"),
        (lambda o: o.choices[0].logprobs.__setitem__(1, -1.1), "logprob 1"),
        (lambda o: setattr(o, "usage", (4, 4)), "usage"),
        (lambda o: setattr(o, "is_done", False), "no end"),
        (lambda o: setattr(o, "error", {"message": "lost"}), "lost"),
        (lambda o: o.choices.clear(), "choice 0"),
    ],
)
def test_whatever_differs_is_named(spoil, problem):
    spoilt = copy.deepcopy(EXPECTED)
    spoil(spoilt)
    assert problem in spoilt.difference(EXPECTED)


def test_a_native_stream_must_not_take_back_tokens():
    def native(ids):
        return {"text": "", "output_ids": ids, "meta_info": {"finish_reason": None}}

    found = outcome(native([1]), native([1, 2]))
    assert found.choices[0].token_ids == [1, 2]
    with pytest.raises(ValueError, match="became"):
        found.take(native([1, 3, 4]))


def test_requests_differ_and_are_the_same_each_time():
    requests = make_requests(30, 24)
    assert requests == make_requests(30, 24)
    assert len({json.dumps(r.body) for r in requests}) == 30
    assert {r.path for r in requests} == {"/generate", "/v1/completions", "/v1/chat/completions"}
    assert all(r.body["stream"] for r in requests)


def stream_of(*events):
    return streams(*(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events), b"data: [DONE]\n\n")


async def test_streams_are_followed_to_their_ends_and_disturbed_once():
    calls = []
    async with (
        start_worker(stream_of(*EVENTS)) as good,
        start_worker(answers({"error": {"message": "no"}}, 503)) as bad,
    ):
        requests = [StreamRequest("/v1/completions", {})] * 3
        found = await asyncio.to_thread(
            follow_all, good.url, requests, timeout=30.0, disturb=lambda: calls.append(1), after=2
        )
        assert [o.difference(EXPECTED) for o in found.values()] == [""] * 3
        assert calls == [1]
        refused = await asyncio.to_thread(follow_all, bad.url, requests, timeout=30.0)
        assert [o.error for o in refused.values()] == [{"message": "no"}] * 3
        undisturbed = await asyncio.to_thread(follow_undisturbed, good.url, requests, timeout=30.0)
        assert [o.difference(EXPECTED) for o in undisturbed.values()] == [""] * 3
        with pytest.raises(RequestFailedError, match="nothing disturbed"):
            await asyncio.to_thread(follow_undisturbed, bad.url, requests, timeout=30.0)
        with pytest.raises(ValueError, match="no moment"):
            await asyncio.to_thread(follow_all, good.url, requests, timeout=30.0, disturb=lambda: None, after=9)


def test_a_run_has_failed_with_errors_differences_leaks_or_no_answer():
    def report(tally, leaks=()):
        return chaos_report(10.0, 1, tally, {"migration": 2, "retry": 3}, leaks)

    tally = Tally()
    assert report(tally).failed
    tally.judge("request 1", EXPECTED, EXPECTED)
    tally.faults["decode killed mid-chunk"] += 1
    assert not report(tally).failed
    assert report(tally).figures["faults"] == {"decode killed mid-chunk": 1}
    assert ("- decode killed mid-chunk", "1") in report(tally).tables[0].rows
    assert report(tally, ["worker keeps a page"]).failed
    tally.judge("request 2", outcome({"error": {"message": "lost"}}), EXPECTED)
    tally.judge("request 3", outcome(EVENTS[0]), EXPECTED)
    assert report(tally).failed
    found = report(tally).figures
    assert (found["requests"], found["equal"]) == (3, 1)
    assert found["errors"] == ["request 2: lost"]
    assert found["differences"][0].startswith("request 3: usage")
