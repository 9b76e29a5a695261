"""A model of transformers with packed layers in the place of its own, where both compute the same.

1. Decoder layers of the plain kind (RMS norm, rotary positions, gated MLP with SiLU) are replaced whole.
2. Elsewhere, and for the language head, each linear layer is replaced.
3. Before the old is let go it is compared with the new, on this machine and with these weights.

Whatever is not known, or does not compare, stays as it is: slower, not wrong.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import torch

from splitserve.engine.attention.base import AttentionParams, StepAttention
from splitserve.engine.native.library import Library, NormArgs, RotateArgs
from splitserve.engine.native.weights import Kind, PackedGateUp, PackedLinear, Scratch
from splitserve.engine.probe import LayerShape

logger = logging.getLogger(__name__)

# Decoder layers of transformers that compute what FusedLayer does.
_FUSED = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
_CHECKED_TOKENS = 3
# Largest difference from the plain layer, as a share of its largest output: some roundings to bfloat16, or to int8.
_TOLERANCES = {Kind.BF16: 0.03, Kind.INT8: 0.15}


class FusedLayer(torch.nn.Module):
    """A decoder layer: norm, attention, norm, gated MLP, and what was before added to each of the two."""

    def __init__(self, layer: Any, shape: LayerShape, library: Library, scratch: Scratch, kind: Kind) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        biases = [p.bias for p in projections if p.bias is not None]
        self.qkv_proj = PackedLinear(
            library,
            scratch,
            torch.cat([p.weight for p in projections]),
            torch.cat(biases) if biases else None,
            kind,
        )
        self.o_proj = PackedLinear(library, scratch, attention.o_proj.weight, attention.o_proj.bias, kind)
        self.gate_up_proj = PackedGateUp(library, scratch, mlp.gate_proj.weight, mlp.up_proj.weight, kind)
        self.down_proj = PackedLinear(library, scratch, mlp.down_proj.weight, None, kind)
        self._norm = _Norm(library, layer.input_layernorm)
        self._middle_norm = _Norm(library, layer.post_attention_layernorm)
        self._index = shape.layer
        self._params = AttentionParams(scaling=attention.scaling, window=shape.window)
        self._head_dim = shape.k_dim
        self._num_kv_heads = shape.num_kv_heads
        self._num_heads = attention.q_proj.weight.shape[0] // shape.k_dim
        self._library = library
        self._head_norms = [_weight_of(getattr(attention, name, None)) for name in ("q_norm", "k_norm")]
        query_norm, key_norm = (None if w is None else w.data_ptr() for w in self._head_norms)
        self._rotate = RotateArgs(
            query_norm=query_norm,
            key_norm=key_norm,
            num_query_heads=self._num_heads,
            num_key_heads=self._num_kv_heads,
            head_size=self._head_dim,
            epsilon=_epsilon_of(attention.q_norm) if query_norm else 0.0,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step_attention: StepAttention,
        **_plain: Any,
    ) -> torch.Tensor:
        """hidden_states [1, T, hidden_size] are overwritten: they become the result."""
        residual = hidden_states.view(-1, hidden_states.shape[-1])
        states = self.qkv_proj(self._norm(residual))
        self._turn(states, *position_embeddings)
        heads = states.view(len(states), -1, self._head_dim)
        keys = self._num_heads + self._num_kv_heads
        attended = step_attention.forward(
            self._index, heads[:, : self._num_heads], heads[:, self._num_heads : keys], heads[:, keys:], self._params
        )
        middle = self._middle_norm(self.o_proj(attended.flatten(1)), residual)
        residual += self.down_proj(self.gate_up_proj(middle))
        return hidden_states

    def _turn(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotary positions, in place, on queries and keys."""
        args = self._rotate
        args.states, args.cos, args.sin = states.data_ptr(), cos.data_ptr(), sin.data_ptr()
        args.stride, args.num_rows = states.stride(0), len(states)
        args.num_threads = torch.get_num_threads()
        self._library.rotate(ctypes.byref(args))


class _Norm:
    """RMS norm of rows, after a sum where one is asked for."""

    def __init__(self, library: Library, norm: Any) -> None:
        self._library = library
        self._weight = norm.weight.float()
        self._args = NormArgs(weight=self._weight.data_ptr(), size=self._weight.numel(), epsilon=_epsilon_of(norm))

    def __call__(self, rows: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of rows [T, size]; with `residual`, of the sum of both, which is stored there."""
        out = torch.empty_like(rows)
        args = self._args
        args.inputs, args.outputs, args.num_rows = rows.data_ptr(), out.data_ptr(), len(rows)
        args.residual = None if residual is None else residual.data_ptr()
        args.num_threads = torch.get_num_threads()
        self._library.rms_norm(ctypes.byref(args))
        return out


def use_kernels(model: Any, shapes: Sequence[LayerShape], library: Library, kind: Kind = Kind.BF16) -> int:
    """Replace the layers of a bfloat16 model on a CPU where that is known to be right; returns how many were."""
    return _Replacer(shapes, library, kind).replace(model)


class _Replacer:
    def __init__(self, shapes: Sequence[LayerShape], library: Library, kind: Kind) -> None:
        self._shapes = shapes
        self._library = library
        self._kind = kind
        self._scratch = Scratch()

    def replace(self, parent: torch.nn.Module) -> int:
        count = 0
        for name, child in list(parent.named_children()):
            new = self._replacement(child)
            if new is None:
                count += self.replace(child)
            else:
                setattr(parent, name, new)
                count += 1
        return count

    def _replacement(self, old: Any) -> torch.nn.Module | None:
        with torch.inference_mode():
            if type(old) is torch.nn.Linear:
                new = PackedLinear(self._library, self._scratch, old.weight, old.bias, self._kind)
                states = _random(_CHECKED_TOKENS, old.in_features)
                return new if self._are_alike(old, old(states), new(states)) else None
            if type(old).__name__ not in _FUSED or not _is_plain(old, self._library.lanes):
                return None
            shape = self._shapes[old.self_attn.layer_idx]
            fused = FusedLayer(old, shape, self._library, self._scratch, self._kind)
            states = _random(1, _CHECKED_TOKENS, old.self_attn.q_proj.in_features)
            given: dict[str, Any] = {
                "position_embeddings": tuple(_random(1, _CHECKED_TOKENS, shape.k_dim) for _ in range(2)),
                "step_attention": _Mixture(),
            }
            expected = old(states, attention_mask=None, **given)
            return fused if self._are_alike(old, expected, fused(states, **given)) else None

    def _are_alike(self, old: Any, expected: torch.Tensor, found: torch.Tensor) -> bool:
        largest = float(expected.float().abs().max())
        difference = float((expected.float() - found.float()).abs().max())
        if difference <= _TOLERANCES[self._kind] * largest:
            return True
        logger.warning(
            "%s stays torch's: the kernel for it is off by %g where the largest output is %g",
            type(old).__name__,
            difference,
            largest,
        )
        return False


class _Mixture:
    """StepAttention whose answer shows each of its inputs."""

    def forward(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        return query * params.scaling + (key + value).repeat_interleave(group, dim=1)


def _is_plain(layer: Any, lanes: int) -> bool:
    """Whether FusedLayer has a word for everything that this layer does."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return (
        all(type(linear) is torch.nn.Linear for linear in linears)
        and all(linear.bias is None for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
        # Both halves of a head are turned in whole vectors.
        and attention.head_dim % (2 * lanes) == 0
    )


def _weight_of(norm: Any) -> torch.Tensor | None:
    return None if norm is None else norm.weight.float()


def _epsilon_of(norm: Any) -> float:
    return float(norm.variance_epsilon)


def _random(*shape: int) -> torch.Tensor:
    """The same numbers each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()
