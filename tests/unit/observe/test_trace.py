"""Tests of the record of a request: exclusive times add up, and each moment belongs to the stage that explains it."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.timeline import MAX_SPANS, Span, Stage, StageReport, Timeline, WorkerTrace, encode_trace
from splitserve.observe.trace import PRECEDENCE, TraceStage, set_exclusive_times

# Multiples of an eighth are exact in binary, so their sums are, too.
_STAGES = st.lists(
    st.builds(
        lambda name, where, start, length: TraceStage(name, where, "", start / 8, (start + length) / 8),
        st.sampled_from([str(stage) for stage in Stage] + ["stage of another release"]),
        st.sampled_from(["router", "prefill", "decode", "network"]),
        st.integers(-8, 40),
        st.integers(0, 30),
    ),
    max_size=12,
)

PREFILL_ANSWER = ("to_front_end", "detokenize", "response_network")


def stage(name: Stage, start_ms: float, end_ms: float, where: str = "decode") -> TraceStage:
    return TraceStage(name, where, "", start_ms, end_ms)


def test_every_stage_has_a_precedence():
    assert sorted(PRECEDENCE) == sorted(Stage)


@given(_STAGES, st.integers(0, 40))
def test_exclusive_times_never_exceed_the_limit_or_the_length_of_their_stage(stages: list[TraceStage], eighths: int):
    unaccounted = set_exclusive_times(stages, eighths / 8)
    assert all(0 <= s.exclusive_ms <= max(0.0, s.end_ms - s.start_ms) for s in stages)
    covered = {
        tick
        for tick in range(eighths)
        for s in stages
        if s.name in set(Stage)
        and not (s.where == "prefill" and s.name in PREFILL_ANSWER)
        and s.start_ms <= tick / 8
        and (tick + 1) / 8 <= s.end_ms
    }
    assert sum(s.exclusive_ms for s in stages) == len(covered) / 8
    assert unaccounted == (eighths - len(covered)) / 8
    assert all(s.before_first_token for s in stages if s.exclusive_ms > 0)


def test_work_on_prefill_precedes_the_wait_of_decode_for_it():
    stages = [
        stage(Stage.KV_WAIT, 1.0, 6.0),
        stage(Stage.WAITING, 1.0, 2.0, "prefill"),
        stage(Stage.PREFILL_CHUNK, 2.0, 4.0, "prefill"),
        stage(Stage.TRANSFER, 3.0, 5.0, "prefill"),
        stage(Stage.DETOKENIZE, 5.0, 9.0, "prefill"),
    ]
    assert set_exclusive_times(stages, 6.0) == 1.0
    assert [s.exclusive_ms for s in stages] == [1.0, 1.0, 2.0, 1.0, 0.0]


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


def test_a_report_is_made_when_spans_were_added_and_at_the_end():
    timeline = Timeline()
    timeline.enter("received", 1.0)
    timeline.enter("waiting", 1.0)
    assert timeline.report(is_last=False) is None
    timeline.enter("running", 2.0)
    timeline.add(Span(Stage.PREFILL_CHUNK, 2.0, 3.0))
    timeline.enter("decoding", 3.0)
    assert timeline.report(is_last=False).seconds == {"received": 0.0, "waiting": 0.0, "running": 1.0, "decoding": 2.0}
    assert timeline.report(is_last=False) is None
    timeline.add_decode_step(7, 3.0, 4.0, share=0.5)
    report = timeline.report(is_last=False)
    timeline.add_decode_step(8, 4.0, 5.0, share=0.5)
    assert timeline.report(is_last=False) is None
    assert timeline.report(is_last=True).spans == timeline.spans
    assert report.seconds.keys() == {"received", "waiting", "running", "decoding"}


def test_the_stages_of_an_ended_sample_are_those_of_its_last_report_and_decode_until_its_end():
    decode = Span(Stage.DECODE, 3.0, 4.0, {"steps": 1, "first_step": 7})
    before = [Span(Stage.WAITING, 1.0, 2.0, {"reason": "kv_pool"}), Span(Stage.PREFILL_CHUNK, 2.0, 3.0)]
    report = StageReport({"received": 1.0, "running": 2.0}, [*before, decode])
    ended = report.ended(9.0)
    assert ended.spans == [*before, Span(Stage.DECODE, 3.0, 9.0, {"first_step": 7})]
    assert ended.seconds == {"received": 0.0, "running": 1.0, "finished": 8.0}
    assert report.spans[-1] == decode
    assert StageReport(report.entered, before).ended(9.0).spans == before


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
        (Stage.BETWEEN_STEPS, {}),
    ]


def test_a_report_has_microseconds_since_the_arrival_and_short_names():
    values = {"reason": "budget", "step": 123456, "gb_s": 0.0020541378, "another": True}
    spans = [
        Span(Stage.TOKENIZE, 2639.317629123, 2639.318602987),
        Span(Stage.TO_SCHEDULER, 2639.3176, 2639.32, values),
    ]
    encoded = encode_trace("decode", "boot id", (2639.317629123, 2639.5), [(3, spans)])
    assert all(name not in encoded for name in (b"tokenize", b"reason", b"gb_s"))
    assert b"another" in encoded
    trace = msgspec.json.decode(encoded, type=WorkerTrace)
    assert (trace.mode, trace.clock) == ("decode", "boot id")
    assert (trace.received_at, trace.response_time) == (2639.317629, 182371)
    [sample] = trace.samples
    assert sample.index == 3
    assert [(span.name, span.start, span.end, span.attributes) for span in sample.spans] == [
        ("tokenize", 0, 974, {}),
        ("to_scheduler", -29, 2371, {"reason": "budget", "step": 123456, "gb_s": 0.002054, "another": True}),
    ]
