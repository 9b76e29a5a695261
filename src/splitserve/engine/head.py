"""The language head: from hidden states to logits, by the model's own code, a few rows at a time.

A causal LM of transformers is a body (`model.base_model`) and a forward that projects the body's output to logits and
scales or caps them as that model does. `LanguageHead` runs that same forward with the body replaced by one that returns
its argument. So no model's scaling is written a second time here, and logits are computed only for requested rows.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.modeling_outputs import MoeModelOutputWithPast


class _GivenHiddenStates(torch.nn.Module):
    """Replacement of the body."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Return the output class with the most fields that any model's forward passes on."""
        out = MoeModelOutputWithPast(last_hidden_state=self.hidden)
        out.cross_attentions = None
        return out


class LanguageHead:
    """The head of a model. Shares its weights; the model itself is unchanged. Not for two threads at a time."""

    def __init__(self, model: Any) -> None:
        self._body = _GivenHiddenStates()
        self._forward = copy.copy(model)
        self._forward._modules = dict(model._modules)
        setattr(self._forward, model.base_model_prefix, self._body)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states [n, hidden_size], as float32 [n, vocab_size]."""
        self._body.hidden = hidden.unsqueeze(0)
        try:
            logits: torch.Tensor = self._forward(input_ids=None, use_cache=False).logits
        finally:
            self._body.hidden = None
        return logits[0].float()
