"""The example that causes slow requests: which stage it finds, and the guide that names its cases."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from splitserve.core.timeline import Stage
from splitserve.observe.trace import TraceReport, TraceStage
from support.traces import trace_report

ROOT = Path(__file__).parents[3]
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "why_slow.py"))
CASES = EXAMPLE["CASES"]


def report(*stages: TraceStage, ttft_ms: float = 100.0, prefill: str = "http://a") -> TraceReport:
    workers = {"prefill": prefill, "decode": "http://b"}
    return trace_report("0123456789", ttft_ms=ttft_ms, e2e_ms=500.0, workers=workers, stages=list(stages))


def stage(name: str, where: str, start_ms: float, end_ms: float, exclusive_ms: float = 0.0) -> TraceStage:
    return TraceStage(name, where, "", start_ms, end_ms, exclusive_ms, start_ms < 100)


def test_parts_of_one_stage_are_added_up_before_the_median():
    reports = [
        report(stage("prefill_chunk", "prefill", 0, 10, 10), stage("prefill_chunk", "prefill", 10, 30, 20)),
        report(stage("prefill_chunk", "prefill", 0, 40, 40), stage("waiting", "prefill", 0, 1, 1)),
        report(stage("waiting", "prefill", 0, 90, 90)),
    ]
    found = EXAMPLE["medians"](reports, is_after_first_byte=False)
    assert found == [(("prefill_chunk", "prefill"), 30), (("waiting", "prefill"), 1)]


def test_after_the_first_byte_the_rest_of_each_stage_counts():
    # The first byte was sent after 100 ms.
    stages = (
        stage("waiting", "prefill", 0, 90, 90),
        stage("prebuilt", "decode", 95, 300, 5),
        stage("decode", "decode", 300, 400),
    )
    found = EXAMPLE["medians"]([report(*stages)], is_after_first_byte=True)
    assert found == [(("prebuilt", "decode"), 200), (("decode", "decode"), 100), (("waiting", "prefill"), 0)]


@pytest.mark.parametrize(
    ("name", "prefill_urls", "is_found"),
    [("prefill_chunk", ["http://a"] * 3, True), ("prefill_chunk", ["http://a", "http://c"], False)],
)
def test_a_slow_worker_is_found_if_all_slow_requests_share_it(name, prefill_urls, is_found):
    reports = [report(stage(name, "prefill", 0, 90, 90), prefill=url) for url in prefill_urls]
    assert EXAMPLE["show"](Console(quiet=True), CASES["worker"], reports) is is_found


def test_another_stage_than_expected_is_not_found():
    case = replace(CASES["prefill"], expected=("transfer", "prefill"))
    assert not EXAMPLE["show"](Console(quiet=True), case, [report(stage("waiting", "prefill", 0, 90, 90))])


def test_the_guide_has_the_command_and_the_stage_of_each_case():
    guide = (ROOT / "docs" / "why-slow.md").read_text()
    for name, case in CASES.items():
        assert f"python examples/why_slow.py {name}\n" in guide
        assert f"`{Stage(case.expected[0])}`" in guide
