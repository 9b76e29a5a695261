"""From hidden states to logits, by the model's own code, a few rows at a time.

A causal LM of transformers is a body (`model.model`) and a forward that slices the body's output, projects it and
scales or caps it as that model does. `LanguageHead` runs that same forward with the body replaced by one that returns
what it is given. So no model's scaling is re-written here, and logits exist only for the rows somebody asks for.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.modeling_outputs import MoeModelOutputWithPast


class _GivenHiddenStates(torch.nn.Module):
    """Stands where the body was."""

    def forward(self, inputs_embeds: torch.Tensor, **_: Any) -> Any:
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


class LanguageHead:
    """Shares its weights with the model; the model itself stays as it was."""

    def __init__(self, model: Any) -> None:
        self._forward = copy.copy(model)
        self._forward._modules = dict(model._modules)
        setattr(self._forward, model.base_model_prefix, _GivenHiddenStates())

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states [n, hidden_size], as float32 [n, vocab_size]."""
        logits: torch.Tensor = self._forward(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        return logits[0].float()
