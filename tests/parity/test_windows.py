"""A model with sliding windows in all layers, in pools that hold little more than these: tokens are `generate`'s."""

import random

import pytest
import torch
import transformers

from splitserve.core.config import ModelConfig
from splitserve.core.messages import GenerateRequest
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.loader import LoadedModel, load_model
from support.pair import PairWorld
from support.real_engine import real_engine
from support.reference import Reference, greedy_reference
from support.sim import ColocatedWorld, SimWorker
from support.tiny_models import make_tiny_model

WINDOW, PAGE_SIZE, NUM_TOKENS = 20, 4, 80
GREEDY = ResolvedSampling(max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, temperature=0.0)
LENGTHS = (1, 7, 19, 20, 21, 40, 77, 130)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory) -> tuple[LoadedModel, Reference]:
    torch.set_num_threads(1)
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("models") / "mistral")
    # The same shapes and tokenizer.
    shape = transformers.AutoConfig.from_pretrained(folder).to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    names += ("num_key_value_heads", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id")
    config = transformers.MistralConfig(**{name: shape[name] for name in names}, sliding_window=WINDOW)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    loaded = load_model(ModelConfig(model=str(folder), dtype="float32", device="cpu", threads=1))
    return loaded, greedy_reference(model)


def prompts_of(vocab_size: int) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(vocab_size - 8) for _ in range(length)] for length in LENGTHS]


class Watched:
    """Pages in use, at most."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self.most = 0

    def look(self) -> None:
        pages = self._worker.cache.pages
        self.most = max(self.most, pages.num_pages - pages.available())


def settings_for(loaded: LoadedModel, *, prefix: bool) -> dict:
    return {
        "num_pages": 300,
        "page_size": PAGE_SIZE,
        "token_budget": 16,
        "prefix": prefix,
        "make_engine": real_engine(loaded),
    }


@pytest.mark.parametrize("prefix", [False, True])
def test_one_worker(mistral, prefix):
    loaded, reference = mistral
    world = ColocatedWorld(**settings_for(loaded, prefix=prefix))
    assert world.cache.window == WINDOW
    prompts, watched = prompts_of(loaded.vocab_size), Watched(world)
    for i, prompt in enumerate(prompts):
        world.submit(GenerateRequest(rid=f"r{i}", prompt_ids=prompt, params=GREEDY))
    while not world.is_idle():
        world.turn()
        watched.look()
    for i, prompt in enumerate(prompts):
        assert world.tokens(f"r{i}") == reference(prompt, NUM_TOKENS), len(prompt)
    if not prefix:
        # 955 tokens at the end would be 240 pages; of a window there are seven at most, and four of a chunk.
        assert watched.most <= len(prompts) * 11
    world.check_nothing_is_held()


def test_two_workers(mistral):
    loaded, reference = mistral
    settings = settings_for(loaded, prefix=False)
    world = PairWorld(3, prefill_settings=settings, decode_settings=settings | {"page_size": 6, "num_pages": 200})
    prompts, watched = prompts_of(loaded.vocab_size), Watched(world.prefill)
    # Alone: in the other's pages, only what it will read arrives.
    for i, prompt in enumerate(prompts):
        world.submit(f"r{i}", prompt, GREEDY, room=i)
        while not (world.prefill.is_idle() and world.decode.is_idle()):
            world.happen()
            watched.look()
        assert world.decode.tokens(f"r{i}") == reference(prompt, NUM_TOKENS), len(prompt)
    assert watched.most <= 11
    world.check_nothing_is_held()
