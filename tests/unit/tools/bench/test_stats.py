"""The definitions of TTFT, ITL, TPOT, throughput and percentiles."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.tools.bench.stats import (
    StreamRecord,
    mean,
    median,
    output_tokens_per_second,
    percentile,
    prompt_tokens_per_second,
    share_together,
    streams_figures,
    together_remarks,
    ttft_figures,
)

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


def record(sent_at, *arrived_at, counts=None):
    return StreamRecord(sent_at, arrived_at, 7, sum(counts or (1,) * len(arrived_at)))


def test_ttft_itl_tpot_of_one_stream():
    r = record(10.0, 10.5, 10.7, 11.1)
    assert r.ttft == pytest.approx(0.5)
    assert r.itls == pytest.approx([0.2, 0.4])
    assert r.tpot == pytest.approx(0.3)
    assert r.e2e == pytest.approx(1.1)


def test_tokens_that_come_together_are_one_gap_but_all_count_for_tpot():
    r = record(0.0, 1.0, 2.0, counts=(1, 4))
    assert r.itls == [1.0]
    assert r.num_output_tokens == 5
    assert r.tpot == pytest.approx(0.25)


def test_a_single_token_has_a_ttft_and_nothing_else():
    r = record(1.0, 3.0)
    assert (r.ttft, r.itls, r.tpot) == (2.0, [], None)


def test_throughput_counts_from_the_first_request_to_the_last_token():
    run = [record(1.0, 2.0, 5.0), record(0.0, 3.0, 4.0)]
    assert output_tokens_per_second(run) == pytest.approx(4 / 5)
    assert prompt_tokens_per_second(run) == pytest.approx(14 / 5)


@pytest.mark.parametrize(("q", "expected"), [(1, 1), (25, 1), (26, 2), (50, 2), (75, 3), (99, 4), (100, 4)])
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(q, expected):
    assert percentile([4, 2, 1, 3], q) == expected


@given(NUMBERS, st.floats(0.1, 100))
def test_at_least_q_percent_are_at_or_below_the_percentile_and_it_is_one_of_the_values(values, q):
    found = percentile(values, q)
    assert found in values
    below = sum(v <= found for v in values)
    assert below >= math.ceil(q / 100 * len(values))
    assert sum(v < found for v in values) < math.ceil(q / 100 * len(values))


def test_a_percentile_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@given(NUMBERS)
def test_half_of_the_values_lie_on_each_side_of_the_median(values):
    middle = median(values)
    assert sum(v < middle for v in values) <= len(values) / 2
    assert sum(v > middle for v in values) <= len(values) / 2
    assert min(values) - 1e-6 <= mean(values) <= max(values) + 1e-6


def test_the_median_of_two_is_between_them():
    assert median([4.0, 1.0]) == 2.5


def test_figures_take_the_median_of_the_runs_and_pool_the_gaps():
    runs = [[record(0.0, 1.0, 1.0 + gap)] for gap in (1.0, 3.0, 1.5)]
    f = streams_figures(runs)
    assert (f["num_streams"], f["num_runs"]) == (1, 3)
    assert f["output_tokens_per_second"] == pytest.approx(2 / 2.5)
    assert f["itl_mean"] == pytest.approx(5.5 / 3)
    assert (f["itl_p50"], f["itl_p99"], f["tpot_median"]) == (1.5, 3.0, 1.5)


def test_tokens_that_arrive_together_are_those_without_a_gap_of_their_own():
    assert share_together([record(0.0, 1.0, 1.00001, 2.0), record(0.0, 1.0, counts=(3,))]) == 0.75
    assert share_together([record(0.0, 1.0, 2.0)]) == 0.0
    assert share_together([record(0.0, 1.0)]) is None
    assert [text.partition(" of")[0] for text in together_remarks({"a": 0.1, "b": 0.26, "c": None})] == ["b: 26%"]


def test_figures_of_answers_in_one_frame_have_no_gap_and_all_tokens_together():
    f = streams_figures([[record(0.0, 1.0, counts=(4,))]])
    assert (f["itl_mean"], f["itl_p50"], f["itl_p99"], f["tokens_together"]) == (0.0, 0.0, 0.0, 1.0)


def test_figures_of_streams_of_one_token_are_an_error():
    with pytest.raises(ValueError, match="two tokens"):
        streams_figures([[record(0.0, 1.0)]])


def test_ttft_figures_show_the_median_and_the_spread():
    f = ttft_figures([[record(0.0, 2.0)], [record(5.0, 6.0)], [record(0.0, 9.0)]])
    spread = {"ttft_median": 2.0, "ttft_min": 1.0, "ttft_max": 9.0}
    assert f == {"num_prompt_tokens": 7, "num_runs": 3, **spread}
