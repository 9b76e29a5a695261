"""`bench router`: what counts as a right answer, what the figures are, how they are shown. No time is judged."""

from __future__ import annotations

import datetime
import io
import json
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from splitserve.tools.bench import router_messages as messages
from splitserve.tools.bench.router_figures import Round, RouterFigures
from splitserve.tools.bench.router_mock import Pairs
from splitserve.tools.bench.router_report import RouterReport
from splitserve.tools.bench.router_systems import RouterUnavailableError, peer_versions


def made_up(latency_p50: float, latency_p99: float, requests_per_second: float) -> Round:
    return Round(latency_p50, latency_p99, requests_per_second, 0.0005, requests_per_second * 10, 0.00002)


@pytest.fixture
def report() -> RouterReport:
    direct = [made_up(0.001, 0.002, 1000.0), made_up(0.003, 0.004, 900.0), made_up(0.001, 0.002, 1100.0)]
    ours = [made_up(0.002, 0.005, 100.0), made_up(0.006, 0.007, 300.0), made_up(0.004, 0.007, 200.0)]
    figures = [RouterFigures.of("direct", direct, None), RouterFigures.of("splitserve", ours, direct)]
    return RouterReport(
        command="splitserve bench router",
        machine={"CPU": "a"},
        connections=32,
        num_rounds=3,
        peer_versions={"sglang-router": "1.2"},
        figures=figures,
        skipped={"mini_lb": "not installed"},
        wrong=["splitserve: request 7: status 500"],
        cores_taken_by_others=0.5,
    )


def test_added_latency_is_taken_in_each_round_and_the_median_of_rounds_counts(report):
    direct, ours = report.figures
    assert (direct.added_latency_p50, direct.cpu_per_request) == (None, None)
    # Of 1, 3 and 3 ms at p50, of 3, 3 and 5 ms at p99.
    assert ours.added_latency_p50 == pytest.approx(0.003)
    assert ours.added_latency_p99 == pytest.approx(0.003)
    assert (ours.requests_per_second, ours.chunks_per_second) == (200.0, 2000.0)


def test_the_report_shows_figures_what_was_wrong_and_what_is_missing(report):
    assert "| splitserve | 200 | 3.000 | 3.000 | 0.500 | 2,000 | 0.020 |" in report.markdown(datetime.date(2031, 2, 3))
    out = io.StringIO()
    Console(file=out, width=100).print(report.table())
    for told in ("3.000", "WRONG: splitserve: request 7", "mini_lb was not measured: not installed"):
        assert told in out.getvalue()
    assert json.loads(json.dumps(report.to_json()))["figures"][1]["name"] == "splitserve"


def test_an_answer_may_be_written_anew_but_says_the_same():
    answer = messages.whole_answer(7)
    assert messages.is_same(answer, answer)
    assert messages.is_same(json.dumps(json.loads(answer), indent=1).encode(), answer)
    assert not messages.is_same(messages.whole_answer(8), answer)
    assert not messages.is_same(answer[:-1], answer)


def test_a_worker_knows_the_number_of_a_request():
    whole = messages.ASKED.decode(messages.whole_body(12))
    stream = messages.ASKED.decode(messages.stream_body(34, 64))
    assert (whole.number, whole.stream, stream.number, stream.stream, stream.max_tokens) == (12, False, 34, True, 64)
    paired = msgspec.json.decode(messages.stream_body(5, 2)) | {"bootstrap_room": 9, "dispatch": {"journal": True}}
    asked = messages.ASKED.decode(msgspec.json.encode(paired))
    assert (asked.bootstrap_room, asked.wants_journal) == (9, True)


def test_a_half_that_is_missing_or_has_another_room_is_seen():
    assert Pairs(2, 2, 5 ^ 5 ^ 6 ^ 6).all_match
    assert not Pairs(2, 1, 5 ^ 5 ^ 6).all_match
    assert not Pairs(1, 1, 5 ^ 6).all_match


def test_an_interpreter_without_other_routers_says_how_to_get_them(tmp_path):
    with pytest.raises(RouterUnavailableError, match="give --peers-python another"):
        peer_versions(tmp_path / "python")
    python = tmp_path / "isolated"
    # No site packages, so nothing is installed there.
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    with pytest.raises(RouterUnavailableError, match="pip install sglang-router"):
        peer_versions(Path(python))
