"""Tests of `splitserve trace`: what it prints, and which traces its check rejects."""

from __future__ import annotations

import io
import json
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from splitserve.core.errors import OptionError
from splitserve.core.steps import ClockReading, StepPage, StepRecord
from splitserve.core.timeline import Stage
from splitserve.observe.trace import ClockOffset, TraceReport, TraceStage
from splitserve.tools.client import RequestFailedError
from splitserve.tools.options import TraceOptions
from splitserve.tools.trace import print_waterfall, run_trace, write_perfetto
from splitserve.tools.trace_check import CheckedRequest, EventArrivals, check
from support.fake_openai import FakeOpenAI
from support.traces import trace_report


def report(*, unaccounted_ms: float = 0.0, error: str = "", **changes: Any) -> TraceReport:
    usual = {
        "error": error,
        "ttft_ms": 100.0,
        "e2e_ms": 300.0,
        "started_at": 1000.0,
        "prompt_tokens": 12,
        "output_tokens": 5,
        "workers": {"prefill": "http://p", "decode": "http://d"},
        "unaccounted_ms": unaccounted_ms,
        "clocks": [ClockOffset("http://d", 12.0, 0.25)],
        "stages": [
            TraceStage(Stage.ROUTER_QUEUE, "router", "", 0.0, 25.0, 25.0, True),
            TraceStage(Stage.ROUTER_CHOOSE, "router", "", 25.0, 25.01, 0.01, True),
            TraceStage(Stage.WAITING, "prefill", "http://p", 25.0, 40.0, 15.0, True, {"reason": "budget"}),
            TraceStage(Stage.WAITING, "prefill", "http://p", 40.0, 55.0, 15.0, True, {"reason": "budget"}),
            TraceStage(Stage.PREFILL_CHUNK, "prefill", "http://p", 55.0, 100.0, 45.0, True, {"tokens": 12, "step": 7}),
            TraceStage(Stage.TRANSFER, "prefill", "http://p", 90.0, 100.0, 0.0, True, {"gb_s": 0.0020541}),
            TraceStage(Stage.DECODE, "decode", "http://d", 100.0, 300.0, 0.0, False, {"steps": 4}),
            TraceStage(Stage.BETWEEN_STEPS, "decode", "http://d", 100.0, 300.0, 0.0, False),
        ],
    }
    return trace_report("mine", **(usual | changes))


def step(number: int, start_ms: float, end_ms: float, *rids: str) -> StepRecord:
    """Return a step of a worker, the clock of which was 5 s at the start of the request."""
    return StepRecord(
        number=number,
        start=5.0 + start_ms / 1e3,
        end=5.0 + end_ms / 1e3,
        kind="prefill",
        num_requests=len(rids),
        num_decodes=0,
        num_prompt_tokens=8,
        chunk_limit=8,
        num_running=1,
        num_waiting=1,
        rids=list(rids),
    )


def no_steps(worker: str) -> StepPage:
    raise RequestFailedError("the key is a client's")


def printed(
    found: TraceReport | None = None,
    steps: Callable[[str], StepPage] = no_steps,
    *,
    is_whole: bool = False,
    width: int = 200,
) -> list[str]:
    out = io.StringIO()
    print_waterfall(Console(file=out, width=width, highlight=False), found or report(), steps, is_whole=is_whole)
    return out.getvalue().splitlines()


def test_a_waterfall_has_a_bar_for_each_stage_before_the_first_byte():
    rows = {line.split()[0]: line for line in printed() if line}
    assert "first byte 100.0 ms, whole answer 300.0 ms" in " ".join(printed())
    assert rows["router_queue"].count("█") == 10
    assert rows["prefill_chunk"].count("█") == 18
    assert rows["prefill_chunk"].rstrip().endswith("tokens=12 step=7")
    # Its steps follow one another, so there is no wait to explain.
    assert "reason" not in rows["between_steps"]
    assert rows["decode"].count("█") == 0
    assert "offset 12.00 ms, known to 0.25 ms" in " ".join(printed())


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_narrow_terminal_has_all_figures_and_details(width: int):
    reason = {"tokens": 15, "batch_tokens": 2048, "step": 123456}
    steps = {"steps": 4, "step_seconds": 0.1934, "share_seconds": 0.1934, "first_step": 123456, "last_step": 123459}
    stages = [
        TraceStage(Stage.RESPONSE_NETWORK, "network", "http://127.0.0.1:41234", 0.0, 175404.1, 3399.25, True),
        TraceStage(Stage.PREFILL_CHUNK, "prefill", "http://p", 10.25, 175404.1, 123456.75, True, reason),
        TraceStage(Stage.DECODE, "decode", "http://d", 175404.1, 175500.1, 0.0, False, steps),
    ]
    lines = printed(report(ttft_ms=175404.1, e2e_ms=175500.1, stages=stages), width=width)
    assert not any("…" in line or len(line) > width for line in lines)
    titles = next(line for line in lines if line.startswith("stage"))
    assert titles.split(" up")[0].split() == ["stage", "where", "start", "ms", "length", "ms", "exclusive", "ms"]
    [chunk] = [line for line in lines if line.startswith("prefill_chunk")]
    assert chunk.split()[2:5] == ["10.25", "175393.85", "123456.75"]
    assert chunk.count("█") >= 19
    words = " ".join(lines).split()
    for values in (reason, steps, {"worker": "http://127.0.0.1:41234"}):
        assert {f"{name}={value}" for name, value in values.items()} <= set(words)


def test_the_stage_with_the_largest_exclusive_time_is_bold():
    out = io.StringIO()
    print_waterfall(
        Console(file=out, width=80, force_terminal=True, color_system="standard", highlight=False), report(), no_steps
    )
    bold = [line.split()[0] for line in out.getvalue().splitlines() if line.startswith("\x1b[1m")]
    assert bold == ["\x1b[1mrequest", "\x1b[1mprefill_chunk\x1b[0m"]


def test_the_longest_stages_before_the_first_byte_are_named():
    line = next(line for line in printed() if line.startswith("longest"))
    assert line == (
        "longest: prefill_chunk on prefill 45.0 ms (45 %), waiting on prefill 30.0 ms (30 %), reason budget, "
        "router_queue on router 25.0 ms (25 %)"
    )


def test_the_longest_pauses_after_the_first_byte_are_named():
    assert not any(line.startswith("pauses") for line in printed())
    migration = [
        TraceStage(Stage.ROUTER_CHOOSE, "router", "", 150.0, 220.0, 0.0, False, {"reason": "no_worker"}),
        TraceStage(Stage.PREFILL_CHUNK, "prefill", "http://p", 222.0, 262.0, 0.0, False, {"tokens": 12, "step": 9}),
        TraceStage(Stage.WAITING, "prefill", "http://p", 220.0, 222.0, 0.0, False, {"reason": "budget"}),
    ]
    lines = printed(report(migrations=1, stages=[*report().stages, *migration]))
    (line,) = [line for line in lines if line.startswith("pauses")]
    assert line == (
        "pauses after the first byte: router_choose on router 70.0 ms, reason no_worker, "
        "prefill_chunk on prefill 40.0 ms"
    )


def test_the_requests_in_the_steps_of_a_wait_are_named():
    # The chunk of this request is step 7, at 55 ms.
    steps = [
        step(2, 0.0, 24.0, "earlier"),
        step(3, 20.0, 35.0, "a", "b~1"),
        step(4, 35.0, 40.0, "a", "b~1", "c"),
        step(5, 40.0, 45.0, "a", "b~1", "mine-2~3"),
        step(6, 45.0, 54.0, "b", "d-1", "c"),
        step(7, 55.0, 100.0, "mine", "later"),
    ]
    asked = []

    def read(worker: str) -> StepPage:
        asked.append(worker)
        # Far from the clock of the router.
        return StepPage(ClockReading(5.0, 7777.0), steps)

    named = [line for line in printed(steps=read) if line.startswith("in the steps")]
    assert named == ["in the steps during waiting on prefill: b, a, c and 1 more"]
    assert asked == ["http://p"]
    assert not any(line.startswith("in the steps") for line in printed(steps=no_steps))


def test_a_wait_between_steps_has_its_reason():
    stages = [
        TraceStage(Stage.BETWEEN_STEPS, "null", "http://p", 0.0, 300.0, 20.0, True),
        TraceStage(Stage.PREFILL_CHUNK, "null", "http://p", 20.0, 100.0, 80.0, True, {"tokens": 9, "step": 7}),
    ]
    lines = printed(report(stages=stages))
    assert next(line for line in lines if line.startswith("between_steps")).rstrip().endswith(" reason=other_steps")
    assert "between_steps on null 20.0 ms (20 %), reason other_steps" in " ".join(lines)


def test_a_lone_request_does_not_wait_between_its_steps():
    stages = [TraceStage(Stage.BETWEEN_STEPS, "null", "http://p", 0.0, 175404.0, 1.8, True)]
    assert "other_steps" not in " ".join(printed(report(stages=stages)))


def test_the_requests_that_share_the_steps_of_a_prompt_are_named():
    chunks = [
        TraceStage(Stage.PREFILL_CHUNK, "prefill", "http://p", start, start + 50.0, 50.0, True, values)
        for start, values in (
            (0.0, {"tokens": 5, "batch_tokens": 2048, "step": 7}),
            (50.0, {"tokens": 10, "batch_tokens": 2048, "step": 8}),
        )
    ]
    steps = [
        step(6, 0.0, 1.0, "earlier"),
        step(7, 0.0, 50.0, "mine", "long~1"),
        step(8, 50.0, 100.0, "mine", "long~1", "short"),
    ]
    lines = printed(report(stages=chunks), steps=lambda worker: StepPage(ClockReading(5.0, 7777.0), steps))
    assert "longest: prefill_chunk on prefill 100.0 ms (100 %), 15 of the 4,096 tokens of its steps" in lines
    assert "in the steps during prefill_chunk on prefill: long, short" in lines


def test_a_prompt_alone_in_its_steps_has_no_neighbours():
    values = {"tokens": 12, "batch_tokens": 12, "step": 7}
    stages = [TraceStage(Stage.PREFILL_CHUNK, "prefill", "http://p", 0.0, 100.0, 100.0, True, values)]
    asked = []
    lines = printed(report(stages=stages), steps=lambda worker: asked.append(worker) or no_steps(worker))
    assert "longest: prefill_chunk on prefill 100.0 ms (100 %)" in lines
    assert asked == []


def test_steps_of_another_scheduler_name_no_request():
    page = StepPage(ClockReading(5.0, 1000.0), [step(7, 25.0, 40.0, "other")])
    assert not any(line.startswith("in the steps") for line in printed(steps=lambda worker: page))


def test_a_request_that_was_in_no_step_is_compared_by_the_clocks():
    stages = [TraceStage(Stage.WAITING, "prefill", "http://p", 10.0, 100.0, 90.0, True)]
    waiting = report(ttft_ms=None, e2e_ms=100.0, stages=stages)
    page = StepPage(ClockReading(5.0, 1000.0), [step(1, 0.0, 9.0, "earlier"), step(2, 9.0, 40.0, "a~b~2")])
    lines = printed(waiting, steps=lambda worker: page)
    assert "in the steps during waiting on prefill: a~b" in lines


def test_a_failed_request_is_printed_with_the_error_of_its_client():
    lines = printed(report(error="engine_error", error_message="the engine failed [red]: try again"))
    assert lines[0].endswith(" engine_error")
    assert lines[1] == "error: the engine failed [red]: try again"


def test_a_detail_has_the_name_and_the_unit_of_the_docs():
    rows = {line.split()[0]: line for line in printed() if line}
    assert rows["transfer"].rstrip().endswith(" gb_s=0.002054")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"rid": "http://h:1"}, "RID http://h:1 is a URL: give it by --url"),
        ({"rid": "r", "slowest": 3}, "--slowest selects among all finished requests: leave it out, or RID r"),
        ({"rid": "r", "errors": True}, "--errors selects among all"),
        ({"rid": "r", "limit": 2}, "--limit selects among all"),
        ({"slowest": 3, "limit": 2}, "--limit does not go together with --slowest"),
        ({"check": True, "rid": "r"}, "--check sends requests of its own: leave out RID"),
        ({"check": True, "since": 5.0}, "--check sends requests of its own: leave out --since"),
        ({"check": True, "as_json": True}, "--json does not go together with --check, which prints text"),
        ({"check": True, "perfetto": Path("f")}, "--perfetto does not go together with --check"),
        ({"as_json": True, "perfetto": Path("f")}, "--perfetto does not go together with --json"),
    ],
)
def test_an_option_that_another_one_makes_ineffective_is_rejected(options: dict[str, Any], problem: str):
    with pytest.raises(OptionError) as error:
        run_trace(TraceOptions(**options))
    assert error.value.message.startswith(problem)
    assert error.value.exit_code == 2


def test_json_has_the_ids_as_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    # Rich would print an emoji.
    monkeypatch.setattr("splitserve.tools.trace.read_reports", lambda *_: [trace_report("job:100:id:a")])
    assert run_trace(TraceOptions(as_json=True)) == 0
    assert json.loads(capsys.readouterr().out)[0]["rid"] == "job:100:id:a"


def test_a_router_that_does_not_answer_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("splitserve.tools.trace._ANSWER_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        url = f"http://127.0.0.1:{stopped.getsockname()[1]}"
        with pytest.raises(RequestFailedError, match="check whether the server is stopped or overloaded"):
            run_trace(TraceOptions(url=url, slowest=2))


def test_short_stages_are_printed_on_request():
    assert not any(line.startswith("router_choose") for line in printed())
    assert any(line.startswith("router_choose") for line in printed(is_whole=True))


async def test_a_check_of_many_requests_shows_how_far_it_is(capsys):
    async with FakeOpenAI().serving() as url:
        assert len(await check(url, 201, 4)) == 201
    assert capsys.readouterr() == ("", "".join(f"request {number} of 201\n" for number in (1, 101, 201)))


@pytest.mark.parametrize(
    ("ttft_ms", "unaccounted_ms", "problem"),
    [
        (100.0, 0.0, ""),
        (101.9, 0.0, ""),
        (98.1, 1.9, ""),
        (103.0, 0.0, "took 103.0 ms to its first token, its stages 100.0 ms"),
        (95.0, 0.0, "took 95.0 ms"),
        (100.0, 2.5, "has 2.5 ms unaccounted"),
    ],
)
def test_a_trace_adds_up_within_2_ms_or_2_percent(ttft_ms: float, unaccounted_ms: float, problem: str):
    checked = CheckedRequest("mine", ttft_ms=ttft_ms, report=report(unaccounted_ms=unaccounted_ms))
    assert checked.problem().startswith(problem)
    assert bool(checked.problem()) == bool(problem)


def test_a_late_read_bounds_the_stages_from_above_only():
    assert CheckedRequest("mine", ttft_ms=150.0, is_late=True, report=report()).problem() == ""
    assert CheckedRequest("mine", ttft_ms=95.0, is_late=True, report=report()).problem() != ""


def test_a_missing_trace_and_an_unknown_failure_are_problems():
    assert CheckedRequest("mine", ttft_ms=1.0).problem() == "has no trace"
    failed = CheckedRequest("mine", failure="503", report=report())
    assert "its trace has no error" in failed.problem()
    assert CheckedRequest("mine", failure="503", report=report(error="engine_error")).problem() == ""


def wait_for_arrival_times(arrivals: EventArrivals, server: socket.socket, client: socket.socket):
    """Wait until the kernel records them: it starts some time after the first socket has asked for them."""
    deadline = time.monotonic() + 60
    while arrivals.first_event_at is None:
        assert time.monotonic() < deadline, "the kernel records no arrival times"
        server.sendall(b"data: {}\n\n")
        client.recv(1000)
    arrivals.reset()


def test_an_event_arrives_when_the_kernel_gets_it_and_not_when_it_is_read():
    arrivals = EventArrivals()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with arrivals.open_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", address)) as client:
            client.connect(address)
            server, _ = listener.accept()
            with server:
                wait_for_arrival_times(arrivals, server, client)
                server.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                head = client.recv(1000)
                # The head of the answer is no event.
                assert arrivals.first_event_at is None
                before = time.time()
                server.sendall(b"data: {}\n\n")
                select.select([client], [], [])
                arrived = time.time()
                # A later event, read later, changes nothing.
                events = client.recv(1000)
                server.sendall(b"data: {}\n\n")
                assert (head[-4:], events, client.recv(1000)) == (b"\r\n\r\n", b"data: {}\n\n", events)
                assert arrivals.first_event_at is not None
                assert before - 1e-5 <= arrivals.first_event_at <= arrived
                assert not arrivals.is_late
                # Two events in one read.
                arrivals.reset()
                server.sendall(2 * b"data: {}\n\n")
                client.recv(1000)
                assert arrivals.is_late


@pytest.mark.parametrize(("count", "counted"), [(0, "0 requests"), (1, "1 request"), (2, "2 requests")])
def test_a_perfetto_file_is_named_with_the_number_of_its_requests(tmp_path: Path, count: int, counted: str) -> None:
    out = io.StringIO()
    path = tmp_path / "trace"
    write_perfetto(Console(file=out, width=500), "http://r", [report(stages=[])] * count, path)
    assert out.getvalue().startswith(f"wrote {counted} to {path}: ")
