"""Mixtures of experts: logits equal transformers' for all shapes of weights and all implementations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from splitserve.core.config import ModelConfig
from splitserve.engine.attention.base import PagedBatch
from splitserve.engine.attention.torch_sdpa import TorchSdpaBackend
from splitserve.engine.loader import LoadedModel, load_model
from splitserve.engine.pool import KVPool, layout_for

NUM_TOKENS = 40


def folder_of(tmp_path: Path, expert_size: int) -> Path:
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=expert_size,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def logits_of(loaded: LoadedModel, tokens: torch.Tensor) -> torch.Tensor:
    layout = layout_for(loaded.layers, loaded.dtype_name, page_size=8, num_pages=5)
    batch = PagedBatch(*(torch.tensor([n]).numpy() for n in (0, NUM_TOKENS)), (torch.arange(5).numpy(),), 8)
    step: Any = TorchSdpaBackend(KVPool(layout, loaded.device)).plan(batch)
    positions = torch.from_numpy(batch.positions)[None]
    with torch.inference_mode():
        out: torch.Tensor = loaded.model(
            input_ids=tokens, position_ids=positions, use_cache=False, step_attention=step
        ).logits
    return out


@pytest.mark.parametrize(
    ("expert_size", "dtype", "implementation"),
    [
        (24, "float32", "grouped_mm"),
        # 88 bytes a row.
        (22, "float32", "eager"),
        (24, "bfloat16", "grouped_mm"),
        # 40 bytes.
        (20, "bfloat16", "eager"),
    ],
)
def test_logits_equal_transformers_eager(expert_size: int, dtype: str, implementation: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, expert_size)
    loaded = load_model(ModelConfig(model=str(folder), device="cpu", threads=1, dtype=dtype, kernels="torch"))
    assert loaded.model.config._experts_implementation == implementation
    tokens = torch.randint(0, 64, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.inference_mode():
        expected = reference(tokens).logits
    atol = 1e-4 if dtype == "float32" else 0.1 * float(expected.abs().max())
    torch.testing.assert_close(logits_of(loaded, tokens), expected, rtol=0, atol=atol)
