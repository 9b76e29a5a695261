"""Draft heads of EAGLE-3 checkpoints (`LlamaForCausalLMEagle3`).

`fc` joins the outputs of a low, a middle and a high layer of the served model. The decoder layer is Llama's, except
that its attention reads the normalized embedding beside the normalized state. The head has a norm and a language head
of its own, over `draft_vocab_size` tokens: `d2t` maps each to a token of the served model.

Names and fields are those of the format: docs/speculation.md lists them.
"""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from splitserve.core.errors import UnsupportedModelError, clause
from splitserve.engine.attention.base import ATTENTION_NAME, StepAttention, register_attention
from splitserve.engine.draft_fit import check_eagle3
from splitserve.engine.heads.head import DraftHead
from splitserve.engine.parallel.checkpoint import Checkpoint

NUM_READ_LAYERS = 3
# Tensors that the head does not need: a mask of the tokens in `d2t`, and buffers that follow from the config.
_UNUSED = ("t2d", "rotary_emb.inv_freq")


class Eagle3Layer(nn.Module):
    """The decoder layer of the head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * size, old.out_features, bias=old.bias is not None))
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(size, epsilon)
        self.hidden_norm = LlamaRMSNorm(size, epsilon)
        self.post_attention_layernorm = LlamaRMSNorm(size, epsilon)
        # Whether the residual is the normalized state.
        self._norm_before_residual = bool(getattr(config, "norm_before_residual", False))

    def forward(self, embedded: torch.Tensor, states: torch.Tensor, **given: Any) -> torch.Tensor:
        normed = self.hidden_norm(states)
        residual = normed if self._norm_before_residual else states
        attended, _ = self.self_attn(torch.cat((self.input_layernorm(embedded), normed), dim=-1), **given)
        middle = residual + attended
        out: torch.Tensor = middle + self.mlp(self.post_attention_layernorm(middle))
        return out


class Eagle3Head(DraftHead):
    """A head in EAGLE-3's format."""

    def __init__(self, config: LlamaConfig, target: Any, *, has_embedding: bool = False) -> None:
        """`has_embedding`: the checkpoint has an embedding of its own."""
        super().__init__(config, target)
        served = target.config.get_text_config()
        self._vocab_size = int(served.vocab_size)
        draft_vocab_size = int(getattr(config, "draft_vocab_size", None) or self._vocab_size)
        self._layers = layers_to_read(config, served.num_hidden_layers)
        self.fc = nn.Linear(NUM_READ_LAYERS * served.hidden_size, config.hidden_size, bias=False)
        self.layer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        # Distance from each token of the head to the token of the served model.
        self.d2t: torch.Tensor
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
        if has_embedding:
            self.embed_tokens = nn.Embedding(self._vocab_size, config.hidden_size)
            self._embedding = [self.embed_tokens]

    def after_layers(self) -> tuple[int, ...]:
        return self._layers

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        fused: torch.Tensor = self.fc(states)
        return fused

    def step(
        self, token_ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        states = states[None]
        given = {"position_embeddings": self.rotary(states, positions[None]), "step_attention": attention}
        out: torch.Tensor = self.layer(self.embed(token_ids)[None], states, **given)
        return out[0]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        own: torch.Tensor = self.lm_head(self.norm(states)).float()
        rows = torch.arange(own.shape[-1], device=own.device) + self.d2t
        logits = own.new_full((len(own), self._vocab_size), -torch.inf)
        return logits.index_copy_(1, rows, own)


def layers_to_read(config: Any, num_layers: int) -> tuple[int, ...]:
    """Return the layers of the served model with outputs that the head reads.

    The field in `eagle_config` counts outputs of layers. The field outside it counts states: 0 is the embedding.
    """
    outputs = (getattr(config, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
    if outputs:
        return tuple(int(layer) for layer in outputs)
    found = getattr(config, "eagle_aux_hidden_state_layer_ids", None) or (2, num_layers // 2, num_layers - 3)
    return tuple(int(layer) - 1 for layer in found)


def load_eagle3(folder: Path, name: str, target: Any, dtype: torch.dtype, device: torch.device) -> Eagle3Head:
    """Load the head in `folder` for the served causal LM `target`. Raises ModelLoadError or ConfigError."""
    served = target.config.get_text_config()
    config = read_config(folder, name, served)
    tensors = _tensors_of(folder)
    has_embedding = "embed_tokens.weight" in tensors
    register_attention()
    config._attn_implementation = ATTENTION_NAME
    head = Eagle3Head(config, target, has_embedding=has_embedding)
    if len(head.after_layers()) != NUM_READ_LAYERS:
        raise UnsupportedModelError(f"Draft head {name} reads {len(head.after_layers())} layers: EAGLE-3 heads read 3.")
    tensors.setdefault("d2t", head.d2t)
    try:
        head.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise UnsupportedModelError(
            f"Draft head {name} in {folder} has other tensors than EAGLE-3's: {clause(str(error).splitlines()[-1])}. "
            "Give a checkpoint in the format of LlamaForCausalLMEagle3."
        ) from error
    rows = set((torch.arange(len(head.d2t)) + head.d2t).tolist())
    if len(rows) != len(head.d2t) or not rows <= set(range(served.vocab_size)):
        raise UnsupportedModelError(f"Draft head {name} has a d2t with tokens that the served model has not.")
    for parameter in head.parameters():
        # Not `head.to(dtype)`: frequencies of rotary positions stay in float32.
        parameter.data = parameter.data.to(dtype)
    return head.to(device=device).eval()


def read_config(folder: Path, name: str, served: Any) -> LlamaConfig:
    """Return the config of the head in `folder`. `served`: config of the served model.

    Raises ModelLoadError or ConfigError if the head cannot propose for it.
    """
    config = LlamaConfig.from_pretrained(folder, local_files_only=True)
    sizes = {"vocab_size": served.vocab_size, "hidden_size": served.hidden_size}
    check_eagle3(folder, name, config.to_dict(), sizes)
    return config


def _tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the checkpoint by the names of Eagle3Head's own."""
    found: dict[str, torch.Tensor] = {}
    with closing(Checkpoint(folder)) as files:
        for name in files.names():
            key = re.sub(r"^(midlayer|layers\.0)\.", "layer.", name.removeprefix("model."))
            if not key.endswith(_UNUSED):
                found[key] = files.read(name, None)
    return found
