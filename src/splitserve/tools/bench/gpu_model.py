"""Model with a real one's shape and random weights, created on the device. The speed does not depend on the weights."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from splitserve.engine.attention import bridge
from splitserve.engine.loader import LoadedModel
from splitserve.engine.probe import probe


@dataclass(frozen=True, slots=True)
class ModelShape:
    # Name in reports.
    name: str
    # Arguments of transformers' LlamaConfig.
    config: dict[str, Any]


LLAMA_3_8B = ModelShape(
    "a random model of Llama 3 8B's shape",
    {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
)


def random_model(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Return a random model that is ready for the engine, without a file."""
    began = time.monotonic()
    bridge.register()
    config = transformers.LlamaConfig(**shape.config, attn_implementation=bridge.ATTENTION_NAME)
    with device:
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to(device).eval()
    return LoadedModel(
        model=model,
        name=shape.name,
        folder=Path(),
        device=device,
        dtype=dtype,
        dtype_name=str(dtype).removeprefix("torch."),
        context_length=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        eos_token_ids=frozenset(),
        layers=probe(model, shape.name),
        num_parameters=sum(p.numel() for p in model.parameters()),
        kernels=None,
        fingerprint="random",
        load_seconds=time.monotonic() - began,
    )


def weight_bytes(loaded: LoadedModel) -> int:
    """Return the bytes that every step reads: all weights but the input embeddings, where it reads only a few rows."""
    parameters = {id(p): p for p in loaded.model.parameters()}
    embedding = loaded.model.get_input_embeddings().weight
    if loaded.model.get_output_embeddings().weight is not embedding:
        del parameters[id(embedding)]
    return sum(p.numel() * p.element_size() for p in parameters.values())
