"""Hidden states of whole workers: those of transformers' own forward, in every mode."""

import random

import numpy as np
import pytest
import torch
import transformers

from splitserve.core.messages import GenerateRequest
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.probe import LanguageHead
from splitserve.scheduler.speculation import NgramProposer
from support.pair import PairWorld
from support.real_engine import real_engine
from support.sim import ColocatedWorld, SimWorker

NUM_OUTPUT_TOKENS = 24
GREEDY = ResolvedSampling(max_new_tokens=NUM_OUTPUT_TOKENS, min_new_tokens=NUM_OUTPUT_TOKENS, temperature=0.0)
LENGTHS = (1, 16, 17, 31, 64, 65, 130)
# Prompts in chunks.
SETTINGS = {"page_size": 16, "token_budget": 48}
ROOMY = {"num_pages": 512}
# The longest request takes 39 pages of these. Host memory for few pages: some KV is copied, some is computed again.
TIGHT = {"page_size": 4, "num_pages": 40, "num_reserved_decode_tokens": 1, "host_memory": 24 << 10}


def prompts_of(vocab_size: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(vocab_size - 8) for _ in range(length)] for length in LENGTHS]


def colocated(loaded, **settings) -> SimWorker:
    world = ColocatedWorld(**{**SETTINGS, **ROOMY, "make_engine": real_engine(loaded), **settings})
    for i, prompt in enumerate(prompts_of(loaded.vocab_size)):
        world.submit(GenerateRequest(rid=f"r{i}", prompt_ids=prompt, params=GREEDY, return_hidden_states=True))
    world.run_until_idle()
    world.check_nothing_is_held()
    return world


def disaggregated(loaded, **settings) -> SimWorker:
    common = {**SETTINGS, **ROOMY, "make_engine": real_engine(loaded), "hidden_size": loaded.hidden_size}
    world = PairWorld(5, prefill_settings=common, decode_settings=common | settings, num_slots=32)
    for i, prompt in enumerate(prompts_of(loaded.vocab_size)):
        world.submit(f"r{i}", prompt, GREEDY, room=i + 1, return_hidden_states=True)
    world.run_until_idle()
    world.check_nothing_is_held()
    return world.decode


RUNS = {
    "disaggregated": lambda loaded: disaggregated(loaded),
    "overlapped": lambda loaded: colocated(loaded, late_steps=random.Random(2)),
    "speculating": lambda loaded: disaggregated(loaded, proposer=NgramProposer(4)),
    "retracting": lambda loaded: colocated(loaded, **TIGHT),
    "retracting, disaggregated": lambda loaded: disaggregated(loaded, **TIGHT),
}


@pytest.fixture(scope="module")
def expected(tiny):
    """Tokens and hidden states of transformers' forward for each prompt."""
    loaded, reference = tiny
    model = transformers.AutoModelForCausalLM.from_pretrained(loaded.folder, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts_of(loaded.vocab_size):
        output = reference(prompt, NUM_OUTPUT_TOKENS)
        with torch.inference_mode():
            states = model(torch.tensor([prompt + output[:-1]]), output_hidden_states=True).hidden_states[-1]
        answers.append((output, states[0, len(prompt) - 1 :].numpy()))
    return answers


def test_hidden_states_equal_those_of_transformers(tiny, expected):
    check_states(tiny[0], expected, colocated)


# A run treats the states of all models alike. In the order of the fixture's kinds, so that each is made once.
@pytest.mark.parametrize(
    "tiny",
    ["llama", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("qwen3", "gemma3", "mixtral")), "deepseek_v3"],
    indirect=True,
)
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_hidden_states_in_every_mode_equal_those_of_transformers(tiny, expected, run):
    check_states(tiny[0], expected, run)


def check_states(loaded, expected, run):
    worker = run(loaded)
    for i, (output, states) in enumerate(expected):
        assert worker.tokens(f"r{i}") == output
        # One for each output token: the first from the last token of the prompt.
        found = np.array(worker.hidden_states(f"r{i}"), np.float32)
        assert found.shape == (NUM_OUTPUT_TOKENS, loaded.hidden_size)
        np.testing.assert_allclose(found, states, rtol=1e-3, atol=1e-3)
    if worker.settings.num_pages == TIGHT["num_pages"]:
        assert worker.scheduler.state().num_retracted_requests_total > 0


def test_states_of_our_kernels_are_those_that_the_tokens_were_sampled_from(served):
    one, two = colocated(served), disaggregated(served)
    head = LanguageHead(served.model)
    for i in range(len(LENGTHS)):
        states = np.array(one.hidden_states(f"r{i}"), np.float32)
        with torch.inference_mode():
            logits = head(torch.from_numpy(states).to(served.dtype))
            # No answer ends before its last token.
            logits[:, list(served.eos_token_ids)] = -torch.inf
        assert logits.argmax(-1).tolist() == one.tokens(f"r{i}") == two.tokens(f"r{i}")
        assert states.tolist() == two.hidden_states(f"r{i}")
