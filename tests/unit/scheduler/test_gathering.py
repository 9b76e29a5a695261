"""The short wait of an idle prefill worker for more prompts of a burst."""

from __future__ import annotations

import pytest

from splitserve.core.batch import RequestStep, StepPlan
from splitserve.core.sampling import ResolvedSampling
from splitserve.scheduler.gathering import ANNOUNCEMENTS, GAP, LONG_TOKENS, SHARE, PromptGathering
from support.pair import PairWorld

# Seconds per prompt token in these tests.
TOKEN = 0.001


@pytest.fixture
def gathering() -> PromptGathering:
    gathering = PromptGathering()
    gathering.observe(1000, 1000 * TOKEN)
    return gathering


def test_many_tokens_wait_for_the_gap(gathering: PromptGathering) -> None:
    gathering.arrived(10.0, is_first=True)
    assert gathering.ends_at(2000) == pytest.approx(10.0 + GAP)


def test_a_short_prompt_waits_for_a_share_of_its_time(gathering: PromptGathering) -> None:
    gathering.arrived(10.0, is_first=True)
    assert gathering.ends_at(20) == pytest.approx(10.0 + SHARE * 20 * TOKEN)


def test_each_arrival_begins_a_new_gap_within_the_share(gathering: PromptGathering) -> None:
    gathering.arrived(10.0, is_first=True)
    gathering.arrived(10.004, is_first=False)
    assert gathering.ends_at(400) == pytest.approx(10.004 + GAP)
    # Prompts keep arriving: the share of the first one's wait ends it.
    gathering.arrived(10.039, is_first=False)
    assert gathering.ends_at(400) == pytest.approx(10.0 + SHARE * 400 * TOKEN)


def test_a_new_burst_does_not_count_from_the_last_one(gathering: PromptGathering) -> None:
    gathering.arrived(10.0, is_first=True)
    gathering.arrived(20.0, is_first=True)
    assert gathering.ends_at(400) == pytest.approx(20.0 + GAP)


def test_without_a_measured_step_there_is_no_wait() -> None:
    gathering = PromptGathering()
    # The time of a token is not that of so short a step.
    gathering.observe(1, 0.05)
    gathering.arrived(10.0, is_first=True)
    assert gathering.ends_at(400) == 10.0


def exchange(world: PairWorld) -> None:
    """Run both workers until nothing happens at this time."""
    for _ in range(20):
        for worker in (world.prefill, world.decode):
            worker.turn()
            worker.manager.tick()
        for pair in sorted(world.control.busy()):
            world.control.deliver(pair)


def test_an_idle_prefill_worker_computes_a_burst_in_one_step() -> None:
    world = PairWorld(3)
    world.prefill.role.observe(StepPlan((RequestStep("before", 0, range(1000), 0),)), 1000 * TOKEN)
    steps = world.prefill.fake_engine.step_sizes
    for room, rid in enumerate(("first", "second")):
        world.submit(rid, list(range(100 * room, 100 * room + 100)), ResolvedSampling(max_new_tokens=2), room=room + 1)
        exchange(world)
        assert not steps
        world.clock.advance(GAP / 2)
    world.clock.advance(GAP)
    exchange(world)
    assert steps == [200]
    world.run_until_idle()
    world.check_nothing_is_held()


def submit_without_decode(world: PairWorld, rid: str, num_tokens: int) -> None:
    """Submit a second prompt, which decode has not announced yet."""
    world.submit(rid, list(range(500, 500 + num_tokens)), ResolvedSampling(max_new_tokens=2), room=2)
    turn_prefill(world)


def turn_prefill(world: PairWorld) -> None:
    world.prefill.turn()
    world.prefill.manager.tick()


def test_a_burst_is_computed_together_though_decode_announces_it_late() -> None:
    world = PairWorld(3)
    world.prefill.role.observe(StepPlan((RequestStep("before", 0, range(1000), 0),)), 1000 * TOKEN)
    steps = world.prefill.fake_engine.step_sizes
    world.submit("first", list(range(100)), ResolvedSampling(max_new_tokens=2), room=1)
    exchange(world)
    submit_without_decode(world, "second", 100)
    world.clock.advance(GAP)
    turn_prefill(world)
    assert not steps
    exchange(world)
    world.clock.advance(GAP)
    exchange(world)
    assert steps == [200]
    world.run_until_idle()
    world.check_nothing_is_held()


def test_a_prompt_does_not_wait_long_for_one_that_decode_has_no_room_for() -> None:
    world = PairWorld(3)
    world.prefill.role.observe(StepPlan((RequestStep("before", 0, range(1000), 0),)), 1000 * TOKEN)
    steps = world.prefill.fake_engine.step_sizes
    world.submit("first", list(range(100)), ResolvedSampling(max_new_tokens=2), room=1)
    exchange(world)
    # With this prompt the share of the step's time is longer than the wait for announcements.
    submit_without_decode(world, "second", 450)
    world.clock.advance(ANNOUNCEMENTS - 0.001)
    turn_prefill(world)
    assert not steps
    world.clock.advance(0.002)
    turn_prefill(world)
    assert steps == [100]
    world.run_until_idle()
    world.check_nothing_is_held()


@pytest.mark.parametrize(("length", "waits"), [(LONG_TOKENS - 1, True), (LONG_TOKENS, False)])
def test_a_long_prompt_does_not_wait_for_others(length: int, waits: bool) -> None:
    world = PairWorld(3)
    world.prefill.role.observe(StepPlan((RequestStep("before", 0, range(1000), 0),)), 1000 * TOKEN)
    world.submit("long", list(range(length)), ResolvedSampling(max_new_tokens=2), room=1)
    exchange(world)
    assert (not world.prefill.fake_engine.step_sizes) == waits
    world.clock.advance(GAP)
    world.run_until_idle()
    world.check_nothing_is_held()


def test_a_prompt_in_the_prefix_cache_waits_for_its_other_tokens_only() -> None:
    world = PairWorld(3)
    prompt = list(range(200))
    world.submit("first", prompt, ResolvedSampling(max_new_tokens=2), room=1)
    world.run_until_idle()
    steps = world.prefill.fake_engine.step_sizes
    steps.clear()
    world.prefill.role.observe(StepPlan((RequestStep("before", 0, range(1000), 0),)), 1000 * TOKEN)
    world.submit("again", prompt, ResolvedSampling(max_new_tokens=2), room=2)
    exchange(world)
    assert not steps
    # 192 of 200 tokens are cached.
    world.clock.advance(SHARE * 8 * TOKEN)
    exchange(world)
    assert steps == [8]
    world.run_until_idle()
    world.check_nothing_is_held()


def test_a_prompt_behind_another_does_not_wait() -> None:
    world = PairWorld(3, prefill_settings={"token_budget": 16})
    world.prefill.role.observe(StepPlan((RequestStep("before", 0, range(1000), 0),)), 1000 * TOKEN)
    world.submit("a", list(range(100)), ResolvedSampling(max_new_tokens=2), room=1)
    # The first prompt alone fills a step.
    exchange(world)
    assert world.prefill.fake_engine.step_sizes[:2] == [16, 16]
    world.run_until_idle()
    world.check_nothing_is_held()
