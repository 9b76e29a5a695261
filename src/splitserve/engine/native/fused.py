"""A decoder layer of the plain kind as a few calls of C: RMS norm, attention, RMS norm, gated MLP with SiLU.

Each part computes at once, or returns the arguments of a later call (`stack.py`). What the attention of a step reads is
not known here.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from splitserve.engine.attention.base import AttentionParams, StepAttention
from splitserve.engine.native.library import KernelLibrary, NormArgs, RotateArgs
from splitserve.engine.native.weights import Kind, PackedGateUp, PackedLinear, Scratch
from splitserve.engine.probe import LayerShape


class FusedLayer(torch.nn.Module):
    """A decoder layer: norm, attention, norm and gated MLP, with both residual additions."""

    def __init__(self, layer: Any, shape: LayerShape, library: KernelLibrary, scratch: Scratch, kind: Kind) -> None:
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
        self.norm = Norm(library, layer.input_layernorm)
        self.middle_norm = Norm(library, layer.post_attention_layernorm)
        self.index = shape.layer
        self.params = AttentionParams(scaling=attention.scaling, window=shape.window)
        self.head_dim = shape.k_dim
        self.num_kv_heads = shape.num_kv_heads
        self.num_heads = attention.q_proj.weight.shape[0] // shape.k_dim
        self._library = library
        self._head_norms = [_weight_of(getattr(attention, name, None)) for name in ("q_norm", "k_norm")]
        query_norm, key_norm = (None if w is None else w.data_ptr() for w in self._head_norms)
        self._rotate = RotateArgs(
            query_norm=query_norm,
            key_norm=key_norm,
            num_query_heads=self.num_heads,
            num_key_heads=self.num_kv_heads,
            head_size=self.head_dim,
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
        """Run the layer. hidden_states [1, T, hidden_size] are overwritten by the result."""
        residual = hidden_states.view(-1, hidden_states.shape[-1])
        states = self.qkv_proj(self.norm(residual))
        self._turn(states, *position_embeddings)
        heads = states.view(len(states), -1, self.head_dim)
        keys = self.num_heads + self.num_kv_heads
        attended = step_attention.forward(
            self.index, heads[:, : self.num_heads], heads[:, self.num_heads : keys], heads[:, keys:], self.params
        )
        middle = self.middle_norm(self.o_proj(attended.flatten(1)), residual)
        residual += self.down_proj(self.gate_up_proj(middle))
        return hidden_states

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of its buffers and heads."""
        linears = (self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj)
        sizes = [size for linear in linears for size in (linear.in_features, linear.out_features)]
        return (*sizes, self.num_heads, self.num_kv_heads, self.head_dim)

    def _turn(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Apply rotary positions in place to queries and keys."""
        self._library.rotate(ctypes.byref(self.rotate_args(states, cos, sin)))

    def rotate_args(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> RotateArgs:
        args = RotateArgs.from_buffer_copy(self._rotate)
        args.states, args.cos, args.sin = states.data_ptr(), cos.data_ptr(), sin.data_ptr()
        args.stride, args.num_rows = states.stride(0), len(states)
        args.num_threads = torch.get_num_threads()
        return args


class Norm:
    """RMS norm of rows, after an addition if requested."""

    def __init__(self, library: KernelLibrary, norm: Any) -> None:
        self._library = library
        self._weight = norm.weight.float()
        self._args = NormArgs(weight=self._weight.data_ptr(), size=self._weight.numel(), epsilon=_epsilon_of(norm))

    def __call__(self, rows: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the norm of rows [T, size]; with `residual`, of the sum of both, which is stored in `residual`."""
        out = torch.empty_like(rows)
        self._library.rms_norm(ctypes.byref(self.args(rows, residual, out)))
        return out

    def args(self, rows: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> NormArgs:
        args = NormArgs.from_buffer_copy(self._args)
        args.inputs, args.outputs, args.num_rows = rows.data_ptr(), out.data_ptr(), len(rows)
        args.residual = None if residual is None else residual.data_ptr()
        args.num_threads = torch.get_num_threads()
        return args


def _weight_of(norm: Any) -> torch.Tensor | None:
    return None if norm is None else norm.weight.float()


def _epsilon_of(norm: Any) -> float:
    return float(norm.variance_epsilon)
