"""Prompt lookup on the default model: greedy answers in float32 are those without it, and some steps are spared."""

import random

import pytest
import torch
from tokenizers import Tokenizer

from splitserve.core.config import ModelConfig
from splitserve.core.messages import GenerateRequest
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.loader import LoadedModel, load_model
from splitserve.engine.sources import resolve_model
from splitserve.scheduler.speculation import NgramProposer
from splitserve.tools.passage import PASSAGE
from support.real_engine import real_engine
from support.sim import ColocatedWorld

MODEL, NUM_OUTPUT_TOKENS = "smollm2", 32


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(ModelConfig(model=MODEL, dtype="float32", device="cpu", threads=1))


def prompts_of(count: int) -> list[list[int]]:
    """Pieces of an English text; every other one is followed by its own beginning, so that there is much to look up."""
    rng = random.Random(2)
    tokens = Tokenizer.from_file(str(resolve_model(MODEL) / "tokenizer.json")).encode(PASSAGE).ids
    prompts = []
    for i in range(count):
        start, length = rng.randrange(len(tokens) - 48), rng.randrange(8, 48)
        piece = tokens[start : start + length]
        prompts.append(piece + piece[: length // 2] if i % 2 else piece)
    return prompts


def run(loaded: LoadedModel, prompts: list[list[int]], **settings) -> ColocatedWorld:
    world = ColocatedWorld(num_pages=512, max_running=16, make_engine=real_engine(loaded), **settings)
    params = ResolvedSampling(max_new_tokens=NUM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        world.submit(GenerateRequest(rid=f"r{i}", prompt_ids=prompt, params=params))
    world.run_until_idle()
    world.check_nothing_is_held()
    return world


@pytest.mark.parametrize("count", [3, pytest.param(50, marks=pytest.mark.soak)])
def test_greedy_answers_are_those_without_guesses(smollm2, count):
    prompts = prompts_of(count)
    plain = run(smollm2, prompts)
    guessing = run(smollm2, prompts, proposer=NgramProposer(8))
    answers = [[world.tokens(f"r{i}") for i in range(count)] for world in (plain, guessing)]
    assert answers[0] == answers[1]
    assert {len(answer) for answer in answers[0]} == {NUM_OUTPUT_TOKENS}
    with_guesses, without = guessing.scheduler.state(), plain.scheduler.state()
    assert with_guesses.spec_decode_num_accepted_tokens_total > 0
    assert with_guesses.num_steps_total < without.num_steps_total
