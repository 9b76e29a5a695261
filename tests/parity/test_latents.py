"""Workers with a KV cache of latents: they transfer latents, and the answers are the model's own."""

import random
from pathlib import Path

import pytest
import torch
import transformers

from splitserve.core.config import ModelConfig
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.loader import load_model
from splitserve.scheduler.speculation import NgramProposer
from splitserve.transfer.metadata import MetadataBuffers
from support.pair import PairWorld
from support.real_engine import real_engine
from support.reference import greedy_reference
from support.tiny_models import MLA_KINDS, make_tiny_model

NUM_NEW = 12
GREEDY = ResolvedSampling(max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, temperature=0.0)
# Elements of a token in one layer: a latent of 32 and 8 with positions; three layers of float32.
BYTES_PER_TOKEN = 3 * (32 + 8) * 4


@pytest.fixture(scope="module", params=MLA_KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.mark.parametrize("decode_page_size", [16, 5])
def test_a_hand_over_moves_the_latents_of_its_tokens_and_no_more(model: Path, decode_page_size: int) -> None:
    loaded = load_model(ModelConfig(model=str(model), device="cpu", threads=1))
    reference = greedy_reference(transformers.AutoModelForCausalLM.from_pretrained(model).eval())
    settings = {"num_pages": 128, "token_budget": 32, "make_engine": real_engine(loaded)}
    # Proposals: several queries of a request in one step.
    decode = settings | {"page_size": decode_page_size, "num_pages": 300, "proposer": NgramProposer(4)}
    world = PairWorld(3, prefill_settings=settings | {"page_size": 16}, decode_settings=decode)
    rng = random.Random(2)
    prompts = [[rng.randrange(250) for _ in range(length)] * 2 for length in (1, 8, 20, 50)]
    for i, prompt in enumerate(prompts):
        world.submit(f"r{i}", prompt, GREEDY, room=i + 1)
    world.run_until_idle()
    for i, prompt in enumerate(prompts):
        assert world.decode.tokens(f"r{i}") == reference(prompt, NUM_NEW)
        (stats,) = [output.transfer for output in world.prefill.outputs[f"r{i}"] if output.transfer is not None]
        assert stats.num_bytes - MetadataBuffers(1).row_bytes == len(prompt) * BYTES_PER_TOKEN
    world.check_nothing_is_held()
