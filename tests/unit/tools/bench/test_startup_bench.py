"""Start-up to first token: the report's forms, and one real start of each kind with a tiny model."""

from __future__ import annotations

import datetime
import io

import pytest
from rich.console import Console

from splitserve.core.errors import ClusterError, ConfigError
from splitserve.tools.bench.report import run_bench
from splitserve.tools.bench.startup import StartupTiming, bench_startup, measure_starts, startup_report
from splitserve.tools.options import StartupBenchOptions
from support.tiny_models import make_tiny_model


def test_the_section_has_a_row_a_kind_with_median_and_range():
    warm = [StartupTiming(2.0, 2.5), StartupTiming(4.0, 5.5), StartupTiming(3.0, 3.5)]
    report = startup_report(StartupBenchOptions(model="m"), 0.2, [StartupTiming(9.0, 9.5)], warm)
    section = report.markdown(datetime.date(2031, 2, 3))
    assert section.startswith("\n## 2031-02-03 · Start-up to first token: m in bfloat16")
    assert "| cold | 1 | 9.0 (9.0-9.0) | 9.5 (9.5-9.5) |" in section
    assert "| warm | 3 | 3.0 (2.0-4.0) | 3.5 (2.5-5.5) |" in section


def test_a_page_without_the_section_is_refused_before_anything_starts(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("no marks")
    with pytest.raises(ConfigError, match="bench startup"):
        run_bench(StartupBenchOptions(model="/no/such/model", page=page), bench_startup)


def measure(model):
    options = StartupBenchOptions(model=model, dtype="float32", threads=1, cold_runs=1, warm_runs=0)
    return measure_starts(options, Console(file=io.StringIO()))


@pytest.mark.process
@pytest.mark.soak
def test_a_cold_start_brings_a_token_and_leaves_the_users_caches_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSERVE_CACHE", str(tmp_path / "mine"))
    model = make_tiny_model("llama", tmp_path / "llama")
    [start], warm = measure(str(model))
    assert 0 < start.ready < start.first_token
    assert warm == []
    assert not (tmp_path / "mine").exists()


@pytest.mark.process
def test_a_worker_that_cannot_start_is_an_error_with_the_end_of_its_log():
    with pytest.raises(ClusterError, match="There is no folder"):
        measure("/no/such/model")
