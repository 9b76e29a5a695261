"""Growth: the verdict on made-up times, the report's forms, and a tiny run of it all."""

from __future__ import annotations

import datetime
import io
import itertools
import json

import pytest
from rich.console import Console

from splitserve.core.config import ModelConfig
from splitserve.core.errors import ConfigError
from splitserve.engine.loader import load_model
from splitserve.tools.bench.engine_steps import prompt_flops
from splitserve.tools.bench.growth import StepSizes, growth_report, measure_growth, sizes_for
from splitserve.tools.bench.options import GrowthBenchOptions
from splitserve.tools.bench.series import Series, SeriesPoint, doublings, measure
from support.tiny_models import make_tiny_model


def series(seconds_of, sizes=(1, 2, 4, 8), name="thing", unit="ms"):
    points = [SeriesPoint(size, size, (seconds_of(size),)) for size in sizes]
    return Series(name, "made up", "things", "thing", unit, points)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_time_that_rises_with_the_work_or_slower_is_no_fault(exponent):
    found = series(lambda n: 0.01 * n**exponent)
    assert not found.outgrows_work
    assert found.growths()[1:] == pytest.approx([exponent] * 3)
    assert found.verdict().startswith("no faster than its work")


def test_time_that_rises_faster_than_the_work_is_named_with_its_size():
    found = series(lambda n: 0.01 * n**1.5)
    assert found.outgrows_work
    assert found.verdict() == "GROWS FASTER THAN ITS WORK: up to 2.83 x the least cost at a smaller size, at 8 things"


def test_fast_growth_behind_a_fixed_part_shows_against_the_cheapest_size_before():
    # At 8 a unit costs less than at 1, and twice what it costs at 4.
    found = series({1: 1.0, 2: 1.0, 4: 1.0, 8: 4.0}.__getitem__)
    assert found.worst() == (found.points[3], pytest.approx(2.0))
    assert found.outgrows_work


def test_a_cost_that_creeps_up_from_size_to_size_is_found():
    # Each step alone is within the tolerance.
    assert series(lambda n: 0.01 * n**1.3).outgrows_work


def test_noise_within_the_tolerance_is_no_growth():
    assert not series({1: 1.0, 2: 2.4, 4: 4.2, 8: 9.6}.__getitem__).outgrows_work


def test_a_time_too_short_to_measure_is_compared_with_nothing():
    found = series({1: 0.0, 2: 1.0, 4: 0.0, 8: 16.0}.__getitem__)
    assert found.growths() == [None] * 4
    assert found.worst() == (found.points[3], pytest.approx(4.0))


def test_sizes_take_turns_and_the_first_round_does_not_count():
    calls = []
    clock = itertools.count()

    def run(size):
        calls.append(size)
        return float(next(clock))

    points = measure([1, 2], float, run, 3)
    assert calls == [1, 2] * 4
    assert [p.times for p in points] == [(2.0, 4.0, 6.0), (3.0, 5.0, 7.0)]
    assert points[0].seconds == 4.0
    calls.clear()
    measure([1, 2], float, run, 1, warm_ups=1)
    assert calls == [1, 1, 2]


@pytest.mark.parametrize(
    ("first", "last", "found"), [(1, 8, [1, 2, 4, 8]), (128, 400, [128, 256]), (4, 4, [4]), (8, 4, [])]
)
def test_sizes_double_up_to_the_last(first, last, found):
    assert doublings(first, last) == found


@pytest.fixture
def found():
    return [series(lambda n: 0.01, name="flat"), series(lambda n: 0.01 * n * n, name="steep", unit="µs")]


def report_of(found, cores_taken_by_others=0.4):
    model = ModelConfig(model="m", dtype="bfloat16", threads=2)
    return growth_report(model, cores_taken_by_others, found)


def test_the_table_has_every_size_and_both_verdicts(found):
    out = io.StringIO()
    Console(file=out, width=100).print(report_of(found))
    text = " ".join(out.getvalue().split())
    assert "Flat (made up): no faster than its work" in text
    assert "Steep (made up): **GROWS FASTER THAN ITS WORK" in text
    assert "10.0 (10.0-10.0)" in text


def test_markdown_and_json_say_what_grows_too_fast(found):
    report = report_of(found)
    section = report.markdown(datetime.date(2031, 2, 3))
    assert section.startswith("\n## 2031-02-03 · ")
    assert "Steep (made up): **GROWS FASTER THAN ITS WORK" in section
    assert "| 8 | 10.0 (10.0-10.0) | 1.25 | 0.00 |" in section
    shown = json.loads(json.dumps(report.to_json()))["series"]
    assert [s["grows_faster_than_work"] for s in shown] == [False, True]
    assert shown[1]["points"][3]["seconds"] == pytest.approx(0.64)
    assert shown[1]["points"][3]["growth"] == pytest.approx(2.0)


def test_figures_of_a_busy_machine_are_marked(found):
    assert "was not idle" in report_of(found).section()
    assert "was not idle" not in report_of(found, cores_taken_by_others=0.1).section()


def measure_tiny(model, **given):
    sizes = StepSizes(repeats=2, max_batch=4, short_context=32, max_context=128, chunk_tokens=48)
    config = ModelConfig(model=str(model), dtype="float32", device="cpu", threads=1)
    return measure_growth(config, given.get("sizes", sizes), (2, 20), Console(file=io.StringIO()))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model("gemma3", tmp_path_factory.mktemp("growth") / "gemma3")


def test_a_tiny_model_is_measured_at_every_size(tiny):
    found = measure_tiny(tiny)
    sizes = {s.name: [p.size for p in s.points] for s in found}
    assert sizes == {
        "decode step by batch size": [1, 2, 4],
        "decode step by context length": [32, 64, 128],
        "prefill by prompt length": [32, 64, 128],
        "scheduler: one turn": [2, 20],
        "scheduler: arrive, wait, run, end": [2, 20],
        "scheduler: abort all": [2, 20],
    }
    assert all(seconds > 0 for s in found for p in s.points for seconds in p.times)


def test_a_prompts_work_counts_weights_and_windows(tiny):
    loaded = load_model(ModelConfig(model=str(tiny), device="cpu", threads=1))
    one, two = prompt_flops(loaded, 1), prompt_flops(loaded, 2)
    # Four layers of six heads of 16: a second token sees two keys; window 32 reaches all.
    pair = 4 * 2 * 6 * (16 + 16)
    assert two - 2 * one == pair
    far, farther = prompt_flops(loaded, 1000), prompt_flops(loaded, 1001)
    # Of the last token: 32 keys in three layers, 1,001 in one.
    assert farther - far == one - pair + pair / 4 * (3 * 32 + 1001)


def test_a_model_of_too_short_contexts_is_refused(tiny):
    sizes = StepSizes(repeats=1, max_batch=1, short_context=4096, max_context=8192)
    with pytest.raises(ConfigError, match="too short"):
        measure_tiny(tiny, sizes=sizes)


def test_the_full_form_reaches_the_sizes_that_are_promised():
    sizes, waiting = sizes_for(GrowthBenchOptions())
    assert (sizes.max_batch, sizes.short_context, sizes.max_context) == (256, 128, 8192)
    assert (waiting[0], waiting[-1]) == (10, 10_000)
