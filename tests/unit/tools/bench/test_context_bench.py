"""`bench context`: its verdicts on made-up times, and a small run of it."""

import datetime
import io

import pytest
from rich.console import Console

from splitserve.tools.bench import context
from splitserve.tools.bench.context import ContextFigures, bench_context, context_report
from splitserve.tools.bench.options import ContextBenchOptions
from splitserve.tools.bench.report import ABSENT


def figures(**changed) -> ContextFigures:
    values = {
        "tokens": 32_768,
        "short_prefill": 0.1,
        "long_prefill": 12.0,
        "short_decode": 0.002,
        "long_decode": 0.012,
        "flops_ratio": 100.0,
        "kv_gb": 0.27,
        "read_gb_per_s": 30.0,
    }
    return ContextFigures(**(values | changed))


@pytest.mark.parametrize(("changed", "met"), [({}, [True, True]), ({"long_prefill": 16.0, "kv_gb": 0.2}, [False] * 2)])
def test_time_is_compared_with_arithmetic_and_kv_with_the_read_throughput(changed, met):
    found = context_report(ContextBenchOptions(), 2, figures(**changed))
    assert [target["met"] for target in found.figures["targets"]] == met
    section = found.markdown(datetime.date(2031, 2, 3))
    if all(met):
        assert "| 12,000 ms | 10,000 ms predicted from 2,048 (100 ms) | 1.20 | at most 1.5 | met |" in section
        assert "| 12.0 ms; 27.0 GB/s of KV | 30.0 GB/s of a plain read | 0.90 | at least 0.8 | met |" in section


@pytest.mark.parametrize("long_decode", [0.001, 0.002])
def test_a_long_context_that_was_as_fast_as_a_short_one_has_no_throughput(long_decode):
    found = context_report(ContextBenchOptions(), 2, figures(long_decode=long_decode))
    assert found.remarks[0].startswith("Decode was no slower with the long context")
    assert [target["met"] for target in found.figures["targets"]] == [True, False]
    assert found.tables[0].rows[1][1] == ABSENT
    assert found.tables[0].rows[1][-1] == "not measured"
    assert not context_report(ContextBenchOptions(), 2, figures()).remarks


def test_a_small_run_measures_everything_and_writes_no_progress_bar(monkeypatch, capfd):
    monkeypatch.setattr(context, "READ_BYTES", 1 << 22)
    options = ContextBenchOptions(tokens=4096, threads=1, repeats=1)
    found = bench_context(options, Console(file=io.StringIO())).figures
    assert found["tokens"] == 4096
    assert found["prefill_seconds"]["predicted"] > 2 * found["prefill_seconds"]["short"] > 0
    assert {target["target"] for target in found["targets"]} == {"prefill / predicted", "decode KV / read throughput"}
    assert "Writing model shards" not in capfd.readouterr().err
