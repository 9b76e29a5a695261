"""The rate of output tokens: measured in whole seconds of work, and in short busy times as far as they go."""

from __future__ import annotations

from splitserve.scheduler.ports import GenerationRate


def test_a_busy_scheduler_reports_the_last_whole_interval() -> None:
    rate = GenerationRate()
    for step in range(16):
        rate.add(4, step * 0.25)
    assert rate.last == 16.0
    # What is left of a busy time does not replace a whole interval.
    rate.stop(3.9)
    assert rate.last == 16.0


def test_a_short_busy_time_gives_a_rate_and_idle_time_does_not_count() -> None:
    rate = GenerationRate()
    for now in (0.0, 0.125, 0.25):
        rate.add(1, now)
    assert rate.last == 0.0
    rate.stop(0.25)
    assert rate.last == 8.0
    rate.add(1, 100.0)
    rate.add(1, 100.5)
    rate.stop(100.5)
    assert rate.last == 2.0


def test_a_prefill_alone_gives_no_rate() -> None:
    rate = GenerationRate()
    rate.add(1, 5.0)
    rate.stop(6.0)
    assert rate.last == 0.0
