"""Tests of the record of a request: exclusive times add up, and each moment belongs to the stage that explains it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.timeline import MAX_SPANS, Span, Stage, Timeline
from splitserve.observe.trace import PRECEDENCE, PlacedSpan, exclusive_seconds, stages_of

_SPANS = st.lists(
    st.builds(
        lambda name, where, start, length: PlacedSpan(name, where, "", start / 8, (start + length) / 8, {}),
        st.sampled_from([str(stage) for stage in Stage] + ["stage of another release"]),
        st.sampled_from(["router", "prefill", "decode", "network"]),
        st.integers(-8, 40),
        st.integers(0, 30),
    ),
    max_size=12,
)

PREFILL_ANSWER = ("to_front_end", "detokenize", "response_network")


def span(stage: Stage, start: float, end: float, where: str = "decode") -> PlacedSpan:
    return PlacedSpan(stage, where, "", start, end, {})


def test_every_stage_has_a_precedence():
    assert sorted(PRECEDENCE) == sorted(Stage)


@given(_SPANS, st.integers(0, 40))
def test_exclusive_times_never_exceed_the_limit_or_the_length_of_their_span(spans: list[PlacedSpan], eighths: int):
    limit = eighths / 8
    owned = exclusive_seconds(spans, limit)
    assert all(0 <= own <= max(0.0, s.end - s.start) for own, s in zip(owned, spans, strict=True))
    # Eighths are exact in binary, so the sum is exact too.
    covered = {
        tick
        for tick in range(eighths)
        for s in spans
        if s.name in set(Stage)
        and not (s.where == "prefill" and s.name in ("to_front_end", "detokenize", "response_network"))
        and s.start <= tick / 8
        and (tick + 1) / 8 <= s.end
    }
    assert sum(owned) == len(covered) / 8


@given(_SPANS, st.integers(1, 40))
def test_stages_and_the_unaccounted_time_add_up_to_the_time_to_the_first_byte(spans: list[PlacedSpan], eighths: int):
    stages, unaccounted = stages_of(spans, eighths / 8, end=100.0)
    assert sum(stage.exclusive_ms for stage in stages) + unaccounted == pytest.approx(eighths * 125.0)
    assert unaccounted >= 0
    assert all(stage.before_first_token for stage in stages if stage.exclusive_ms > 0)


def test_work_on_prefill_precedes_the_wait_of_decode_for_it():
    spans = [
        span(Stage.KV_WAIT, 1.0, 6.0),
        span(Stage.WAITING, 1.0, 2.0, "prefill"),
        span(Stage.PREFILL_CHUNK, 2.0, 4.0, "prefill"),
        span(Stage.TRANSFER, 3.0, 5.0, "prefill"),
        span(Stage.DETOKENIZE, 5.0, 9.0, "prefill"),
    ]
    assert exclusive_seconds(spans, 6.0) == [1.0, 1.0, 2.0, 1.0, 0.0]


def test_without_a_first_byte_the_whole_time_is_accounted_for():
    stages, unaccounted = stages_of([span(Stage.ROUTER_QUEUE, 0.0, 3.0, "router")], None, end=4.0)
    assert [stage.exclusive_ms for stage in stages] == [3000.0]
    assert unaccounted == pytest.approx(1000.0)


def test_a_timeline_has_a_span_per_stage_and_one_of_all_decode_steps():
    timeline = Timeline()
    for stage, at in (("received", 0.0), ("handshake", 0.0), ("prealloc", 1.0), ("transfer", 1.5)):
        timeline.enter(stage, at, Stage.KV_WAIT if stage == "transfer" else None)
    timeline.enter("decoding", 4.0)
    timeline.add_decode_step(7, 4.0, 4.5, share=0.5)
    timeline.add_decode_step(8, 4.5, 5.5, share=0.25)
    timeline.enter("finished", 6.0)
    assert [(s.name, s.start, s.end) for s in timeline.spans] == [
        (Stage.HANDSHAKE, 0.0, 1.0),
        (Stage.PREALLOC, 1.0, 1.5),
        (Stage.KV_WAIT, 1.5, 4.0),
        (Stage.DECODE, 4.0, 5.5),
    ]
    assert timeline.spans[-1].attributes == {
        "steps": 2,
        "step_seconds": 1.5,
        "share_seconds": 0.5,
        "first_step": 7,
        "last_step": 8,
    }


def test_a_timeline_is_bounded_and_its_last_span_of_a_stage_extends_to_the_end():
    timeline = Timeline()
    for number in range(MAX_SPANS + 10):
        timeline.add(Span(Stage.PREFILL_CHUNK, number, number + 1.0))
    assert len(timeline.spans) == MAX_SPANS
    assert (timeline.spans[-1].end, timeline.spans[-1].attributes) == (MAX_SPANS + 10.0, {"merged": 11})


def test_the_reason_of_a_wait_belongs_to_the_stage_in_which_it_was_set():
    timeline = Timeline()
    timeline.enter("waiting", 0.0)
    timeline.reason = "kv_pool"
    timeline.enter("running", 1.0)
    timeline.enter("finished", 2.0)
    assert [(s.name, s.attributes) for s in timeline.spans] == [
        (Stage.WAITING, {"reason": "kv_pool"}),
        (Stage.BETWEEN_STEPS, {"reason": "other_steps"}),
    ]
