"""Draft heads inside a checkpoint: the layers for multi-token prediction (MTP) of DeepSeek-V3, Qwen and similar models.

A linear layer joins the normalized embedding of the next token and the normalized final state. Then follow a decoder
layer of the model's own kind, a norm, and the model's language head. In the format of DeepSeek-V3 the tensors follow
those of the model's N layers: `model.layers.N.`. In that of Qwen their names begin with `mtp.`.

The decoder layer is computed by the model's own class with a single layer. So its attention, its experts and its names
of weights are those of transformers.
"""

from __future__ import annotations

import copy
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from splitserve.core.errors import UnsupportedModelError, clause
from splitserve.engine.attention.base import ATTENTION_NAME, StepAttention, register_attention
from splitserve.engine.draft_fit import MTP_NAMES, MTP_REMEDY, QWEN_PREFIX, mtp_prefix
from splitserve.engine.heads.head import DraftHead
from splitserve.engine.parallel.checkpoint import Checkpoint
from splitserve.engine.probe import LanguageHead
from splitserve.engine.whole_model import adapt

# Rows of the unused embedding and head of the single-layer model.
_UNUSED_VOCAB = 8
_NORM = "shared_head.norm.weight"
_COMBINER = tuple(name for name in MTP_NAMES if name != _NORM)
# Prefix of the first decoder layer in Qwen's format.
_QWEN_LAYER = "layers.0."
# Copies of the served model's embedding and language head.
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")
# Fields of a config with an entry per layer.
_PER_LAYER = ("layer_types", "mlp_layer_types")


class MtpHead(DraftHead):
    """The first MTP layer of a checkpoint. Its own states are the input of the next proposal."""

    def __init__(self, body: Any, target: Any) -> None:
        """`body`: model of transformers with one layer, without language head."""
        super().__init__(body.config, target)
        size, norm = body.config.hidden_size, type(body.norm)
        self.enorm = norm(size, eps=body.config.rms_norm_eps)
        self.hnorm = norm(size, eps=body.config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.body = body
        self._language_head = LanguageHead(target)

    def after_layers(self) -> tuple[int, ...]:
        return ()

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def step(
        self, token_ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        joined = self.eh_proj(torch.cat((self.enorm(self.embed(token_ids)), self.hnorm(states)), dim=-1))
        out = self.body(
            inputs_embeds=joined[None], position_ids=positions[None], use_cache=False, step_attention=attention
        )
        found: torch.Tensor = out.last_hidden_state[0]
        return found

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._language_head(states)


def load_mtp(folder: Path, name: str, target: Any, dtype: torch.dtype, device: torch.device) -> MtpHead:
    """Load the first MTP layer of the checkpoint in `folder`, which is that of the served causal LM `target`.

    Raises ModelLoadError.
    """
    config = target.config.get_text_config()
    tensors = _tensors_of(folder, config, name)
    combiner = {key: tensors.pop(key) for key in _COMBINER}
    head = MtpHead(_body_of(target, config, tensors, dtype, name), target)
    head.load_state_dict(combiner, strict=False)
    for part in (head.enorm, head.hnorm, head.eh_proj):
        part.to(dtype=dtype)
    return head.to(device=device).eval()


def _tensors_of(folder: Path, config: Any, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of the first MTP layer, by their names in the format of DeepSeek-V3, without prefix."""
    prefix = mtp_prefix(folder, config.to_dict(), name)
    with closing(Checkpoint(folder)) as files:
        names = [name for name in files.names() if name.startswith(prefix)]
        tensors = {name.removeprefix(prefix): files.read(name, None) for name in names}
    if prefix != QWEN_PREFIX:
        return tensors
    layer = {k.removeprefix(_QWEN_LAYER): tensor for k, tensor in tensors.items() if k.startswith(_QWEN_LAYER)}
    return {ours: tensors[theirs] for ours, theirs in MTP_NAMES.items()} | layer


def _body_of(target: Any, config: Any, tensors: dict[str, torch.Tensor], dtype: torch.dtype, name: str) -> Any:
    """Return a model of the target's class with one layer, which has these tensors."""
    own = copy.deepcopy(config)
    for field in _PER_LAYER:
        if kinds := getattr(own, field, None):
            setattr(own, field, [kinds[-1]])
    own.num_hidden_layers, own.vocab_size, own.pad_token_id, own.tie_word_embeddings = 1, _UNUSED_VOCAB, None, False
    if hasattr(own, "first_k_dense_replace"):
        # MTP layers have experts, as the last layers of the model.
        own.first_k_dense_replace = 0
    if hasattr(own, "mlp_only_layers"):
        # The checkpoint's layer decides: Qwen's config lists layers of the model only.
        has_experts = any(".experts." in key for key in tensors)
        own.mlp_only_layers, own.decoder_sparse_step = [] if has_experts else [0], 1
    unused = torch.zeros(_UNUSED_VOCAB, config.hidden_size, dtype=dtype)
    state = {"model.embed_tokens.weight": unused, "lm_head.weight": unused.clone()}
    state["model.norm.weight"] = tensors[_NORM]
    ours = {key: tensor for key, tensor in tensors.items() if not key.startswith("shared_head.") and key not in _SHARED}
    state |= {f"model.layers.0.{key}": tensor for key, tensor in ours.items()}
    register_attention()
    transformers_logging.disable_progress_bar()
    try:
        model, found = type(target).from_pretrained(
            None,
            config=own,
            state_dict=state,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
        )
    except Exception as error:
        raise UnsupportedModelError(
            f"The MTP layer of model {name} cannot be loaded: {type(error).__name__}: {clause(error)}. {MTP_REMEDY}"
        ) from error
    if wrong := sorted((*found["missing_keys"], *found["unexpected_keys"])):
        raise UnsupportedModelError(
            f"The MTP layer of model {name} has other tensors than the model's layers: {wrong[0]}. {MTP_REMEDY}"
        )
    adapt(model, name)
    return model.base_model.eval()
