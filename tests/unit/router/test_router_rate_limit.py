from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.clock import ManualClock
from splitserve.core.errors import RateLimitError
from splitserve.router.admission import RateLimit

RATES = st.floats(0.01, 1000)
BURSTS = st.integers(1, 20)
GAPS = st.lists(st.floats(0, 100), max_size=60)


def is_let_in(limit: RateLimit, caller: str = "a") -> bool:
    try:
        limit.take(caller)
    except RateLimitError:
        return False
    return True


@given(RATES, BURSTS, GAPS)
def test_no_stretch_of_time_has_more_than_a_burst_and_the_rate(rate: float, burst: int, gaps: list[float]) -> None:
    clock = ManualClock()
    limit = RateLimit(rate, burst, clock)
    came: list[float] = []
    for gap in gaps:
        clock.advance(gap / rate)
        if is_let_in(limit):
            came.append(clock.now())
    for i, start in enumerate(came):
        for j in range(i, len(came)):
            assert j - i + 1 <= burst + rate * (came[j] - start) + 1e-2


@given(RATES, BURSTS, GAPS)
def test_whoever_waits_as_told_is_let_in_and_whoever_does_not_is_not(
    rate: float, burst: int, gaps: list[float]
) -> None:
    clock = ManualClock()
    limit = RateLimit(rate, burst, clock)
    for gap in gaps:
        clock.advance(gap / rate / 10)
        while is_let_in(limit):
            pass
        with pytest.raises(RateLimitError) as error:
            limit.take("a")
        assert 0 < error.value.retry_after <= 1 / rate + 1e-6
        clock.advance(error.value.retry_after / 2)
        assert error.value.retry_after < 1e-5 or not is_let_in(limit)
        clock.advance(error.value.retry_after / 2)
        assert is_let_in(limit)


@given(RATES, BURSTS)
def test_a_rested_caller_gets_a_whole_burst_and_no_more(rate: float, burst: int) -> None:
    clock = ManualClock(1e7)
    limit = RateLimit(rate, burst, clock)
    for _ in range(2):
        assert [is_let_in(limit) for _ in range(burst + 1)] == [True] * burst + [False]
        clock.advance((burst + 1) / rate)


def test_callers_do_not_use_up_each_others_share() -> None:
    limit = RateLimit(1, 1, ManualClock())
    assert [is_let_in(limit, caller) for caller in ("a", "a", "b", "b")] == [True, False, True, False]
