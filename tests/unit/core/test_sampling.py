import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.errors import InvalidRequestError
from splitserve.core.sampling import ResolvedSampling, mix64, sample_seed
from support.reference import uniform_at

seeds = st.integers(0, 2**64 - 1)


@given(seeds, st.integers(0, 1_000_000))
def test_the_draw_depends_on_seed_and_position_alone_and_lies_in_the_unit_interval(seed, position):
    u = uniform_at(seed, position)
    assert 0.0 <= u < 1.0
    assert u == uniform_at(seed, position)


def test_draws_are_uniform_over_positions_and_over_seeds():
    for draws in ([uniform_at(7, p) for p in range(20_000)], [uniform_at(s, 3) for s in range(20_000)]):
        mean = sum(draws) / len(draws)
        variance = sum((u - mean) ** 2 for u in draws) / len(draws)
        assert math.isclose(mean, 1 / 2, abs_tol=0.01)
        assert math.isclose(variance, 1 / 12, abs_tol=0.005)


def test_neighbouring_positions_are_uncorrelated():
    draws = [uniform_at(1, p) - 0.5 for p in range(20_000)]
    correlation = sum(a * b for a, b in itertools.pairwise(draws)) / len(draws) * 12
    assert abs(correlation) < 0.03


@given(seeds)
def test_the_first_sample_keeps_the_seed_and_the_others_differ(seed):
    assert sample_seed(seed, 0) == seed
    assert len({sample_seed(seed, k) for k in range(16)}) == 16


@given(seeds, seeds)
def test_mixing_stays_within_64_bits(a, b):
    assert 0 <= mix64(a, b) < 2**64


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -1),
        ("min_new_tokens", 1000),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {1: math.inf}),
        ("stop_token_ids", (100,)),
    ],
)
def test_a_parameter_out_of_range_is_named_with_its_rule(name, value):
    params = ResolvedSampling(**{name: value})
    with pytest.raises(InvalidRequestError, match=name) as caught:
        params.validate(vocab_size=100)
    assert caught.value.param == name
    assert caught.value.http_status == 400


def test_the_defaults_are_valid():
    ResolvedSampling().validate(vocab_size=100)
