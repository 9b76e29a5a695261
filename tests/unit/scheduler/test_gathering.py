"""The short wait of an idle prefill worker for more prompts of a burst."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from splitserve.core.batch import RequestStep, StepPlan
from splitserve.core.messages import GenerateRequest
from splitserve.core.request import BootstrapInfo, RoomKey
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


def pair_with_times(**settings: Any) -> PairWorld:
    """Return a pair of which the prefill worker has measured `TOKEN`."""
    world = PairWorld(3, prefill_settings=settings or None)
    world.prefill.role.observe(StepPlan((RequestStep("before", 0, range(1000), 0),)), 1000 * TOKEN)
    return world


def exchange(world: PairWorld) -> None:
    """Run both workers until nothing happens at this time."""
    for _ in range(20):
        for worker in (world.prefill, world.decode):
            worker.turn()
            worker.manager.tick()
        for pair in sorted(world.control.busy()):
            world.control.deliver(pair)


def test_an_idle_prefill_worker_computes_a_burst_in_one_step() -> None:
    world = pair_with_times()
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


def message(room: int, prompt: Sequence[int]) -> GenerateRequest:
    bootstrap = BootstrapInfo(*PairWorld.ADDRESS[:2], RoomKey(room))
    params = ResolvedSampling(max_new_tokens=2)
    return GenerateRequest(rid=f"prompt {room}", prompt_ids=list(prompt), params=params, bootstrap=bootstrap)


def prompt_of(room: int, num_tokens: int) -> range:
    return range(1000 * room, 1000 * room + num_tokens)


def announced(world: PairWorld, room: int, prompt: Sequence[int]) -> None:
    """Submit a prompt, and let decode announce it."""
    world.submit(f"prompt {room}", list(prompt), ResolvedSampling(max_new_tokens=2), room=room)
    exchange(world)


def coming(world: PairWorld, room: int, prompt: Sequence[int]) -> None:
    """Submit a prompt, of which decode does not hear."""
    world.prefill.submit(message(room, prompt))
    turn_prefill(world)


def turn_prefill(world: PairWorld) -> None:
    world.prefill.turn()
    world.prefill.manager.tick()


def seconds_to_first_step(world: PairWorld) -> float:
    began = world.clock.now()
    while not world.prefill.fake_engine.step_sizes:
        world.clock.advance(0.001)
        turn_prefill(world)
    return world.clock.now() - began


def finish(world: PairWorld, *late: GenerateRequest) -> None:
    """Let decode announce the `late` prompts, and run to the end."""
    for request in late:
        world.decode.submit(request)
    world.run_until_idle()
    world.check_nothing_is_held()


def test_a_burst_is_computed_together_though_decode_announces_it_late() -> None:
    world = pair_with_times()
    announced(world, 1, prompt_of(1, 100))
    coming(world, 2, prompt_of(2, 100))
    world.clock.advance(GAP + 0.001)
    turn_prefill(world)
    assert not world.prefill.fake_engine.step_sizes
    world.decode.submit(message(2, prompt_of(2, 100)))
    exchange(world)
    world.clock.advance(GAP)
    exchange(world)
    assert world.prefill.fake_engine.step_sizes == [200]
    finish(world)


def test_the_wait_for_announcements_is_a_share_of_the_time_of_all_prompts() -> None:
    world = pair_with_times()
    announced(world, 1, prompt_of(1, 100))
    coming(world, 2, prompt_of(2, 200))
    assert seconds_to_first_step(world) == pytest.approx(SHARE * 300 * TOKEN, abs=0.0015)
    finish(world, message(2, prompt_of(2, 200)))


def test_steady_requests_without_room_on_decode_do_not_prolong_the_wait() -> None:
    world = pair_with_times(token_budget=8192)
    announced(world, 1, prompt_of(1, 100))
    late = [message(room, prompt_of(room, LONG_TOKENS - 1)) for room in range(2, 8)]
    for request in late:
        world.prefill.submit(request)
        world.clock.advance(ANNOUNCEMENTS / 5)
        turn_prefill(world)
    assert world.prefill.fake_engine.step_sizes == [100]
    finish(world, *late)


@pytest.mark.parametrize("case", ["decode has no room", "long prompt", "cached prompt"])
def test_prompts_that_will_not_join_the_step_are_not_waited_for(case: str) -> None:
    world = pair_with_times()
    prompt = prompt_of(2, LONG_TOKENS if case == "long prompt" else 64)
    if case == "cached prompt":
        announced(world, 3, [*prompt, 1])
        world.run_until_idle()
        world.prefill.fake_engine.step_sizes.clear()
    coming(world, 2, prompt)
    if case == "decode has no room":
        world.clock.advance(ANNOUNCEMENTS)
    announced(world, 1, prompt_of(1, 400))
    assert seconds_to_first_step(world) <= GAP + 0.0015
    assert world.prefill.fake_engine.step_sizes == [400]
    finish(world, message(2, prompt))


@pytest.mark.parametrize(("length", "waits"), [(LONG_TOKENS - 1, True), (LONG_TOKENS, False)])
def test_a_long_prompt_does_not_wait_for_others(length: int, waits: bool) -> None:
    world = pair_with_times()
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
    world = pair_with_times(token_budget=16)
    world.submit("a", list(range(100)), ResolvedSampling(max_new_tokens=2), room=1)
    # The first prompt alone fills a step.
    exchange(world)
    assert world.prefill.fake_engine.step_sizes[:2] == [16, 16]
    world.run_until_idle()
    world.check_nothing_is_held()
