"""Logits of a loaded model beside those of transformers' model with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from splitserve.core.config import ModelConfig
from splitserve.engine.loader import LoadedModel, load_model
from support.local_attention import LocalAttention

TOKENS = torch.arange(24)[None] * 7 % 250


def load(model: Path, **settings: Any) -> LoadedModel:
    return load_model(ModelConfig(model=str(model), device="cpu", threads=1, **settings))


def logprobs(model: Any, **given: Any) -> torch.Tensor:
    with torch.inference_mode():
        out = model(input_ids=TOKENS, position_ids=torch.arange(24)[None], use_cache=False, **given)
    found: torch.Tensor = out.logits[0].float().log_softmax(-1)
    return found


def assert_served_as(loaded: LoadedModel, reference: Any) -> None:
    """The kernels' logits are as near to the reference as the roundings of bfloat16 allow."""
    exact = logprobs(reference)
    found = logprobs(loaded.model, step_attention=LocalAttention())
    rounded = logprobs(reference.bfloat16())
    reference.float()
    error, plain_error = (float((x - exact).abs().mean()) for x in (found, rounded))
    assert error < 1.5 * plain_error + 1e-3


def assert_same_logprobs(loaded: LoadedModel, reference: Any) -> None:
    """The logits of a model in float32 are those of the reference."""
    found = logprobs(loaded.model, step_attention=LocalAttention())
    torch.testing.assert_close(found, logprobs(reference), rtol=1e-4, atol=1e-4)
