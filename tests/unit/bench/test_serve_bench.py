"""`splitserve bench serve`: ratios to colocated, what compute hid, the forms of the report, options refused at once."""

from __future__ import annotations

import datetime
import json

import pytest

from splitserve.bench import backends
from splitserve.bench.serve import ServeBenchOptions, run_serve_bench
from splitserve.bench.serve_report import ServeFigures, ServeReport
from splitserve.bench.stats import TtftFigures
from splitserve.errors import ConfigError
from splitserve.launch.transfers import Transfers


def ttft(seconds):
    return TtftFigures(2048, 5, seconds, seconds - 0.1, seconds + 0.1)


@pytest.fixture
def report():
    colocated = ttft(2.0)
    moved = Transfers(count=5, num_bytes=5e9, seconds=10.0, exposed_seconds=1.0)
    figures = [
        ServeFigures.of("colocated", 512, colocated, colocated, None),
        ServeFigures.of("tcp", 512, ttft(2.1), colocated, moved),
    ]
    return ServeReport("m", "float32", "splitserve bench serve m", {"CPU": "x"}, figures)


def options(**changed):
    given = {"model": "/no/such/model", "dtype": "float32", "backends": ("tcp",), "prompt_tokens": 64, "runs": 1}
    return ServeBenchOptions(**{**given, "append_to": None, "as_json": False, **changed})


def test_ttft_is_set_against_the_colocated_system_of_the_same_chunk_size(report):
    assert [f.ratio for f in report.figures] == pytest.approx([1.0, 1.05])


def test_what_compute_hid_is_what_was_not_exposed(report):
    assert report.figures[0].transfer is None
    handover = report.figures[1].transfer
    assert (handover.num_bytes, handover.seconds, handover.exposed_seconds) == pytest.approx((1e9, 2.0, 0.2))
    assert (handover.hidden, handover.gb_per_s) == pytest.approx((0.9, 0.5))


def test_no_hand_over_hides_nothing_and_has_no_speed():
    nothing = Transfers(0, 0.0, 0.0, 0.0)
    assert (nothing.hidden, nothing.gb_per_s) == (0.0, 0.0)


def test_hand_overs_of_the_runs_are_those_since_the_warm_up():
    assert Transfers(7, 70.0, 7.0, 0.7) - Transfers(2, 20.0, 2.0, 0.2) == Transfers(5, 50.0, 5.0, pytest.approx(0.5))


def test_the_report_has_a_row_a_system_and_chunk_size(report):
    section = report.markdown(datetime.date(2031, 2, 3))
    lines = [line for line in section.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert lines[-1] == "| 512 | tcp | 2,100 (2,000-2,200) | 1.050 | 1000.0 | 2000.0 | 0.50 | 200.0 | 90% |"
    found = json.loads(json.dumps(report.to_json()))
    assert [(entry["system"], entry["chunk_tokens"]) for entry in found] == [("colocated", 512), ("tcp", 512)]


def test_wrong_options_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="--dtype 'auto'"):
        run_serve_bench(options(dtype="auto"))
    with pytest.raises(ConfigError, match="--transfer-backend pigeon: unknown"):
        run_serve_bench(options(backends=("pigeon",)))


def test_a_backend_asked_for_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(backends, "missing", lambda backend: "it needs a library: pip install it")
    with pytest.raises(ConfigError, match=r"--transfer-backend nixl: .*pip install it"):
        run_serve_bench(options(backends=("nixl",)))
