"""Body and head of a causal LM with a `DecoderStack`, without the code of transformers around its modules.

In a decode step of one request that code takes longer than two layers. The modules are those of the model, so the
numbers are the same.
"""

from __future__ import annotations

import logging
from typing import Any, Self

import torch

from splitserve.engine.attention.base import AttentionParams, StepAttention
from splitserve.engine.kernels.stack import DecoderStack, Norm
from splitserve.engine.kernels.weights import PackedLinear
from splitserve.engine.probe import LanguageHead, run_body

logger = logging.getLogger(__name__)

# Models of transformers that compute: embedding, decoder layers with the same rotary positions, norm, linear head.
_PLAIN = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
# Kinds of rotary positions that depend on the longest sequence of a step.
_LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
_MIN_POSITIONS = 1024
# Tokens of the comparison.
_NUM_COMPARED = 3
# Attribute of an admitted model.
_ADMITTED = "is_plain_decoder"


class PlainDecoder:
    """Functions of one model, which must not lose its weights meanwhile. Not for two threads at a time."""

    def __init__(self, model: Any) -> None:
        self._model, self._base = model, model.base_model
        self._rotary = _RotaryTable(self._base.rotary_emb)

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Return the functions of a model. None: `admit` did not admit it."""
        return cls(model) if getattr(model, _ADMITTED, False) else None

    @classmethod
    def admit(cls, model: Any, *, is_compared: bool) -> bool:
        """Admit a model with kernels in its layers if its functions compute what transformers' code does.

        `is_compared`: an earlier call for this model has found that they do.
        """
        setattr(model, _ADMITTED, _is_plain(model) and (is_compared or _is_same(model, cls(model))))
        return bool(getattr(model, _ADMITTED))

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


def _is_plain(model: Any) -> bool:
    if type(model).__name__ not in _PLAIN:
        return False
    base = model.base_model
    return (
        len(base.layers) == 1
        and isinstance(base.layers[0], DecoderStack)
        and isinstance(base.norm, Norm)
        and base.rotary_emb.rope_type not in _LENGTH_DEPENDENT
    )


class _OwnValues:
    """StepAttention with an output that depends on each of its inputs."""

    def forward(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        return query * params.scaling + (key + value).repeat_interleave(query.shape[1] // key.shape[1], dim=1)


@torch.inference_mode()
def _is_same(model: Any, decoder: PlainDecoder) -> bool:
    numbers = torch.arange(_NUM_COMPARED)[None]
    expected = run_body(model, numbers, 2 * numbers, _OwnValues())
    found = decoder.body(numbers, 2 * numbers, _OwnValues())
    if torch.equal(found, expected) and torch.equal(decoder.head(found), LanguageHead(model)(expected)):
        return True
    logger.warning("%s is computed by transformers' code: ours gives other numbers", type(model).__name__)
    return False


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
