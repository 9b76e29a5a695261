"""Prefill and decode in one shared pool: pages change owner instead of being copied, in every order of events."""

import functools
import os
import random
from pathlib import Path

import numpy as np
import pytest

from splitserve.cache.shared_pages import SharedPages
from splitserve.core.sampling import ResolvedSampling
from splitserve.transfer.metadata import MetadataBuffers
from support.fake_engine import FakeEngine, expected_tokens
from support.pair import PairWorld

PAGES, PAGE_SIZE = 64, 16
GREEDY = ResolvedSampling(max_new_tokens=8, temperature=0.0)


@pytest.fixture
def pool():
    """Makes places in one pool, and closes them."""
    fd, places = os.memfd_create("pool"), []

    def join():
        file = Path(f"/proc/self/fd/{fd}")
        places.append(SharedPages(file, pages_per_worker=PAGES, shape=b"s" * 16, arena_bytes=lambda n: n))
        return places[-1]

    yield join
    for place in places:
        place.close()
    os.close(fd)


def pair_world(seed, pool, **settings):
    prefill, decode = pool(), pool()
    memory = np.zeros((prefill.num_pages, PAGE_SIZE), dtype=np.uint64)
    engine = functools.partial(FakeEngine, pool=memory)
    world = PairWorld(
        seed,
        prefill_settings={"shared": prefill, "make_engine": engine, "token_budget": 64},
        decode_settings={"shared": decode, "make_engine": engine},
        **settings,
    )
    return world, prefill, decode


def check_owners(prefill, decode):
    assert len(prefill.owned()) == len(decode.owned()) == PAGES
    assert not set(prefill.owned()) & set(decode.owned())


@pytest.mark.parametrize("seed", range(10))
def test_the_pages_of_a_prompt_go_over_and_no_byte_of_them_is_written(seed, pool):
    world, prefill, decode = pair_world(seed, pool)
    before = set(prefill.owned())
    prompt = list(range(200))
    world.submit("a", prompt, GREEDY, room=1)
    world.run_until_idle()
    assert world.decode.tokens("a") == expected_tokens(prompt, GREEDY, 8)
    assert len(before & set(decode.owned())) == 13
    transfer = next(o.transfer for o in world.prefill.outputs["a"] if o.transfer is not None)
    # The metadata row is all that was copied.
    assert transfer.num_pages_exchanged == 13
    assert transfer.num_bytes == MetadataBuffers(1).row_bytes
    check_owners(prefill, decode)
    world.check_nothing_is_held()


def test_many_requests_use_each_others_pages_and_every_token_is_right(pool):
    world, prefill, decode = pair_world(1, pool)
    prompts = {f"r{i}": [i * 7 + j for j in range(20 + 9 * i)] for i in range(24)}
    for i, (rid, prompt) in enumerate(prompts.items()):
        world.submit(rid, prompt, GREEDY, room=i + 1)
    world.run_until_idle()
    for rid, prompt in prompts.items():
        assert world.decode.tokens(rid) == expected_tokens(prompt, GREEDY, 8)
    check_owners(prefill, decode)
    world.check_nothing_is_held()


@pytest.mark.parametrize("late_fences", [False, True])
@pytest.mark.parametrize("block", range(3))
def test_aborts_and_broken_connections_cost_no_page(block, late_fences, pool):
    for seed in range(block * 10, block * 10 + 10):
        world, prefill, decode = pair_world(seed, pool, late_fences=late_fences)
        rng = random.Random(seed)
        prompts = {f"r{i}": [seed + i * 7 + j for j in range(rng.randrange(1, 150))] for i in range(12)}
        waiting = list(prompts)
        for _ in range(3000):
            if waiting and rng.random() < 0.05:
                rid = waiting.pop()
                world.submit(rid, prompts[rid], GREEDY, room=len(waiting) + 1)
            if rng.random() < 0.005:
                world.abort(rng.choice(list(prompts)), rng.choice([world.prefill, world.decode]))
            if rng.random() < 0.003 and (busy := world.data.busy_sessions()):
                world.data.break_session(rng.choice(busy))
            world.happen()
        for rid in waiting:
            world.submit(rid, prompts[rid], GREEDY, room=100 + len(rid) + int(rid[1:]))
        world.run_until_idle()
        for rid, prompt in prompts.items():
            tokens = world.decode.tokens(rid)
            assert tokens == expected_tokens(prompt, GREEDY, 8)[: len(tokens)], f"seed {seed}: {rid}"
        check_owners(prefill, decode)
        world.check_nothing_is_held()
        prefill.close()
        decode.close()


@pytest.mark.parametrize("host_memory", [0, 1 << 20])
def test_under_pressure_pages_go_over_again_and_every_token_is_right(host_memory, pool):
    prefill, decode = pool(), pool()
    memory = np.zeros((prefill.num_pages, PAGE_SIZE), dtype=np.uint64)
    engine = functools.partial(FakeEngine, pool=memory)
    pressed = {"num_reserved_decode_tokens": 1, "host_memory": host_memory}
    world = PairWorld(
        2,
        prefill_settings={"shared": prefill, "make_engine": engine},
        decode_settings={"shared": decode, "make_engine": engine, **pressed},
    )
    params = ResolvedSampling(max_new_tokens=150, temperature=0.0)
    prompts = {f"r{i}": [i * 7 + j for j in range(20 + 9 * i)] for i in range(16)}
    for i, (rid, prompt) in enumerate(prompts.items()):
        world.submit(rid, prompt, params, room=i + 1)
    world.run_until_idle()
    assert world.decode.scheduler.state().num_retracted_requests_total > 5
    for rid, prompt in prompts.items():
        assert world.decode.tokens(rid) == expected_tokens(prompt, params, 150)
    check_owners(prefill, decode)
    world.check_nothing_is_held()
