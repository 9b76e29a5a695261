"""`bench speculation`: the arithmetic of its report, and its prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from splitserve.core.errors import ConfigError
from splitserve.tools.bench.options import SpeculationBenchOptions
from splitserve.tools.bench.speculation import AnswerSet, bench_speculation, speculation_report
from support.tiny_models import make_tiny_model


def test_acceptance_tokens_per_step_and_speed_up() -> None:
    plain = AnswerSet("none", 4.0, [[1, 2, 3, 4], [5, 6, 7, 8]])
    fast = AnswerSet(
        "eagle3", 2.0, [[1, 2, 3, 4], [5, 6, 7, 9]], num_verify_steps=4, num_draft_tokens=10, num_accepted=6
    )
    report = speculation_report(SpeculationBenchOptions(speculative_algorithm="eagle3"), plain, fast)
    without, with_drafts = report.figures["runs"]
    assert (without["acceptance"], without["tokens_per_second"], without["speed_up"]) == (None, 2.0, 1.0)
    assert (with_drafts["acceptance"], with_drafts["tokens_per_step"], with_drafts["speed_up"]) == (0.6, 2.5, 2.0)
    assert (report.figures["same_answers"], report.failed) == (1, True)
    assert report.tables[0].rows[1] == ["eagle3", "4.0", "2.00", "6 of 10", "60.0%", "2.50"]


def test_the_report_has_not_failed_if_all_answers_are_the_same() -> None:
    plain, fast = (
        AnswerSet(name, 1.0, [[1, 2], [3, 4]], num_draft_tokens=i) for i, name in enumerate(("none", "ngram"))
    )
    report = speculation_report(SpeculationBenchOptions(), plain, fast)
    assert (report.failed, len(report.remarks)) == (False, 1)


def test_a_run_without_draft_tokens_is_a_remark() -> None:
    runs = (AnswerSet(name, 1.0, [[1, 2], [3, 4]]) for name in ("none", "ngram"))
    remarks = speculation_report(SpeculationBenchOptions(), *runs).remarks
    assert remarks[-1].startswith("No draft token was proposed, so neither the answers nor the speed-up")


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("short")
    model = str(make_tiny_model("llama", tmp_path / "model"))
    with pytest.raises(ConfigError, match="the text has 5 tokens"):
        bench_speculation(SpeculationBenchOptions(model=model, text=text), Console(quiet=True))
