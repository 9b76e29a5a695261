"""Models of the parity tests, as our engine loads them and as transformers runs them."""

import pytest
import torch
import transformers

from splitserve.core.config import ModelConfig
from splitserve.engine.kernels.library import find_library
from splitserve.engine.loader import LoadedModel, load_model
from support.reference import Reference, greedy_reference
from support.tiny_models import TinyKind, make_tiny_model

# One of each kind of KV cache and of step; the engine's tests have the others.
KINDS: tuple[TinyKind, ...] = ("llama", "qwen3", "gemma3", "mixtral", "deepseek_v3")


@pytest.fixture(scope="session", params=KINDS)
def tiny(request, tmp_path_factory) -> tuple[LoadedModel, Reference]:
    """A tiny model as our engine loads it, and transformers' answers."""
    torch.set_num_threads(1)
    folder = make_tiny_model(request.param, tmp_path_factory.mktemp("models") / request.param)
    loaded = load_model(ModelConfig(model=str(folder), dtype="float32", device="cpu", threads=1))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return loaded, greedy_reference(model)


@pytest.fixture(scope="session", params=["llama bf16", "gemma3 bf16", "llama w8a8"])
def served(request, tmp_path_factory) -> LoadedModel:
    """A tiny model in a dtype that our kernels serve."""
    if find_library() is None:
        pytest.skip("installed without a C compiler")
    torch.set_num_threads(1)
    kind, dtype = request.param.split()
    folder = make_tiny_model(kind, tmp_path_factory.mktemp("served") / kind, dtype=torch.bfloat16)
    quantization = None if dtype == "bf16" else dtype
    loaded = load_model(ModelConfig(model=str(folder), device="cpu", threads=1, quantization=quantization))
    assert loaded.dtype_name == "bfloat16"
    return loaded
