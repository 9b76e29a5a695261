"""Scheduler overhead: a tiny run of both loops, and the report's forms on made-up times. No time is judged."""

from __future__ import annotations

import datetime
import io
import json

import pytest
from rich.console import Console

from splitserve.tools.bench.report import Report
from splitserve.tools.bench.scheduler import LOOPS, measure_overhead, overhead_report
from splitserve.tools.bench.series import Series, SeriesPoint


def made_up(name: str, seconds: dict[int, tuple[float, ...]]) -> Series:
    points = [SeriesPoint(size, float(size), times) for size, times in seconds.items()]
    return Series(name, "made up", "running requests", "running request", "µs", points)


@pytest.fixture
def report() -> Report:
    normal = made_up("normal loop", {1: (0.001, 0.002, 0.003), 4: (0.004, 0.005, 0.006)})
    steep = made_up("overlapped loop", {1: (0.001, 0.001, 0.001), 4: (0.1, 0.1, 0.1)})
    return overhead_report([normal, steep])


def test_both_loops_are_measured_at_every_size():
    found = measure_overhead((1, 3), rounds=2, num_steps=3)
    assert [s.name for s in found] == [f"{loop} loop" for loop in LOOPS]
    assert [[(p.size, len(p.times)) for p in s.points] for s in found] == [[(1, 2), (3, 2)]] * 2
    assert all(seconds >= 0 for s in found for p in s.points for seconds in p.times)


def test_the_report_shows_the_least_and_the_median_of_each_loop_side_by_side(report):
    assert "| 4 | 4.000 (5.000) | 100.000 (100.000) |" in report.markdown(datetime.date(2031, 2, 3))
    out = io.StringIO()
    Console(file=out, width=120).print(report)
    assert "4.000 (5.000)" in out.getvalue()


def test_the_report_says_which_loop_grows_faster_than_linearly(report):
    section = report.markdown(datetime.date(2031, 2, 3))
    assert section.startswith("\n## 2031-02-03 · ")
    assert "- normal loop: no faster than its work" in section
    assert "- overlapped loop: GROWS FASTER THAN ITS WORK" in section
    found = json.loads(json.dumps(report.figures))["series"]
    assert [s["grows_faster_than_work"] for s in found] == [False, True]
