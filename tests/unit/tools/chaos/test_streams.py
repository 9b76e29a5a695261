"""Equality of streams, and the report of a chaos run about a stream."""

import asyncio
import copy
import itertools
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
        (lambda o: o.choices[0].logprobs.__setitem__(1, -1.1), "logprobs[1]"),
        (lambda o: setattr(o, "usage", (4, 4)), "usage"),
        (lambda o: setattr(o, "is_done", False), "no end"),
        (lambda o: setattr(o, "error", {"message": "lost"}), "lost"),
        (lambda o: o.choices.clear(), "choice 0"),
        (lambda o: o.choices[1].token_ids.append(3), "choice 1"),
    ],
)
def test_whatever_differs_is_named(spoil, problem):
    spoilt = copy.deepcopy(EXPECTED)
    spoil(spoilt)
    assert problem in spoilt.difference(EXPECTED)


def test_a_native_stream_must_not_take_back_tokens():
    def native(ids):
        meta = {"finish_reason": None, "prompt_tokens": 4, "completion_tokens": len(ids)}
        return {"text": "", "output_ids": ids, "meta_info": meta}

    found = outcome(native([1]), native([1, 2]))
    assert (found.choices[0].token_ids, found.usage) == ([1, 2], (4, 2))
    with pytest.raises(ValueError, match="became"):
        found.take(native([1, 3, 4]))


def wide_native(ids, states):
    tops = [[[-0.5 - n, 7 + n, None] for n in range(3)] for _ in ids]
    logprobs = [[-0.5, token_id, None] for token_id in ids]
    meta = {"output_token_logprobs": logprobs, "output_top_logprobs": tops, "hidden_states": states}
    return {"text": "", "output_ids": ids, "meta_info": {"finish_reason": None, **meta}}


def test_native_events_repeat_logprobs_and_have_each_hidden_state_once():
    choice = outcome(wide_native([7], [[1.0, 2.0]]), wide_native([7, 7], [[3.0, 4.0]])).choices[0]
    assert choice.hidden_states == [[1.0, 2.0], [3.0, 4.0]]
    assert choice.top_logprobs == [{7: -0.5, 8: -1.5, 9: -2.5}] * 2


def test_chat_events_have_new_logprobs():
    entry = {"token": "a", "logprob": -0.5, "top_logprobs": [{"token": "a", "logprob": -0.5}]}
    found = outcome(*[event(delta={"content": "a"}, logprobs={"content": [entry]})] * 2).choices[0]
    assert found.logprobs == [-0.5, -0.5]
    assert found.top_logprobs == [{"a": -0.5}] * 2


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda c: c.hidden_states.pop(), "1 hidden_states"),
        (lambda c: c.hidden_states[1].__setitem__(0, 300.5), "hidden_states[1]"),
        (lambda c: c.hidden_states[1].pop(), "hidden_states[1]"),
        (lambda c: c.top_logprobs[0].pop(9), "top_logprobs[0]"),
        (lambda c: c.top_logprobs[0].update({8: -2.5, 9: -1.5}), "top_logprobs[0]"),
    ],
)
def test_other_states_and_alternatives_differ_within_any_tolerance(spoil, problem):
    expected = outcome(wide_native([7], [[1.0, 2.0]]), wide_native([7, 7], [[300.0, 4.0]]))
    spoilt = copy.deepcopy(expected)
    spoil(spoilt.choices[0])
    assert problem in spoilt.difference(expected)
    assert problem in spoilt.difference(expected, 0.0)


def test_rounding_differs_only_without_tolerance():
    expected = outcome(wide_native([7], [[300.0, 2.0]]))
    rounded = copy.deepcopy(expected)
    rounded.choices[0].hidden_states[0][1] += 0.2
    assert rounded.difference(expected) == ""
    assert "hidden_states[0]" in rounded.difference(expected, 0.0)
    # The last alternative is another one with nearly the same logprob.
    other = copy.deepcopy(expected)
    other.choices[0].top_logprobs[0] = {7: -0.5, 8: -1.5, 10: -2.5001}
    assert other.difference(expected) == ""
    assert "top_logprobs[0]" in other.difference(expected, 0.0)


def test_wide_requests_have_all_forms_with_states_with_many_alternatives_and_with_both():
    bodies = [(r.path, r.body) for r in make_requests(30, 24, wide=True)]

    def is_many(body):
        return 128 in (body.get("top_logprobs_num"), body.get("top_logprobs"), body.get("logprobs"))

    kinds = {(path, is_many(body), "return_hidden_states" in body) for path, body in bodies}
    paths = {path for path, _ in bodies}
    assert kinds == set(itertools.product(paths, (False, True), (False, True)))


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


async def test_an_event_after_the_end_is_an_error():
    async with start_worker(streams(b"data: [DONE]\n\n", b"data: [DONE]\n\n")) as worker:
        with pytest.raises(RequestFailedError, match="after the end"):
            await asyncio.to_thread(follow_undisturbed, worker.url, make_requests(1, 2), timeout=30.0)


def test_a_run_has_failed_with_errors_differences_leaks_or_no_answer():
    def report(tally, leaks=()):
        return chaos_report(10.0, 1, tally, {"migration": 2, "retry": 3}, leaks)

    tally = Tally()
    assert report(tally).failed
    tally.judge("request 1", EXPECTED, EXPECTED)
    assert report(tally).failed, "there was no fault"
    tally.faults["decode killed mid-chunk"] += 1
    assert not report(tally).failed
    assert report(tally).figures["faults"] == {"decode killed mid-chunk": 1}
    assert ("- decode killed mid-chunk", "1") in report(tally).tables[0].rows
    tally.counters["num_retracted_resumed_whole_total"] += 7
    assert report(tally).figures["num_retracted_resumed_whole_total"] == 7
    assert ("- resumed without recomputation", "7") in report(tally).tables[0].rows
    assert report(tally, ["worker keeps a page"]).failed
    tally.judge("request 2", outcome({"error": {"message": "lost"}}), EXPECTED)
    tally.judge("request 3", outcome(EVENTS[0]), EXPECTED)
    assert report(tally).failed
    found = report(tally).figures
    assert (found["requests"], found["equal"]) == (3, 1)
    assert found["errors"] == ["request 2: lost"]
    assert found["differences"][0].startswith("request 3: usage")
