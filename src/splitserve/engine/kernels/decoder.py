"""Body and head of a causal LM with a `DecoderStack`, without the code of transformers around its modules.

In a decode step of one request that code takes longer than two layers. The modules are those of the model, so the
numbers are the same.
"""

from __future__ import annotations

import logging
from typing import Any, Self

import torch

from splitserve.engine.attention.base import StepAttention
from splitserve.engine.kernels.stack import DecoderStack, Norm
from splitserve.engine.kernels.weights import PackedLinear
from splitserve.engine.probe import LanguageHead, OwnValues, depends_on_length, run_body

logger = logging.getLogger(__name__)

# Models of transformers that compute: embedding, decoder layers with the same rotary positions, norm, linear head.
_PLAIN = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
# Positions with cosines and sines in a table: 4 MB with heads of 128. Steps with later ones take longer anyway.
_NUM_POSITIONS = 8192
_CHECKED_TOKENS = 3


class PlainDecoder:
    """Body and head of one model. If it gets other weights, create another one. Not for two threads at a time."""

    def __init__(self, model: Any) -> None:
        self._model, self._base = model, model.base_model
        self._rotary = _RotaryTable(self._base.rotary_emb)

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Return the functions of a model with kernels in its layers. None: transformers' code must compute it."""
        return cls(model) if getattr(model, "is_plain_decoder", False) else None

    def body(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention) -> torch.Tensor:
        """Return what `run_body` does. The next call may overwrite it."""
        # An attribute of a module takes longer to read.
        modules = self._base._modules
        layers = modules["layers"]
        if self._base._forward_hooks or len(layers) > 1 or layers[0]._forward_hooks:
            # A draft head captures states.
            return run_body(self._model, token_ids, positions, attention)
        hidden = modules["embed_tokens"](token_ids)
        rotations = self._rotary.rows(positions[0], hidden)
        states: torch.Tensor = layers[0].forward(
            hidden, position_embeddings=rotations, step_attention=attention, norm=modules["norm"]
        )
        return states[0]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of contiguous hidden states [n, hidden_size], as float32 [n, vocab_size]."""
        layer = self._model.lm_head
        return layer.widened(hidden) if isinstance(layer, PackedLinear) else layer(hidden).float()


def is_plain_decoder(model: Any) -> bool:
    """Return whether PlainDecoder computes what transformers' code does, by a comparison. Replace the layers before."""
    base: Any = getattr(model, "base_model", None)
    return (
        type(model).__name__ in _PLAIN
        and len(base.layers) == 1
        and isinstance(base.layers[0], DecoderStack)
        and isinstance(base.norm, Norm)
        and not depends_on_length(base.rotary_emb.config.rope_parameters)
        and _is_same(model)
    )


@torch.inference_mode()
def _is_same(model: Any) -> bool:
    decoder, numbers = PlainDecoder(model), torch.arange(_CHECKED_TOKENS)[None]
    expected = run_body(model, numbers, 2 * numbers, OwnValues())
    found = decoder.body(numbers, 2 * numbers, OwnValues())
    if torch.equal(found, expected) and torch.equal(decoder.head(found), LanguageHead(model)(expected)):
        return True
    logger.warning("%s is computed by transformers' code: ours gives other numbers", type(model).__name__)
    return False


class _RotaryTable:
    """Cosines and sines of the first positions, computed by the model's own module at the first step."""

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        # [positions, head_dim] each.
        self._cos, self._sin = torch.empty(0), torch.empty(0)

    def rows(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return those of positions [T], [1, T, head_dim] each, in the dtype of `like`."""
        if int(positions.max()) >= _NUM_POSITIONS:
            cos, sin = self._rotary(like, positions[None])
            return cos, sin
        if not len(self._cos):
            cos, sin = self._rotary(like, torch.arange(_NUM_POSITIONS)[None])
            self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()
        return self._cos.index_select(0, positions)[None], self._sin.index_select(0, positions)[None]
