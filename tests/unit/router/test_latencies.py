"""Latencies of streams: what is counted, and the percentiles of a second."""

from __future__ import annotations

import pytest

from splitserve.router import latencies
from splitserve.router.latencies import StreamLatencies, percentiles_ms


@pytest.fixture
def times(monkeypatch) -> list[float]:
    """Return clock times that are read in turn."""
    found: list[float] = []
    monkeypatch.setattr(latencies.time, "monotonic", lambda: found.pop(0))
    return found


def test_the_first_event_gives_the_time_since_the_arrival_and_later_ones_the_gap_per_token(times) -> None:
    store = StreamLatencies()
    pace = store.stream(arrived=10.0)
    times += [10.5, 10.75, 11.75]
    for count in (3, 1, 4):
        pace.observe(count)
    assert store.take() == ([0.5], [0.25, 0.25])
    assert store.take() == ([], [])


def test_a_busy_second_makes_the_next_streams_end_their_measurement_at_the_first_token(monkeypatch) -> None:
    monkeypatch.setattr(latencies, "_TARGET", 10)
    store = StreamLatencies()

    def run(count: int) -> tuple[int, int]:
        for pace in [store.stream(0.0) for _ in range(count)]:
            for _ in range(5):
                if pace.is_open:
                    pace.observe(1)
        first_tokens, gaps = store.take()
        return len(first_tokens), len(gaps)

    assert run(10) == (10, 40)
    # One stream of four is measured now, and all again when the load is gone.
    assert run(8) == (8, 8)
    assert run(1)[0] == 1
    assert run(10) == (10, 40)


def test_percentiles_of_nothing_are_unknown() -> None:
    assert percentiles_ms([], 0.5, 0.99) == [None, None]


def test_percentiles_are_those_of_all_values_whatever_their_order() -> None:
    assert percentiles_ms([n / 1000 for n in reversed(range(100))], 0.5, 0.99) == [50.0, 99.0]


def test_percentiles_of_many_values_use_a_part_of_them() -> None:
    values = [n / 1000 for n in range(100_000)]
    middle, top = percentiles_ms(values, 0.5, 0.99)
    assert middle == pytest.approx(50_000, rel=0.01)
    assert top == pytest.approx(99_000, rel=0.01)
