"""Gemma models with a small pool for their windowed layers: tokens are `generate`'s, far past the window."""

import random

import pytest
import torch
import transformers

from splitserve.core.config import ModelConfig
from splitserve.core.layout import first_token_read
from splitserve.core.messages import GenerateRequest
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.loader import LoadedModel, load_model
from support.pair import PairWorld
from support.real_engine import real_engine
from support.reference import Reference, greedy_reference
from support.sim import ColocatedWorld
from support.tiny_models import make_tiny_model

WINDOW, CHUNK, NUM_TOKENS = 20, 16, 60
GREEDY = ResolvedSampling(max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, temperature=0.0)
LENGTHS = (1, 19, 21, 77, 130)


@pytest.fixture(scope="module", params=["gemma3", "gemma2"])
def gemma(request, tmp_path_factory) -> tuple[LoadedModel, Reference]:
    torch.set_num_threads(1)
    folder = make_tiny_model("gemma3", tmp_path_factory.mktemp("models") / request.param)
    shape = transformers.AutoConfig.from_pretrained(folder).to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    names += ("num_key_value_heads", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id", "layer_types")
    names += ("query_pre_attn_scalar",)
    # Gemma-2 has soft caps beside windows.
    kind = transformers.Gemma3TextConfig if request.param == "gemma3" else transformers.Gemma2Config
    config = kind(**{name: shape[name] for name in names}, sliding_window=WINDOW)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    loaded = load_model(ModelConfig(model=str(folder), dtype="float32", device="cpu", threads=1))
    assert {layer.window for layer in loaded.layers} == {WINDOW, None}
    return loaded, greedy_reference(model)


def prompts_of(vocab_size: int) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(vocab_size - 8) for _ in range(length)] for length in LENGTHS]


def settings_for(loaded: LoadedModel, *, page_size: int = 4, num_windows: int = 5, num_pages: int = 300) -> dict:
    """The windowed layers have room for a chunk and so many windows."""
    at_most = -(-WINDOW // page_size) + 2
    num_window_pages = num_windows * at_most + -(-CHUNK // page_size)
    engine = real_engine(loaded, num_window_pages=num_window_pages)
    return {"num_pages": num_pages, "page_size": page_size, "token_budget": CHUNK, "make_engine": engine}


@pytest.mark.parametrize("host_memory", [0, 1 << 30])
def test_one_worker_cold_warm_and_with_requests_that_give_way(gemma, host_memory):
    loaded, reference = gemma
    world = ColocatedWorld(**settings_for(loaded, num_windows=12), host_memory=host_memory)
    prompts = prompts_of(loaded.vocab_size)
    for name in ("cold", "warm"):
        for i, prompt in enumerate(prompts):
            world.submit(GenerateRequest(rid=f"{name}{i}", prompt_ids=prompt, params=GREEDY))
        turns = 0
        while not world.is_idle():
            world.turn()
            world.check()
            turns += 1
            if turns % 25 == 0 and len(world.running.running) > 1:
                victim = world.running.running.pop()
                world.running.retraction.retract(victim, world.clock.now())
        for i, prompt in enumerate(prompts):
            assert world.tokens(f"{name}{i}") == reference(prompt, NUM_TOKENS), (name, len(prompt))
    assert world.scheduler.state().num_retracted_requests_total > 0
    assert sum(world.cached(f"warm{i}") for i in range(len(prompts))) > 0
    world.check_nothing_is_held()


@pytest.mark.parametrize("decode_has_window_pages", [True, False])
def test_two_workers_move_what_decode_reads(gemma, decode_has_window_pages):
    loaded, reference = gemma
    decode = settings_for(loaded, page_size=6, num_windows=3)
    if not decode_has_window_pages:
        decode |= {"make_engine": real_engine(loaded), "prefix": False}
    world = PairWorld(3, prefill_settings=settings_for(loaded, num_windows=2), decode_settings=decode)
    prompts = prompts_of(loaded.vocab_size)
    row = world.prefill.manager.prefill_info().args.metadata_row_bytes
    layers = [(layer.num_kv_heads * (layer.k_dim + layer.v_dim) * 4, layer.window) for layer in loaded.layers]

    def send(room: int, prompt: list[int]) -> int:
        """Bytes of KV that were moved."""
        world.submit(f"r{room}", prompt, GREEDY, room=room)
        world.run_until_idle()
        assert world.decode.tokens(f"r{room}") == reference(prompt, NUM_TOKENS), len(prompt)
        stats = world.prefill.outputs[f"r{room}"][-1].transfer
        assert stats is not None
        return stats.num_bytes - row

    def read_by_decode(length: int) -> int:
        return sum(size * (length - first_token_read(window, length)) for size, window in layers)

    for room, prompt in enumerate(prompts, 1):
        assert send(room, prompt) == read_by_decode(len(prompt))
    # The next turn of a conversation: decode has its beginning, and is sent what is new.
    following = prompts[-1] + world.decode.tokens(f"r{len(prompts)}") + [1, 2, 3]
    moved, held = send(len(prompts) + 1, following), 186 if decode_has_window_pages else 0
    sizes = [size * (len(following) - max(held, first_token_read(window, len(following)))) for size, window in layers]
    assert moved == sum(sizes)
    world.check_nothing_is_held()
