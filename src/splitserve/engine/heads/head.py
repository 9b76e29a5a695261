"""The contract of a draft head: one decoder layer that continues from hidden states of the served model.

A head computes one slot per position. Slot i reads the hidden states of token i and the embedding of token i + 1. Its
output is the head's state, from which logits of token i + 2 follow. For the next proposal the head's own state takes
the place of the hidden states, because the served model has not computed that token yet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from splitserve.core.errors import UnsupportedModelError
from splitserve.engine.attention.base import StepAttention
from splitserve.engine.heads.states import HiddenStateTap
from splitserve.engine.kernels.layers import replace_layers
from splitserve.engine.kernels.library import KernelLibrary
from splitserve.engine.kernels.weights import Kind
from splitserve.engine.probe import PROBE_TOKENS, LayerShape, Recorder

logger = logging.getLogger(__name__)


class DraftHead(torch.nn.Module):
    """Base of draft heads. Weights are in the device and dtype of the served model."""

    def __init__(self, config: Any, target: Any) -> None:
        """`config`: of the head's layer, in transformers' form. `target`: the served causal LM."""
        super().__init__()
        self.config = config
        # Not a child: the embedding is the served model's.
        self._embedding = [target.get_input_embeddings()]
        self._tap: HiddenStateTap | None = None

    def tap(self, target: Any) -> HiddenStateTap:
        """Return the capture of the states of `target` that the head reads, the same in each call.

        Raises ModelLoadError.
        """
        if self._tap is None:
            self._tap = HiddenStateTap(target, self.after_layers())
        return self._tap

    @property
    def state_size(self) -> int:
        """Return the width of the head's states."""
        return int(self.config.hidden_size)

    def after_layers(self) -> Sequence[int]:
        """Return the layers of the served model with outputs that the head reads. Empty: it reads the final states."""
        raise NotImplementedError

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Return hidden states of the served model [T, width] in the form of the head's own states."""
        raise NotImplementedError

    def step(
        self, token_ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """Compute T slots, store their KV, and return the head's states [T, state_size].

        token_ids, positions: [T]. `states` [T, state_size]: of the tokens before `token_ids`, from `fuse` or from an
        earlier call.
        """
        raise NotImplementedError

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits over the served model's vocabulary, [n, vocab_size] float32. Tokens without a row: -inf."""
        raise NotImplementedError

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens [T], by the served model."""
        embedded: torch.Tensor = self._embedding[0](token_ids)
        return embedded


def probe_head(head: DraftHead, name: str, device: torch.device, dtype: torch.dtype) -> tuple[LayerShape, ...]:
    """Return the KV shape of the head's layer, found by one tiny step. Raises ModelLoadError."""
    recorder = Recorder()
    with torch.inference_mode():
        token_ids = torch.zeros(PROBE_TOKENS, dtype=torch.int64, device=device)
        states = torch.zeros(PROBE_TOKENS, head.state_size, dtype=dtype, device=device)
        head.logits(head.step(token_ids, states, torch.arange(PROBE_TOKENS, device=device), recorder))
    if [shape.layer for shape in recorder.layers] != [0]:
        raise UnsupportedModelError(f"Draft head {name} cannot be served: it must have one attention layer, layer 0.")
    return tuple(recorder.layers)


def use_kernels_in_head(head: DraftHead, layers: Sequence[LayerShape], kernels: KernelLibrary | None) -> None:
    """Replace layers of the head by the kernels of the served model, in 16 bits. None: torch computes all of them."""
    if kernels is not None:
        replace_layers(head, layers, kernels, Kind.BF16)
