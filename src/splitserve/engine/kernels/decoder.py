"""Body and head of a causal LM with a `DecoderStack`, without the code of transformers around its modules.

In a decode step of one request that code takes longer than two layers. The modules are those of the model, so the
numbers are the same.
"""

from __future__ import annotations

from typing import Any, Self

import torch

from splitserve.engine.attention.base import StepAttention
from splitserve.engine.kernels.stack import DecoderStack, Norm
from splitserve.engine.kernels.weights import PackedLinear
from splitserve.engine.probe import run_body

# Models of transformers that compute: embedding, decoder layers with the same rotary positions, norm, linear head.
_PLAIN = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
# Kinds of rotary positions that depend on the longest sequence of a step.
_LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
_MIN_POSITIONS = 1024


class PlainDecoder:
    """Functions of one model, which must not lose its weights meanwhile. Not for two threads at a time."""

    def __init__(self, model: Any) -> None:
        self._model, self._base = model, model.base_model
        self._rotary = _RotaryTable(self._base.rotary_emb)

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Return the functions of a model. None: it is of another kind, or layers of it were not replaced."""
        base = model.base_model
        layers = list(getattr(base, "layers", ()))
        is_plain = (
            type(model).__name__ in _PLAIN
            and isinstance(base.norm, Norm)
            and len(layers) == 1
            and isinstance(layers[0], DecoderStack)
            and base.rotary_emb.rope_type not in _LENGTH_DEPENDENT
        )
        return cls(model) if is_plain else None

    def body(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention) -> torch.Tensor:
        """Return what `run_body` does. The next call may overwrite it."""
        # Not by attribute, which takes longer.
        modules = self._base._modules
        if self._base._forward_hooks or len(modules["layers"]) > 1:
            # A draft head captures the states of some layers.
            return run_body(self._model, token_ids, positions, attention)
        hidden = modules["embed_tokens"](token_ids)
        rotations = self._rotary.rows(positions[0], hidden)
        states: torch.Tensor = modules["layers"][0].forward(
            hidden, position_embeddings=rotations, step_attention=attention, norm=modules["norm"]
        )
        return states[0]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states [n, hidden_size], as float32 [n, vocab_size]."""
        layer = self._model.lm_head
        logits: torch.Tensor = layer.widened(hidden) if isinstance(layer, PackedLinear) else layer(hidden).float()
        return logits


class _RotaryTable:
    """Cosines and sines of all positions up to the largest so far."""

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        # [positions, head_dim] each.
        self._cos, self._sin = torch.empty(0), torch.empty(0)

    def rows(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return those of positions [T], [1, T, head_dim] each, in the dtype of `like`."""
        largest = int(positions.max())
        if largest >= len(self._cos):
            size = max(_MIN_POSITIONS, 1 << largest.bit_length())
            cos, sin = self._rotary(like, torch.arange(size)[None])
            self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()
        return self._cos.index_select(0, positions)[None], self._sin.index_select(0, positions)[None]
