"""Packed layers that replace those of a transformers model if both compute the same.

1. Decoder layers of the plain kind (RMS norm, rotary positions, gated MLP with SiLU) are replaced whole (`FusedLayer`).
2. In other layers gated MLPs, experts and their routers, and the projections of latents are replaced (`gated.py`,
   `experts.py`, `headwise.py`), and each other linear layer. So is the language head.
3. Before an old layer is dropped it is compared with the new one, on this machine and with these weights.
4. If all layers of a decoder were replaced and have the same sizes, they become one (`stack.py`), and the norm behind
   them is replaced. Some models then need no other code of transformers (`decoder.py`).

Layers that are unknown, or differ in the comparison, stay as they are: slower, not wrong. Packed tensors are attributes
of modules, and `bind` reads their addresses again, because workers map them from one file (`engine/shared_weights.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch

from splitserve.engine.kernels.decoder import is_plain_decoder
from splitserve.engine.kernels.experts import PackedExperts, are_known_experts, is_router, use_router
from splitserve.engine.kernels.gated import PackedGatedMLP, is_gated_mlp
from splitserve.engine.kernels.headwise import PackedUpProjection
from splitserve.engine.kernels.library import KernelLibrary
from splitserve.engine.kernels.rotations import use_real_products
from splitserve.engine.kernels.stack import DecoderStack, FusedLayer, Norm
from splitserve.engine.kernels.weights import Kind, PackedLinear, Scratch
from splitserve.engine.mla import UpProjection
from splitserve.engine.probe import LayerShape, OwnValues
from splitserve.engine.quantized.layers import (
    LINEAR,
    QuantizedEmbedding,
    are_alike,
    quantizes_rows,
    unpacked_once,
    weight_of,
)

logger = logging.getLogger(__name__)

# Decoder layers of transformers that compute what FusedLayer does.
_FUSED = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
_NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})
# Among the names of replaced layers: the model needs no code of transformers around them.
WHOLE = "(whole)"
_CHECKED_TOKENS = 3
# Experts per token, for layers of experts.
_CHECKED_CHOICES = 4
# Largest difference from the plain layer, relative to its largest output: some roundings to bfloat16, or to int8.
_TOLERANCES = {Kind.BF16: 0.03, Kind.INT8: 0.15, Kind.W8A8: 0.15}


def replace_layers(
    model: Any,
    shapes: Sequence[LayerShape],
    library: KernelLibrary,
    kind: Kind,
    compared: Collection[str] | None = None,
) -> tuple[str, ...]:
    """Replace layers of a model in the library's dtype if the result is known to be correct; return their names.

    Complex rotary positions become `Rotations`. `compared`: the result of an earlier call. Then these layers are
    replaced without a comparison.
    """
    use_real_products(model)
    replacer = _Replacer(shapes, library, kind, compared)
    replacer.replace(model)
    replaced = replacer.replaced
    if is_plain_decoder(model) if compared is None else WHOLE in compared:
        # For PlainDecoder.
        model.is_plain_decoder = True
        replaced.append(WHOLE)
    return tuple(replaced)


def computes_all(model: Any) -> bool:
    """Return whether our kernels compute each matrix of the model, for any number of rows."""
    modules = list(model.modules())
    packed = [module for module in modules if isinstance(module, PackedLinear)]
    # Rows of an embedding are only looked up.
    embeddings = {id(m.weight) for m in modules if isinstance(m, (torch.nn.Embedding, QuantizedEmbedding))}
    has_others = any(p.ndim > 1 and id(p) not in embeddings for p in model.parameters())
    return bool(packed) and not has_others and all(layer.max_rows is None for layer in packed)


class _Replacer:
    def __init__(
        self, shapes: Sequence[LayerShape], library: KernelLibrary, kind: Kind, compared: Collection[str] | None
    ) -> None:
        self._compared = None if compared is None else frozenset(compared)
        self.replaced: list[str] = []
        self._shapes = shapes
        self._library = library
        self._kind = kind
        self._scratch = Scratch()
        # Rows of experts.
        self._rows = Scratch()

    def replace(self, parent: torch.nn.Module, path: str = "") -> None:
        for name, child in list(parent.named_children()):
            child_path = f"{path}{name}"
            if is_router(child):
                if use_router(child, self._library, self._scratch):
                    self.replaced.append(child_path)
                continue
            new = self._replacement(child, child_path)
            if new is None:
                self.replace(child, f"{child_path}.")
                layers = _alike_layers(child)
                if layers:
                    setattr(parent, name, torch.nn.ModuleList([DecoderStack(layers, self._library)]))
                    self._replace_norm(parent, f"{path}norm")
            else:
                setattr(parent, name, new)
                self.replaced.append(child_path)

    def _replace_norm(self, body: Any, path: str) -> None:
        """Replace the norm behind the layers of a body, if it is of a known kind."""
        old: Any = getattr(body, "norm", None)
        if type(old).__name__ not in _NORMS or (self._compared is not None and path not in self._compared):
            return
        new = Norm(self._library, old)
        if self._compared is None:
            with torch.inference_mode():
                states = self._random(_CHECKED_TOKENS, len(old.weight))
                if not self._are_alike(old, old(states), new(states), Kind.BF16):
                    return
        body.norm = new
        self.replaced.append(path)

    def _replacement(self, old: Any, path: str) -> torch.nn.Module | None:
        if self._compared is not None and path not in self._compared:
            return None
        if isinstance(old, torch.nn.Linear) and old.weight.dtype != self._library.dtype:
            # HunYuan's routers are in float32 in every checkpoint.
            return None
        with torch.inference_mode(), unpacked_once(old):
            if isinstance(old, LINEAR):
                new = PackedLinear(self._library, self._scratch, weight_of(old), old.bias, self._kind)
                if self._compared is not None:
                    return new
                states = self._random(_CHECKED_TOKENS, old.in_features)
                return new if self._are_alike(old, old(states), new(states)) else None
            if is_gated_mlp(old):
                mlp = PackedGatedMLP(old, self._library, self._scratch, self._kind)
                if self._compared is not None:
                    return mlp
                states = self._random(_CHECKED_TOKENS, mlp.gate_up_proj.in_features)
                return mlp if self._are_alike(old, old(states), mlp(states)) else None
            if are_known_experts(old, self._library):
                return self._experts(old)
            if isinstance(old, UpProjection):
                return self._up_projection(old)
            if type(old).__name__ not in _FUSED or not _is_plain(old, self._library.lanes):
                return None
            shape = self._shapes[old.self_attn.layer_idx]
            fused = FusedLayer(old, shape, self._library, self._scratch, self._kind)
            if self._compared is not None:
                return fused
            states = self._random(1, _CHECKED_TOKENS, old.self_attn.q_proj.in_features)
            given: dict[str, Any] = {
                "position_embeddings": tuple(self._random(1, _CHECKED_TOKENS, shape.k_dim) for _ in range(2)),
                "step_attention": OwnValues(),
            }
            expected = old(states, attention_mask=None, **given)
            return fused if self._are_alike(old, expected, fused(states, **given)) else None

    def _experts(self, old: Any) -> torch.nn.Module | None:
        if self._kind is Kind.BF16 and self._library.max_bfloat16_rows is not None:
            # torch is faster for many rows.
            return None
        experts = PackedExperts(old, self._library, self._scratch, self._rows, self._kind)
        num_experts, size, _ = old.down_proj.shape
        num_chosen = min(_CHECKED_CHOICES, num_experts)
        chosen = torch.stack([torch.arange(i, i + num_chosen) % num_experts for i in range(_CHECKED_TOKENS)])
        given = (self._random(_CHECKED_TOKENS, size), chosen, self._random(_CHECKED_TOKENS, num_chosen).float())
        return experts if self._are_alike(old, old(*given), experts(*given)) else None

    def _up_projection(self, old: UpProjection) -> torch.nn.Module | None:
        if self._library.max_bfloat16_rows is not None:
            # torch is faster for many rows.
            return None
        new = PackedUpProjection(old, self._library, self._scratch)
        if self._compared is not None:
            return new
        query, mixed = (self._random(_CHECKED_TOKENS, len(old.by_head), n) for n in (old.key_size, old.rank))
        pairs = ((old.absorb(query), new.absorb(query)), (old.expand(mixed), new.expand(mixed)))
        return new if all(self._are_alike(old, *pair) for pair in pairs) else None

    def _random(self, *shape: int) -> torch.Tensor:
        """Return random numbers, the same each time."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(self._library.dtype)

    def _are_alike(self, old: Any, expected: torch.Tensor, found: torch.Tensor, kind: Kind | None = None) -> bool:
        largest = float(expected.float().abs().max())
        difference = float((expected.float() - found.float()).abs().max())
        kind = Kind.W8A8 if quantizes_rows(old) else kind or self._kind
        if difference <= _TOLERANCES[kind] * largest:
            return True
        logger.warning(
            "%s stays torch's: the kernel for it is off by %g where the largest output is %g",
            type(old).__name__,
            difference,
            largest,
        )
        return False


def _is_plain(layer: Any, lanes: int) -> bool:
    """Return whether FusedLayer supports everything that this layer does."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return (
        all(isinstance(linear, LINEAR) for linear in linears)
        and are_alike(linears[:3])
        and are_alike([mlp.gate_proj, mlp.up_proj])
        and all(linear.bias is None for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
        # Both halves of a head are rotated in whole vectors.
        and attention.head_dim % (2 * lanes) == 0
    )


def _alike_layers(module: torch.nn.Module) -> list[FusedLayer]:
    """Return the layers of a list with only FusedLayers of the same sizes; else none."""
    children = list(module.children()) if isinstance(module, torch.nn.ModuleList) else []
    layers = [child for child in children if isinstance(child, FusedLayer)]
    return layers if len(layers) == len(children) and len({layer.sizes for layer in layers}) == 1 else []
