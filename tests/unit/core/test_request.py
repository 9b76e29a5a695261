import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.messages import GenerateRequest, decode_to_scheduler, encode
from splitserve.core.request import FinishType, Request, RoomKey, Timeline
from splitserve.core.sampling import ResolvedSampling


@given(st.lists(st.integers(0, 9), max_size=8), st.lists(st.integers(0, 9), max_size=8), st.data())
def test_tokens_are_those_of_prompt_and_output_in_a_row(prompt, output, data):
    request = Request("r", prompt, ResolvedSampling(), output_ids=output)
    start = data.draw(st.integers(0, request.num_tokens))
    end = data.draw(st.integers(start, request.num_tokens))
    assert request.tokens(start, end) == (prompt + output)[start:end]


@pytest.mark.parametrize(
    ("params", "tokens", "kind", "matched"),
    [
        (ResolvedSampling(max_new_tokens=3), [5, 6, 7], FinishType.LENGTH, None),
        (ResolvedSampling(max_new_tokens=9), [5, 2], FinishType.STOP, 2),
        (ResolvedSampling(max_new_tokens=2, ignore_eos=True), [2, 2], FinishType.LENGTH, None),
        (ResolvedSampling(max_new_tokens=9, stop_token_ids=(7,)), [5, 7], FinishType.STOP, 7),
        (ResolvedSampling(max_new_tokens=9, min_new_tokens=3), [2, 2, 2], FinishType.STOP, 2),
        (ResolvedSampling(max_new_tokens=2), [5, 2], FinishType.STOP, 2),
    ],
)
def test_a_request_ends_at_the_token_its_parameters_say(params, tokens, kind, matched):
    request = Request("r", [1], params, eos_token_ids=frozenset({2}))
    for token in tokens[:-1]:
        request.append(token, None)
        assert not request.is_finished
    request.append(tokens[-1], None)
    assert (request.finish.type, request.finish.matched) == (kind, matched)


def test_a_timeline_keeps_the_first_entry_of_a_stage():
    timeline = Timeline()
    for stage, at in [("received", 10.0), ("waiting", 10.5), ("waiting", 11.0), ("running", 12.0)]:
        timeline.enter(stage, at)
    assert timeline.report(is_last=True).seconds == {"received": 0.0, "waiting": 0.5, "running": 2.0}
    assert timeline.stage == "running"


@given(
    st.lists(st.integers(0, 2**31), max_size=5),
    st.integers(0, 2**64 - 1),
    st.dictionaries(st.integers(0, 100), st.floats(-100, 100), max_size=3),
)
def test_a_request_survives_the_wire(prompt, seed, bias):
    message = GenerateRequest(
        rid="r", prompt_ids=prompt, params=ResolvedSampling(seed=seed, logit_bias=bias, stop=("a", "b"))
    )
    assert decode_to_scheduler(encode(message)) == message


def test_rooms_differ_by_sample():
    assert RoomKey(5, 0) != RoomKey(5, 1)
    assert str(RoomKey(5, 1)) == "5/1"
