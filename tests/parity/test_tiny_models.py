"""Whole workers on tiny random models: output equals transformers' `generate`, token for token, in every mode.

The workers are simulated ones (one thread, seeded order of events) around real engines; the KV cache really moves.
"""

import random

import pytest

from splitserve.core.messages import GenerateRequest
from splitserve.core.sampling import ResolvedSampling
from support.pair import PairWorld
from support.real_engine import real_engine
from support.reference import LENGTHS, NUM_OUTPUT_TOKENS
from support.sim import ColocatedWorld

# The reference keeps EOS from ending an answer by masking it; so do we.
GREEDY = ResolvedSampling(max_new_tokens=NUM_OUTPUT_TOKENS, min_new_tokens=NUM_OUTPUT_TOKENS, temperature=0.0)
SETTINGS = {"num_pages": 1024, "page_size": 16, "max_running": 16}


def prompts_of(vocab_size: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(vocab_size - 8) for _ in range(length)] for length in LENGTHS]


def colocated(settings, seed):
    return ColocatedWorld(**settings), lambda world, rid, prompt, params, room: world.submit(
        GenerateRequest(rid=rid, prompt_ids=prompt, params=params)
    )


def disaggregated(settings, seed, decode_page_size=16):
    decode = settings | {"page_size": decode_page_size}
    world = PairWorld(seed, prefill_settings=settings, decode_settings=decode, num_slots=32)
    return world, lambda world, rid, prompt, params, room: world.submit(rid, prompt, params, room=room)


def disaggregated_between_page_sizes(settings, seed):
    return disaggregated(settings, seed, decode_page_size=24)


def tokens_of(world, rid):
    return (world.decode if isinstance(world, PairWorld) else world).tokens(rid)


def cached_of(world, rid):
    return (world.decode if isinstance(world, PairWorld) else world).cached(rid)


# In the order of the fixture's kinds, so that each model is made once. Qwen3 has the KV of Llama.
KINDS_OF_KV = ["llama", pytest.param("qwen3", marks=pytest.mark.soak), "gemma3", "mixtral", "deepseek_v3"]
at_a_time = pytest.mark.parametrize("at_a_time", [pytest.param(1, marks=pytest.mark.soak), 16])


@pytest.mark.parametrize("chunk", [64, pytest.param(2048, marks=pytest.mark.soak)])
@at_a_time
def test_greedy_output_equals_generate_cold_and_warm(tiny, chunk, at_a_time):
    check_greedy(*tiny, colocated, chunk, at_a_time)


# Mixtral has the KV of Llama, too.
@pytest.mark.parametrize(
    "tiny", [*KINDS_OF_KV[:3], pytest.param("mixtral", marks=pytest.mark.soak), "deepseek_v3"], indirect=True
)
@pytest.mark.parametrize(
    ("mode", "chunk"),
    [
        # The pair between page sizes has these chunks, too.
        pytest.param(disaggregated, 64, marks=pytest.mark.soak),
        (disaggregated, 2048),
        (disaggregated_between_page_sizes, 64),
    ],
)
@at_a_time
def test_greedy_output_of_two_workers_equals_generate_cold_and_warm(tiny, mode, chunk, at_a_time):
    check_greedy(*tiny, mode, chunk, at_a_time)


def check_greedy(loaded, reference, mode, chunk, at_a_time):
    world, submit = mode({**SETTINGS, "token_budget": chunk, "make_engine": real_engine(loaded)}, seed=chunk)
    prompts = prompts_of(loaded.vocab_size)
    room = 0
    for temperature in ("cold", "warm"):
        for begin in range(0, len(prompts), at_a_time):
            group = prompts[begin : begin + at_a_time]
            for i, prompt in enumerate(group, start=begin):
                room += 1
                submit(world, f"{temperature}-{i}", prompt, GREEDY, room)
            world.run_until_idle()
            for i, prompt in enumerate(group, start=begin):
                assert tokens_of(world, f"{temperature}-{i}") == reference(prompt), (temperature, len(prompt))
    assert cached_of(world, f"warm-{len(prompts) - 1}") == (LENGTHS[-1] - 1) // 16 * 16
    world.check_nothing_is_held()


@pytest.mark.parametrize("tiny", KINDS_OF_KV, indirect=True)
def test_seeded_sampling_is_the_same_in_any_mode_and_any_company(tiny):
    loaded, _ = tiny
    prompts = prompts_of(loaded.vocab_size)[:12]
    params = [
        ResolvedSampling(max_new_tokens=NUM_OUTPUT_TOKENS, temperature=0.8, top_p=0.95, seed=i, ignore_eos=True)
        for i in range(12)
    ]
    answers = []
    for mode, at_a_time in ((colocated, 1), (colocated, 12), (disaggregated, 5)):
        world, submit = mode({**SETTINGS, "token_budget": 128, "make_engine": real_engine(loaded)}, seed=at_a_time)
        for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            submit(world, f"r{i}", prompt, own, i + 1)
            if (i + 1) % at_a_time == 0:
                world.run_until_idle()
        world.run_until_idle()
        answers.append([tokens_of(world, f"r{i}") for i in range(12)])
    assert answers[0] == answers[1] == answers[2]
    assert len({tuple(a) for a in answers[0]}) == 12
