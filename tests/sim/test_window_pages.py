"""Models of which some layers have sliding windows: those have a pool of their own, that holds little more than them.

The fake engine has a layer of each kind. The tokens that it samples depend on both.
"""

import random
from functools import partial

import pytest

from splitserve.cache.window_pages import least_window_pages
from splitserve.core.messages import GenerateRequest
from splitserve.core.sampling import ResolvedSampling
from support.fake_engine import FakeEngine, expected_tokens
from support.late_followers import RankedEngine
from support.pair import PairWorld
from support.sim import ColocatedWorld

PARAMS = ResolvedSampling(max_new_tokens=40, temperature=0.0)


def hybrid(window: int, num_window_pages: int, **settings) -> dict:
    engine = partial(FakeEngine, window=window, num_window_pages=num_window_pages)
    return {"make_engine": engine, "page_size": 4} | settings


def expected(prompt: list[int], params: ResolvedSampling, window: int) -> list[int]:
    return expected_tokens(prompt, params, params.max_new_tokens, window=window, is_hybrid=True)


def test_a_long_prompt_is_computed_in_chunks_in_a_pool_of_a_window_and_a_chunk():
    # Two pages of window and two where it may begin and end, and two of a chunk.
    world = ColocatedWorld(**hybrid(8, 6, num_pages=60, token_budget=8, prefix=False))
    prompt = [i % 7 for i in range(150)]
    world.submit(GenerateRequest(rid="a", prompt_ids=prompt, params=PARAMS))
    world.run_until_idle()
    assert world.tokens("a") == expected(prompt, PARAMS, 8)
    world.check_nothing_is_held()


def test_as_many_run_together_as_both_pools_have_room():
    # Of the full layers there is room for ten; of the windows for three, beside a step.
    world = ColocatedWorld(
        **hybrid(8, 3 * 4 + 4, num_pages=170, token_budget=16, prefix=False, num_reserved_decode_tokens=40)
    )
    prompts = {f"r{i}": [i] * 20 for i in range(5)}
    for rid, prompt in prompts.items():
        world.submit(GenerateRequest(rid=rid, prompt_ids=prompt, params=PARAMS))
    most = 0
    while not world.is_idle():
        world.turn()
        world.check()
        most = max(most, len(world.running.running))
    assert most == 3
    assert world.scheduler.state().num_retracted_requests_total == 0
    for rid, prompt in prompts.items():
        assert world.tokens(rid) == expected(prompt, PARAMS, 8)
    world.check_nothing_is_held()


@pytest.mark.parametrize("has_ranks", [False, True])
def test_a_request_that_outgrows_the_window_pages_retracts_others(has_ranks):
    # Promised for two tokens more than they have, and their windows come to hold 20.
    settings = hybrid(20, 13, num_pages=100, token_budget=16, prefix=False, num_reserved_decode_tokens=2)
    if has_ranks:
        settings["make_engine"] = partial(RankedEngine, rng=random.Random(1), window=20, num_window_pages=13)
    world = ColocatedWorld(**settings)
    prompts = {f"r{i}": [i] * 3 for i in range(4)}
    for rid, prompt in prompts.items():
        world.submit(GenerateRequest(rid=rid, prompt_ids=prompt, params=PARAMS))
    while not world.is_idle():
        world.turn()
        world.check()
    state = world.scheduler.state()
    assert state.num_retracted_resumed_whole_total == state.num_retracted_requests_total > 0
    for rid, prompt in prompts.items():
        assert world.tokens(rid) == expected(prompt, PARAMS, 20)
    world.check_nothing_is_held()
    if isinstance(world.engine, RankedEngine):
        world.engine.check_nothing_is_copied()


def test_the_next_turn_of_a_conversation_goes_on_where_the_last_one_ended():
    world = ColocatedWorld(**hybrid(6, 40, num_pages=100, token_budget=16))
    prompt = [i % 5 for i in range(50)]
    world.submit(GenerateRequest(rid="a", prompt_ids=prompt, params=PARAMS))
    world.run_until_idle()
    following = prompt + world.tokens("a") + [1, 2, 3]
    world.submit(GenerateRequest(rid="b", prompt_ids=following, params=PARAMS))
    world.run_until_idle()
    assert world.cached("b") == 88
    assert world.tokens("b") == expected(following, PARAMS, 6)
    world.check_nothing_is_held()


def test_of_a_prompt_decode_is_sent_all_of_one_layer_and_a_window_of_the_other():
    sides = hybrid(6, 12, num_pages=60, token_budget=8)
    world = PairWorld(0, prefill_settings=sides, decode_settings=sides | {"page_size": 8, "num_pages": 30})
    prompt = [i % 7 for i in range(100)]
    world.submit("a", prompt, PARAMS, room=1)
    world.run_until_idle()
    assert world.decode.tokens("a") == expected(prompt, PARAMS, 6)
    stats = world.prefill.outputs["a"][-1].transfer
    # Eight bytes a token and layer, and the metadata row.
    row = world.prefill.manager.prefill_info().args.metadata_row_bytes
    assert stats is not None
    assert stats.num_bytes == 8 * (100 + 5) + row
    world.check_nothing_is_held()


def test_a_prompt_on_its_way_to_decode_takes_nothing_of_what_steps_need():
    """Its last chunk is computed: what others' chunks take is kept free beside it, however long its transfer lasts."""
    sides = hybrid(8, 4 * 4 + 16, num_pages=300, token_budget=64, prefix=False)
    world = PairWorld(0, prefill_settings=sides, decode_settings=hybrid(8, 40, num_pages=300, token_budget=8))
    prompts = {f"r{i}": [i] * 192 for i in range(5)}
    for room, (rid, prompt) in enumerate(prompts.items(), 1):
        world.submit(rid, prompt, PARAMS, room=room)
    for _ in range(50):
        # No byte arrives.
        for worker in (world.prefill, world.decode):
            worker.turn()
            worker.manager.tick()
            worker.check()
        for pair in sorted(world.control.busy()):
            world.control.deliver(pair)
        assert world.prefill.scheduler.state().num_retracted_requests_total == 0
    world.run_until_idle()
    for rid, prompt in prompts.items():
        assert world.decode.tokens(rid) == expected(prompt, PARAMS, 8)
    world.check_nothing_is_held()


@pytest.mark.parametrize("late", [None, "overlapped", "pipelined"])
@pytest.mark.parametrize("seed", range(12))
def test_one_worker_under_pressure(seed, late):
    rng = random.Random(seed)
    window, page_size, token_budget = rng.choice([1, 3, 9, 20]), rng.choice([1, 4]), rng.choice([5, 16])
    num_steps = {None: 1, "overlapped": 2, "pipelined": 3}[late]
    least = least_window_pages(window, page_size, num_steps * token_budget)
    num_pages = least + rng.choice([30, 60]) * 4 // page_size
    world = ColocatedWorld(
        **hybrid(window, least + rng.choice([0, 4, 20]), num_pages=num_pages, token_budget=token_budget)
        | {"page_size": page_size, "prefix": rng.random() < 0.7},
        host_memory=rng.choice([0, 1 << 20]),
        num_reserved_decode_tokens=rng.choice([1, 8, 40]),
        late_steps=None if late is None else rng,
        pp_size=3 if late == "pipelined" else None,
    )
    prompts = shared_prompts(rng, 12, num_pages * page_size - 41)
    waiting = list(prompts.items())
    while waiting or not world.is_idle():
        if waiting and rng.random() < 0.3:
            rid, prompt = waiting.pop()
            world.submit(GenerateRequest(rid=rid, prompt_ids=prompt, params=PARAMS))
        world.turn()
        world.check()
    for rid, prompt in prompts.items():
        assert world.tokens(rid) == expected(prompt, PARAMS, window)
    world.check_nothing_is_held()


@pytest.mark.parametrize("seed", range(24))
def test_two_workers_under_pressure(seed):
    """Each with a pool of its own kind: pages of other sizes, fewer window pages, or none."""
    rng = random.Random(seed)
    window, token_budget = rng.choice([1, 3, 9, 20]), rng.choice([5, 16])

    def side() -> dict:
        page_size = rng.choice([1, 4, 6])
        least = -(-window // page_size) + 2 + -(-token_budget // page_size)
        num_pages = least + rng.choice([40, 80]) * 4 // page_size
        return hybrid(window, least + rng.choice([0, 4, 20]), num_pages=num_pages, token_budget=token_budget) | {
            "page_size": page_size,
            "prefix": rng.random() < 0.7,
            "host_memory": rng.choice([0, 1 << 20]),
            "num_reserved_decode_tokens": rng.choice([1, 8, 40]),
        }

    sides = side(), side()
    world = PairWorld(seed, prefill_settings=sides[0], decode_settings=sides[1])
    longest = min(s["num_pages"] * s["page_size"] for s in sides) - 41
    prompts = shared_prompts(rng, 8, longest)
    for room, (rid, prompt) in enumerate(prompts.items(), 1):
        world.submit(rid, prompt, PARAMS, room=room)
        aborts = rng.random() < 0.2
        for _ in range(rng.randrange(200)):
            world.happen()
        if aborts:
            world.abort(rid, world.prefill, world.decode)
            del_rid = rid
            prompts[del_rid] = []
        world.prefill.check()
        world.decode.check()
    world.run_until_idle()
    for rid, prompt in prompts.items():
        if prompt:
            assert world.decode.tokens(rid) == expected(prompt, PARAMS, window)
    world.check_nothing_is_held()


def shared_prompts(rng: random.Random, count: int, longest: int) -> dict[str, list[int]]:
    """Some begin like others."""
    stem = [rng.randrange(3) for _ in range(200)]
    prompts = {}
    for i in range(count):
        common, own = rng.choice([0, 8, 17, 60, 150]), [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
        prompts[f"r{i}"] = (stem[:common] + own)[: max(1, longest)]
    return prompts
