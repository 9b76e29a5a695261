"""Percentiles of requests, throughput, goodput under objectives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.errors import ConfigError
from splitserve.tools.bench.serve_figures import SLO_METRICS, Slo, load_figures
from splitserve.tools.bench.stats import StreamRecord


def record(sent_at, *arrived_at, num_prompt_tokens=10):
    return StreamRecord(sent_at, arrived_at, num_prompt_tokens, len(arrived_at))


def slos(*texts):
    return [Slo.parse(text) for text in texts]


RECORDS = st.lists(
    st.builds(
        lambda sent, gaps: record(sent, *(sent + sum(gaps[: i + 1]) for i in range(len(gaps)))),
        st.floats(0, 10),
        st.lists(st.floats(0.001, 2.0), min_size=1, max_size=8),
    ),
    max_size=12,
)


def test_percentiles_are_milliseconds_over_requests_and_itl_over_all_gaps():
    figures = load_figures([record(0.0, 0.1, 0.2, 0.5), record(0.0, 0.3)], {"no room": 0}, 1.0, [])
    assert (figures["ttft_ms_p50"], figures["ttft_ms_p99"]) == pytest.approx((100, 300))
    assert (figures["itl_ms_mean"], figures["itl_ms_p50"], figures["itl_ms_p99"]) == pytest.approx((200, 100, 300))
    assert figures["tpot_ms_p50"] == pytest.approx(200)
    assert figures["e2e_ms_p90"] == pytest.approx(500)


def test_rates_are_over_the_whole_run():
    figures = load_figures([record(0.0, 0.1, 0.2), record(1.0, 1.5)], {"no room": 1}, 2.0, [])
    assert (figures["output_tok_s"], figures["total_tok_s"]) == (1.5, 11.5)
    assert (figures["requests_per_s"], figures["goodput"]) == (1.0, 1.0)
    assert (figures["num_requests"], figures["num_failed"]) == (3, 1)


def test_a_run_in_which_nothing_ended_well_has_no_times_and_no_goodput():
    figures = load_figures([], {"no room": 4}, 2.0, slos("ttft=1"))
    assert [figures[f"{name}_ms_p50"] for name in SLO_METRICS] == [None] * 4
    assert (figures["goodput"], figures["num_failed"]) == (0.0, 4)


@pytest.mark.parametrize(
    ("texts", "met"),
    [
        (["ttft=100"], True),
        (["ttft=99"], False),
        # Each gap counts, not their mean.
        (["itl=300"], True),
        (["itl=299"], False),
        (["tpot=200"], True),
        (["tpot=199"], False),
        (["e2e=500"], True),
        (["e2e=499"], False),
        (["ttft=100", "itl=299"], False),
    ],
)
def test_a_request_counts_for_goodput_when_it_meets_every_objective(texts, met):
    # Times that binary fractions hold to the last digit would hide nothing: a hair is allowed.
    one = record(0.0, 0.0999999, 0.1999998, 0.4999997)
    assert load_figures([one], {"no room": 0}, 1.0, slos(*texts))["goodput"] == float(met)


def test_a_single_token_meets_objectives_about_gaps():
    assert slos("itl=1")[0].is_met(record(0.0, 5.0))
    assert slos("tpot=1")[0].is_met(record(0.0, 5.0))


@given(RECORDS, st.integers(0, 5), st.floats(1, 4000), st.floats(1, 4000))
def test_goodput_never_exceeds_throughput_and_falls_as_objectives_tighten(records, failed, a, b):
    tight, loose = sorted((a, b))
    strict = load_figures(records, {"no room": failed}, 10.0, slos(f"ttft={tight}", f"itl={tight}"))["goodput"]
    mild = load_figures(records, {"no room": failed}, 10.0, slos(f"ttft={loose}"))["goodput"]
    none = load_figures(records, {"no room": failed}, 10.0, [])
    assert 0 <= strict <= mild <= none["goodput"] == none["requests_per_s"] == len(records) / 10.0


@pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=fast", "ttft=0", "ttft=-1", "ttft=nan", "speed=5", "=5"])
def test_an_objective_that_says_nothing_is_refused(text):
    with pytest.raises(ConfigError, match="--slo"):
        Slo.parse(text)
