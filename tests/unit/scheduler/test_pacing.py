"""Intervals between decode steps while another worker of the host computes prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from splitserve.core.clock import ManualClock
from splitserve.core.messages import GenerateRequest
from splitserve.core.sampling import ResolvedSampling
from splitserve.scheduler.pacing import DecodePacing
from support.pair import PairWorld
from support.sim import ColocatedWorld

INTERVAL = 0.03
PARAMS = ResolvedSampling(max_new_tokens=4, temperature=0.0)


def begins(clock: ManualClock, has_other_prompts: Callable[[], bool], step_seconds: list[float]) -> list[float]:
    """Return the times at which steps begin that follow each other at once."""
    pacing = DecodePacing(INTERVAL, has_other_prompts, clock, sleep=clock.advance)
    began = []
    for seconds in step_seconds:
        with pacing.step():
            began.append(clock.now())
            clock.advance(seconds)
    return began


def test_steps_beside_prompts_begin_at_intervals() -> None:
    clock = ManualClock(100.0)
    start = clock.now()
    # The third step is longer than an interval. The fourth begins at once, and the fifth has a whole interval again.
    began = begins(clock, lambda: True, [0.01, 0.02, 0.04, 0.01, 0.01])
    assert [at - start for at in began] == pytest.approx([0.0, 0.03, 0.06, 0.1, 0.13])


def test_steps_without_other_prompts_follow_each_other() -> None:
    clock = ManualClock(100.0)
    start = clock.now()
    assert [at - start for at in begins(clock, lambda: False, [0.01] * 3)] == pytest.approx([0.0, 0.01, 0.02])


def test_a_wait_ends_soon_after_the_prompts() -> None:
    clock = ManualClock(100.0)
    start = clock.now()
    _, second = begins(clock, lambda: clock.now() - start < 0.016, [0.01, 0.01])
    assert 0.016 <= second - start < 0.022


@pytest.fixture
def num_paced(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    count = 0

    @contextmanager
    def step(pacing: DecodePacing) -> Iterator[None]:
        nonlocal count
        count += 1
        yield

    monkeypatch.setattr(DecodePacing, "step", step)
    return lambda: count


@pytest.mark.parametrize(("target", "expected"), [(30.0, PARAMS.max_new_tokens - 1), (None, 0), (0.0, 0)])
def test_decode_steps_of_decode_workers_are_paced(
    target: float | None, expected: int, num_paced: Callable[[], int]
) -> None:
    world = PairWorld(0, prefill_settings={"target_itl_ms": target}, decode_settings={"target_itl_ms": target})
    world.submit("a", list(range(64)), PARAMS, room=1)
    world.run_until_idle()
    assert num_paced() == expected


def test_steps_of_colocated_workers_and_with_prompts_are_not_paced(num_paced: Callable[[], int]) -> None:
    colocated = ColocatedWorld(target_itl_ms=30.0)
    colocated.submit(GenerateRequest(rid="a", prompt_ids=list(range(64)), params=PARAMS))
    colocated.run_until_idle()
    world = PairWorld(0, decode_settings={"target_itl_ms": 30.0})
    # A prompt without a room is computed by the decode worker, and its first token with it.
    world.decode.submit(GenerateRequest(rid="b", prompt_ids=list(range(64)), params=ResolvedSampling(max_new_tokens=1)))
    world.run_until_idle()
    assert (colocated.tokens("a") != [], world.decode.tokens("b") != []) == (True, True)
    assert num_paced() == 0
