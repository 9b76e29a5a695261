"""Models with a sliding window in every layer: pages that left the windows are freed while the request runs."""

import random
from functools import partial

import pytest

from splitserve.core.messages import GenerateRequest
from splitserve.core.sampling import ResolvedSampling
from support.fake_engine import FakeEngine, expected_tokens
from support.pair import PairWorld
from support.sim import ColocatedWorld

PARAMS = ResolvedSampling(max_new_tokens=40, temperature=0.0)


def windowed(window: int | None, **settings) -> dict:
    return {"make_engine": partial(FakeEngine, window=window), "page_size": 4} | settings


@pytest.mark.parametrize(("window", "num_at_once"), [(6, 3), (None, 1)])
def test_as_many_run_together_as_their_windows_have_room(window, num_at_once):
    # Each grows to 44 tokens, 11 pages; of a window of six there are four at most.
    world = ColocatedWorld(**windowed(window, num_pages=12, prefix=False, num_reserved_decode_tokens=40))
    prompts = {f"r{i}": [i, 2, 3, 4] for i in range(3)}
    for rid, prompt in prompts.items():
        world.submit(GenerateRequest(rid=rid, prompt_ids=prompt, params=PARAMS))
    most = 0
    while not world.is_idle():
        world.turn()
        most = max(most, len(world.running.running))
    assert most == num_at_once
    assert world.scheduler.state().num_retracted_requests_total == 0
    for rid, prompt in prompts.items():
        assert world.tokens(rid) == expected_tokens(prompt, PARAMS, 40, window=window)
    world.check_nothing_is_held()


def test_who_gave_way_comes_back_with_what_is_still_seen_and_saves_no_more():
    world = ColocatedWorld(**windowed(6, num_pages=12, prefix=False, num_reserved_decode_tokens=1))
    prompts, params = {f"r{i}": [i] * 30 for i in range(2)}, ResolvedSampling(max_new_tokens=18)
    for rid, prompt in prompts.items():
        world.submit(GenerateRequest(rid=rid, prompt_ids=prompt, params=params))
        for _ in range(3):
            world.turn()
    world.turn()
    victim = world.running.running[-1]
    num_held = world.cache.holdings[victim].num_secured_pages
    assert num_held < len(victim.pages)
    world.running.running.remove(victim)
    world.running.retraction.retract(victim, world.clock.now())
    assert world.running.retraction.memory.num_bytes == num_held * world.fake_engine.bytes_per_page
    world.run_until_idle()
    for rid, prompt in prompts.items():
        assert world.tokens(rid) == expected_tokens(prompt, params, 18, window=6)
    world.check_nothing_is_held()


def test_of_a_long_prompt_prefill_holds_a_window_and_a_chunk_and_decode_is_sent_what_it_will_read():
    sides = windowed(6, num_pages=40, prefix=False)
    world = PairWorld(0, prefill_settings=sides | {"token_budget": 8}, decode_settings=sides)
    prompt = [i % 7 for i in range(100)]
    world.submit("a", prompt, PARAMS, room=1)
    held = set()
    while not (world.prefill.is_idle() and world.decode.is_idle()):
        world.happen()
        held.add(40 - world.prefill.cache.pages.available())
    # 25 pages of prompt: two of a chunk, and the two or three that hold the window before it.
    assert max(held) <= 5
    assert world.decode.tokens("a") == expected_tokens(prompt, PARAMS, 40, window=6)
    assert world.decode.outputs["a"]
    world.check_nothing_is_held()


@pytest.mark.parametrize("seed", range(40))
def test_a_request_retracted_at_any_time_gets_the_same_output(seed):
    """No request has to be retracted if windows make room, so the test retracts one."""
    rng = random.Random(seed)
    window, page_size = rng.choice([2, 5, 13, 30]), rng.choice([1, 4])
    host_memory = rng.choice([0, 1 << 20, 1 << 20])
    settings = windowed(window, num_pages=400, host_memory=host_memory, prefix=rng.random() < 0.5)
    world = ColocatedWorld(**settings | {"page_size": page_size, "token_budget": rng.choice([3, 64])})
    prompts = {f"r{i}": [rng.randrange(2) for _ in range(rng.randrange(1, 30))] for i in range(5)}
    for rid, prompt in prompts.items():
        world.submit(GenerateRequest(rid=rid, prompt_ids=prompt, params=PARAMS))
    running = world.running
    while not world.is_idle():
        world.turn()
        if running.running and rng.random() < 0.1:
            victim = running.running.pop(rng.randrange(len(running.running)))
            running.retraction.retract(victim, world.clock.now())
        world.check()
    assert world.scheduler.state().num_retracted_requests_total > 0
    for rid, prompt in prompts.items():
        assert world.tokens(rid) == expected_tokens(prompt, PARAMS, 40, window=window)
    world.check_nothing_is_held()
