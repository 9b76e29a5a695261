"""Tests of the router's traces: bounded rings, clocks of other hosts, joined reports."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest

from splitserve.core.timeline import SampleTrace, Span, Stage, WorkerTrace, clock_name, encode_trace
from splitserve.router.request_trace import (
    CallTrace,
    ClockTable,
    FinishedTrace,
    RequestTrace,
    TraceEntry,
    client_start,
    trace_id_of,
)
from splitserve.router.trace_store import SlowestShare, TraceStore
from support.traces import trace_summary


def finished(
    rid: str,
    *,
    seconds: float = 1.0,
    error: str = "",
    caller: str | None = None,
    at: float = 0.0,
) -> FinishedTrace:
    summary = trace_summary(
        rid=rid,
        error=error,
        started_at=at,
        ttft_ms=seconds * 1e3,
        e2e_ms=seconds * 1e3,
        prompt_tokens=1,
        output_tokens=1,
        num_cached_tokens=0,
    )
    trace = RequestTrace(arrived=at, trace_id="0" * 32, started_at=at)
    ended_at = at + seconds
    return FinishedTrace(ended_at, caller, f"header-{rid}", summary, trace, first_byte_at=ended_at, is_stream=True)


def rids(traces: Sequence[TraceEntry]) -> list[str]:
    return [trace.summary.rid for trace in traces]


@pytest.mark.parametrize("size", [1, 3, 31, 32, 33, 100])
def test_the_latest_traces_are_kept_and_found_by_both_ids(size: int):
    store = TraceStore(size, 1.0)
    # Equal times: none is slow, so the ring alone decides.
    for number in range(1000):
        store.add(finished(f"r{number}"))
    assert {f"r{number}" for number in range(1000 - size, 1000)} <= set(rids(store.traces(limit=10_000)))
    assert store.get("r999") == store.get("header-r999") == finished("r999")
    assert store.get(f"r{999 - size}") is None
    assert store.get(f"header-r{999 - size}") is None


def test_a_trace_that_cannot_be_encoded_changes_no_other():
    store = TraceStore(100, 1.0)
    for rid in ("before", "\ud800", "after"):
        store.add(finished(rid))
    assert sorted(rids(store.traces())) == ["after", "before"]
    # The block is full.
    for number in range(30):
        store.add(finished(f"r{number}"))
    assert {"after", "before"} < set(rids(store.traces()))
    assert len(store.traces()) == 32


def test_failed_and_slow_requests_are_kept_without_sampling():
    store = TraceStore(10, 0.0)
    for number in range(300):
        store.add(finished(f"fast{number}", seconds=1.0 + (number % 100) / 1000))
    store.add(finished("bad", error="engine_error"))
    store.add(finished("slow", seconds=60.0))
    for number in range(50):
        store.add(finished(f"later{number}", seconds=1.0))
    assert rids(store.traces(errors=True)) == ["bad"]
    assert rids(store.traces(slowest=1)) == ["slow"]
    assert store.get("later3") is None


def test_stored_requests_are_reported_once_each_and_at_once():
    store, seen = TraceStore(10, 0.5), []
    store.on_stored = seen.append
    store.add(finished("first", error="engine_error"))
    assert rids(seen) == ["first"]
    store.add(finished("second", error="engine_error"))
    assert rids(seen) == ["first", "second"]
    for number in range(50):
        store.add(finished(f"fast{number}", seconds=0.5))
    # Half of them, and none is slow.
    assert len(seen) == 2 + 25


def test_a_failing_exporter_harms_no_listener():
    store, seen = TraceStore(10, 1.0), []
    store.on_stored = lambda trace: 1 / 0
    store.listeners.append(seen.append)
    store.add(finished("r"))
    assert rids(seen) == rids(store.traces()) == ["r"]


def test_sampling_keeps_every_fourth_of_a_quarter():
    store = TraceStore(1000, 0.25)
    # Decreasing times: only the first ones can be slow.
    for number in range(400):
        store.add(finished(f"r{number}", seconds=400.0 - number))
    assert 100 <= len(store.traces(limit=1000)) <= 104


def test_filters_by_time_and_by_caller():
    store = TraceStore(10, 1.0)
    store.add(finished("old", at=100.0, caller="a"))
    store.add(finished("new", at=200.0, caller="b"))
    assert rids(store.traces(since=150.0)) == ["new"]
    assert rids(store.traces(caller="a")) == ["old"]


def test_a_store_without_size_keeps_nothing_and_calls_its_listeners():
    store, seen = TraceStore(0, 1.0), []
    store.listeners.append(seen.append)
    store.listeners.append(lambda trace: 1 / 0)
    store.add(finished("r", error="x"))
    assert rids(seen) == ["r"]
    assert store.traces() == []


def test_the_slowest_share_is_about_one_percent():
    share, values, slow = SlowestShare(), random.Random(1), 0
    for _ in range(20_000):
        value = values.random()
        share.add(value)
        slow += value > share.bound
    assert 100 <= slow <= 400
    assert 0.95 < share.bound < 1.0
    for _ in range(2000):
        share.add(0.5)
    assert share.bound == 0.5


def test_about_one_percent_of_the_requests_are_kept_as_slow():
    store, values = TraceStore(10_000, 0.0), random.Random(2)
    for number in range(20_000):
        store.add(finished(f"r{number}", seconds=values.random()))
    kept = store.traces(limit=20_000)
    assert 100 <= len(kept) <= 600
    assert sum(trace.summary.e2e_ms > 900.0 for trace in kept) > 0.9 * len(kept)


@pytest.mark.parametrize(("delay_there", "delay_back"), [(0.0, 0.0), (0.010, 0.002), (0.5, 0.5)])
def test_the_offset_of_another_clock_is_known_within_its_error(delay_there: float, delay_back: float):
    offset, table = 1234.5, ClockTable()
    call = CallTrace("http://w", "decode", sent_at=10.0, head_at=10.0 + delay_there + 0.3 + delay_back)
    received = 10.0 + delay_there + offset
    trace = WorkerTrace("decode", "another host", received, 300_000, [])
    estimate, error = table.offset(call, trace)
    assert abs(estimate - offset) <= error + 1e-9
    # A better exchange improves the estimate, a worse one does not.
    better = WorkerTrace("decode", "another host", 20.0 + offset, 0, [])
    assert table.offset(CallTrace("http://w", "decode", 20.0, 20.0), better)[0] == pytest.approx(offset)
    assert table.offset(call, trace)[0] == pytest.approx(offset)


def test_one_host_has_one_clock():
    call = CallTrace("http://w", "decode", sent_at=10.0, head_at=11.0)
    assert ClockTable().offset(call, WorkerTrace("decode", clock_name(), 10.9, 0, [])) == (0.0, 0.0)


def test_a_report_joins_router_and_worker_and_adds_up():
    trace = RequestTrace(arrived=100.0, trace_id="1" * 32)
    trace.parsed_at, trace.admitted_at = 100.001, 100.003
    trace.begin_attempt(100.004)
    first = trace.call("http://p", "prefill", 100.005)
    assert first.report == b""
    # The router gave up the call to the other worker of the pair, which works.
    trace.call("http://healthy", "decode", 100.005).head_at = 100.4
    trace.fail_attempt(100.5, "http://p", "worker_unavailable")
    trace.begin_attempt(100.6)
    call = trace.call("http://d", "null", 100.7)
    call.head_at = 101.5
    spans = [Span(Stage.TOKENIZE, 100.75, 100.8), Span(Stage.PREFILL_CHUNK, 100.9, 101.3, {"tokens": 9})]
    call.report = encode_trace("null", clock_name(), (100.75, 101.4), [(0, spans)])
    summary = finished("r").summary
    store = TraceStore(10, 1.0)
    store.add(FinishedTrace(102.0, None, None, summary, trace, first_byte_at=101.6, is_stream=True))
    stored = store.get("r")
    assert stored is not None
    joined = stored.report(store.clocks)
    exclusive: dict[str, float] = {}
    for stage in joined.stages:
        exclusive[stage.name] = exclusive.get(stage.name, 0.0) + stage.exclusive_ms
    assert exclusive == pytest.approx(
        {
            "router_receive": 1.0,
            "router_queue": 2.0,
            "router_choose": 101.0,
            "router_dispatch": 101.0,
            "failed_attempt": 495.0,
            "request_network": 50.0,
            "tokenize": 50.0,
            "prefill_chunk": 400.0,
            "response_network": 100.0,
            "router_forward": 100.0,
        }
    )
    # Between tokenization and the chunk, and between the chunk and the response, no stage was open.
    assert joined.unaccounted_ms == pytest.approx(200.0)
    assert joined.attempts == 2
    assert [stage.attributes["attempt"] for stage in joined.stages if stage.name == "failed_attempt"] == [1]
    # The worker at fault of the failed attempt sent no report.
    assert joined.silent_workers == ["http://p"]


@pytest.mark.parametrize(("is_refusal", "silent", "kind"), [(True, [], "refusal"), (False, ["http://p"], "failure")])
def test_a_worker_that_refuses_a_request_is_not_silent(is_refusal: bool, silent: list[str], kind: str):
    trace = RequestTrace(arrived=100.0, trace_id="1" * 32)
    trace.begin_attempt(100.0)
    trace.call("http://p", "prefill", 100.1)
    trace.fail_attempt(100.2, "http://p", "prompt_too_long", is_refusal=is_refusal)
    ended = FinishedTrace(100.2, None, None, finished("r").summary, trace, first_byte_at=None, is_stream=False)
    joined = ended.report(ClockTable())
    assert joined.silent_workers == silent
    assert [stage.attributes["kind"] for stage in joined.stages if stage.name == Stage.FAILED_ATTEMPT] == [kind]


def test_a_failure_after_the_first_byte_has_no_part_in_the_time_to_it():
    trace = RequestTrace(arrived=100.0, trace_id="1" * 32)
    trace.parsed_at = trace.admitted_at = 100.0
    trace.begin_attempt(100.001)
    prefill = trace.call("http://p", "prefill", 100.002)
    spans = [Span(Stage.PREFILL_CHUNK, 100.01, 100.03, {"tokens": 9})]
    prefill.report = encode_trace("prefill", clock_name(), (100.005, 100.035), [(0, spans)])
    dead = trace.call("http://dead", "decode", 100.002)
    dead.head_at = 100.04
    trace.fail_attempt(102.7, "http://dead", "worker_unavailable")
    trace.begin_attempt(102.8)
    ended = FinishedTrace(104.0, None, None, finished("r").summary, trace, first_byte_at=100.045, is_stream=True)
    joined = ended.report(ClockTable())
    exclusive: dict[str, float] = {}
    for stage in joined.stages:
        exclusive[stage.name] = exclusive.get(stage.name, 0.0) + stage.exclusive_ms
    assert {name: ms for name, ms in exclusive.items() if ms > 0} == pytest.approx(
        {
            "router_choose": 1.0,
            "router_dispatch": 1.0,
            "request_network": 3.0,
            "prefill_chunk": 20.0,
            # The report of the decode worker was lost with it.
            "unreported": 15.0,
            "router_forward": 5.0,
        }
    )
    assert joined.unaccounted_ms == pytest.approx(0.0)
    stages = {stage.name: stage for stage in joined.stages}
    assert stages["unreported"].attributes == {"attempt": 1, "worker": "http://dead"}
    failed = stages["failed_attempt"]
    assert (failed.start_ms, failed.end_ms) == (pytest.approx(45.0), pytest.approx(2700.0))
    assert joined.silent_workers == ["http://dead"]
    seconds = dict(ended.router_stages())
    assert seconds[Stage.FAILED_ATTEMPT] == pytest.approx(2.655)


def test_without_a_first_byte_the_whole_time_is_accounted_for():
    trace = RequestTrace(arrived=100.0, trace_id="1" * 32)
    trace.parsed_at, trace.admitted_at = 100.0, 103.0
    ended = FinishedTrace(104.0, None, None, finished("r").summary, trace, first_byte_at=None, is_stream=True)
    joined = ended.report(ClockTable())
    assert [stage.exclusive_ms for stage in joined.stages] == [0.0, 3000.0]
    assert joined.unaccounted_ms == pytest.approx(1000.0)


def report_with(row: list[int]) -> bytes:
    return msgspec.json.encode(WorkerTrace("decode", "clock", 50.0, 200_000, [SampleTrace(0, [row])]))


@pytest.mark.parametrize(
    "report",
    [
        b"",
        b"no json",
        # Other releases: seconds of the clock, and another version.
        b'["decode","clock",50.0,50.2,[[0,[["tokenize",50.0,50.1,{}]]]]]',
        b'[3,"decode","clock",50.0,200000,[]]',
        # Rows with an unknown name, with too few entries, and with a name that has no value.
        *(report_with(row) for row in ([999, 0, 1], [0, 0], [0, 0, 1, 0])),
    ],
)
def test_a_worker_whose_report_cannot_be_read_is_silent(report: bytes):
    trace = RequestTrace(arrived=100.0, trace_id="1" * 32)
    trace.begin_attempt(100.0)
    trace.call("http://d", "decode", 100.1).report = report
    ended = FinishedTrace(102.0, None, None, finished("r").summary, trace, first_byte_at=101.0, is_stream=True)
    joined = ended.report(ClockTable())
    assert joined.silent_workers == ["http://d"]
    assert {stage.where for stage in joined.stages} == {"router"}


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, (0.0, "router")),
        ("t=1700000000.25", (1.75, "client")),
        ("1700000000.25", (1.75, "client")),
        # Milliseconds, microseconds and nanoseconds.
        ("t=1700000000250", (1.75, "client")),
        ("1700000000250000", (1.75, "client")),
        ("1700000000250000000", (1.75, "client")),
        # A clock that is 0.5 ms ahead.
        ("t=1700000002.0005", (0.0, "client")),
        ("t=1700000002.01", (0.0, "ignored")),
        ("t=1699999941.9", (0.0, "ignored")),
        ("t=1699999942.1", (59.9, "client")),
        ("", (0.0, "ignored")),
        ("t=-5", (0.0, "ignored")),
        ("t=nan", (0.0, "ignored")),
        ("t=1e400", (0.0, "ignored")),
        ("t=1700000000.25, t=1700000001", (0.0, "ignored")),
    ],
)
def test_the_time_of_sending_in_a_header_is_read_within_bounds(header: str | None, expected: tuple[float, str]):
    seconds, start = client_start(header, 1_700_000_002.0)
    assert (pytest.approx(seconds, abs=1e-6), start) == expected


def test_only_the_time_since_the_arrival_makes_a_request_slow():
    store = TraceStore(10, 0.0)
    for number in range(300):
        store.add(finished(f"r{number}"))
    early = finished("early")
    # The client claims that it sent this one 50 s before it arrived.
    early.summary.ttft_ms = early.summary.e2e_ms = 51_000.0
    early.trace.sent_ago = 50.0
    store.add(early)
    assert store.get("early") is None


def test_trace_ids_of_clients_are_kept_and_malformed_ones_are_replaced():
    given = "4bf92f3577b34da6a3ce929d0e0e4736"
    assert trace_id_of(f"00-{given}-00f067aa0ba902b7-01") == given
    for bad in (None, "", "00-xyz", f"00-{'0' * 32}-00f067aa0ba902b7-01"):
        assert len(trace_id_of(bad)) == 32
        assert trace_id_of(bad) != "0" * 32


def test_the_slowest_are_compared_by_the_time_that_is_asked_for():
    store = TraceStore(10, 1.0)
    late, long = finished("late", seconds=5.0), finished("long", seconds=1.0)
    long.summary.e2e_ms = 9_000.0
    store.add(late)
    store.add(long)
    assert rids(store.traces(slowest=1, by="ttft")) == ["late"]
    assert rids(store.traces(slowest=1, by="output")) == rids(store.traces(slowest=1, by="e2e")) == ["long"]


@pytest.mark.parametrize("order", [("prefill", "decode"), ("decode", "prefill")])
def test_the_answer_of_a_pair_is_forwarded_from_its_decode_worker(order: tuple[str, str]):
    trace = RequestTrace(arrived=100.0, trace_id="1" * 32)
    trace.parsed_at = trace.admitted_at = 100.0
    trace.begin_attempt(100.0)
    calls = {mode: trace.call(f"http://{mode}", mode, 100.1) for mode in order}
    calls["decode"].head_at = 101.0
    summary = finished("r").summary
    ended = FinishedTrace(102.0, None, None, summary, trace, first_byte_at=101.25, is_stream=True)
    [forwarded] = [stage for stage in ended.report(ClockTable()).stages if stage.name == Stage.ROUTER_FORWARD]
    assert (forwarded.start_ms, forwarded.end_ms) == pytest.approx((1000.0, 1250.0))
    assert dict(ended.router_stages())[Stage.ROUTER_FORWARD] == pytest.approx(0.25)
