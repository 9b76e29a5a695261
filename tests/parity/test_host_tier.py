"""Real attention over KV that went to host memory and back: output is that of a worker that computed it anew."""

import random

from splitserve.core.messages import GenerateRequest
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.loader import LoadedModel
from support.real_engine import real_engine
from support.sim import ColocatedWorld

NUM_PROMPTS, NUM_ROUNDS, NUM_PROMPT_TOKENS, PAGE_SIZE = 4, 3, 50, 4
# A prompt with its answer takes 18 pages: one conversation evicts the other.
POOL = {"num_pages": 24, "page_size": PAGE_SIZE, "token_budget": 32}


def run(engine, prompts: list[list[int]], **settings) -> tuple[ColocatedWorld, list[list[int]]]:
    """Each prompt in every round, one after the other."""
    world = ColocatedWorld(**POOL, make_engine=engine, **settings)
    params = ResolvedSampling(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    outputs = []
    for number in range(NUM_ROUNDS):
        for i, prompt in enumerate(prompts):
            rid = f"{number}-{i}"
            world.submit(GenerateRequest(rid=rid, prompt_ids=prompt, params=params))
            world.run_until_idle()
            outputs.append(world.tokens(rid))
            if settings and number > 0:
                assert world.cached(rid) == (NUM_PROMPT_TOKENS - 1) // PAGE_SIZE * PAGE_SIZE
    world.check_nothing_is_held()
    return world, outputs


def test_a_round_trip_through_the_host_changes_no_token(tiny):
    loaded, _ = tiny
    check_round_trip(loaded)


def test_a_round_trip_through_the_host_changes_no_token_in_a_served_dtype(served):
    check_round_trip(served)


def check_round_trip(loaded: LoadedModel) -> None:
    rng = random.Random(3)
    stem = [rng.randrange(loaded.vocab_size - 8) for _ in range(16)]
    prompts = [stem + [rng.randrange(loaded.vocab_size - 8) for _ in range(34)] for _ in range(NUM_PROMPTS)]
    engine = real_engine(loaded)
    _, anew = run(engine, prompts)
    world, fetched = run(engine, prompts, prefix_host_memory=1 << 30)
    assert fetched == anew
    assert world.scheduler.state().prefix_cache_host_hits > 200
