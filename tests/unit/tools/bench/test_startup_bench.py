"""Start-up to first token: the report's forms, and one real start of each kind with a tiny model."""

from __future__ import annotations

import datetime
import io

import pytest
from rich.console import Console

from splitserve.core.errors import ClusterError, ConfigError
from splitserve.tools.bench.options import StartupBenchOptions
from splitserve.tools.bench.report import run_bench
from splitserve.tools.bench.startup import StartupTiming, bench_startup, measure_starts, startup_report
from support.tiny_models import make_tiny_model


def test_the_section_has_a_row_a_kind_with_median_and_range():
    warm = [StartupTiming(2.0, 2.5, 10**9), StartupTiming(4.0, 5.5, 10**9), StartupTiming(3.0, 3.5, 10**9)]
    starts = {
        "cold": [StartupTiming(9.0, 9.5, 2 * 10**9)],
        "warm": warm,
        "up": [StartupTiming(5.0, 6.0, 11 * 10**8)],
    }
    report = startup_report(StartupBenchOptions(model="m"), starts)
    section = report.markdown(datetime.date(2031, 2, 3))
    assert section.startswith("\n## 2031-02-03 · Start-up to first token: m in bfloat16")
    assert "| cold | 1 | 9.0 (9.0-9.0) | 9.5 (9.5-9.5) | 2,000 | 2.00 |" in section
    assert "| warm | 3 | 3.0 (2.0-4.0) | 3.5 (2.5-5.5) | 1,000 | 1.00 |" in section
    assert "| up | 1 | 5.0 (5.0-5.0) | 6.0 (6.0-6.0) | 1,100 | 1.10 |" in section
    assert report.figures["up"] == [{"ready": 5.0, "first_token": 6.0, "memory": 1_100_000_000}]


def test_a_page_without_the_section_is_refused_before_anything_starts(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("no marks")
    with pytest.raises(ConfigError, match="bench startup"):
        run_bench(StartupBenchOptions(model="/no/such/model", page=page), bench_startup)


def test_no_runs_at_all_are_refused():
    with pytest.raises(ConfigError, match="--cold-runs 0 --warm-runs 0 starts nothing"):
        run_bench(StartupBenchOptions(model="/no/such/model", cold_runs=0, warm_runs=0), bench_startup)


def measure(model, cold_runs=1, warm_runs=0):
    options = StartupBenchOptions(model=model, dtype="float32", threads=1, cold_runs=cold_runs, warm_runs=warm_runs)
    return measure_starts(options, Console(file=io.StringIO()))


@pytest.mark.process
@pytest.mark.soak
def test_a_cold_start_brings_a_token_and_leaves_the_users_caches_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSERVE_CACHE", str(tmp_path / "mine"))
    model = make_tiny_model("llama", tmp_path / "llama")
    starts = measure(str(model))
    [start] = starts["cold"]
    assert 0 < start.ready < start.first_token
    assert start.memory > 0
    assert starts["warm"] == starts["up"] == []
    assert not (tmp_path / "mine").exists()


@pytest.mark.soak
@pytest.mark.process
def test_a_pair_has_figures_beside_one_worker(tmp_path):
    starts = measure(str(make_tiny_model("llama", tmp_path / "llama")), cold_runs=0, warm_runs=1)
    [one], [pair] = starts["warm"], starts["up"]
    assert 0 < pair.ready < pair.first_token
    assert one.memory < pair.memory < 2 * one.memory


@pytest.mark.process
def test_a_worker_that_cannot_start_is_an_error_with_the_end_of_its_log():
    with pytest.raises(ClusterError, match="There is no folder"):
        measure("/no/such/model")
