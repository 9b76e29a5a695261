"""Decoder layers of the plain kind in C (RMS norm, attention, RMS norm, gated MLP with SiLU), and a decoder of them.

Each part of a `FusedLayer` computes at once, or returns the arguments of a later call. A `DecoderStack` runs all layers
in one C call. A step is some ten kernels per layer, and in decode steps they are short. Between two calls from Python
threads would fall asleep, so one call runs them all (`program.c`).

1. The first step records the calls of all layers, with buffers between them. A larger step records them again.
2. Each step fills in its data: hidden states, positions, the slots of its tokens, the plan of its attention.
3. One call runs them in order.
4. If few outputs of a step are used, as those of a prompt, the last layer is not in that call. It stores all keys and
   values, and computes the rest for these rows only.

Steps with more rows than these kernels are for run layer by layer.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from splitserve.engine.attention.base import AttentionParams, IntArray, PagedKV, StepAttention
from splitserve.engine.attention.kernels import KernelStep
from splitserve.engine.kernels.library import (
    AttentionArgs,
    CallArgs,
    KernelLibrary,
    LinearArgs,
    NormArgs,
    ProgramArgs,
    PromptAttentionArgs,
    RotateArgs,
    StoreArgs,
)
from splitserve.engine.kernels.weights import Kind, PackedGateUp, PackedLinear, Scratch
from splitserve.engine.probe import LayerShape
from splitserve.engine.quantized.layers import joined_bias, joined_weight, weight_of

# Bytes of buffers up to which a program is kept for later steps.
_KEPT_BYTES = 1 << 26


class FusedLayer(torch.nn.Module):
    """A decoder layer: norm, attention, norm and gated MLP, with both residual additions."""

    def __init__(self, layer: Any, shape: LayerShape, library: KernelLibrary, scratch: Scratch, kind: Kind) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        weight, bias = joined_weight(projections), joined_bias(projections)
        self.qkv_proj = PackedLinear(library, scratch, weight, bias, kind)
        self.o_proj = PackedLinear(library, scratch, weight_of(attention.o_proj), attention.o_proj.bias, kind)
        self.gate_up_proj = PackedGateUp(library, scratch, weight_of(mlp.gate_proj), weight_of(mlp.up_proj), kind)
        self.down_proj = PackedLinear(library, scratch, weight_of(mlp.down_proj), None, kind)
        self.norm = Norm(library, layer.input_layernorm)
        self.middle_norm = Norm(library, layer.post_attention_layernorm)
        self.index = shape.layer
        self.params = AttentionParams(scaling=attention.scaling, window=shape.window)
        self.head_dim = shape.k_dim
        self.num_kv_heads = shape.num_kv_heads
        self.num_heads = attention.q_proj.out_features // shape.k_dim
        self._library = library
        # Weights of the norms of queries and keys, if there are any: `_rotate` points to them.
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self._query_norm, self._key_norm = (None if norm is None else norm.weight.float() for norm in norms)
        self._rotate = RotateArgs(
            num_query_heads=self.num_heads,
            num_key_heads=self.num_kv_heads,
            head_size=self.head_dim,
            epsilon=0.0 if self._query_norm is None else _epsilon_of(attention.q_norm),
        )
        self.bind()

    def bind(self) -> None:
        """Read the addresses of its tensors again."""
        self._rotate.query_norm = None if self._query_norm is None else self._query_norm.data_ptr()
        self._rotate.key_norm = None if self._key_norm is None else self._key_norm.data_ptr()

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step_attention: StepAttention,
        rows: IntArray | None = None,
        **_plain: Any,
    ) -> torch.Tensor:
        """Run the layer. hidden_states [1, T, hidden_size] are overwritten. `rows`: return these tokens only."""
        residual = hidden_states.view(-1, hidden_states.shape[-1])
        states = self.qkv_proj(self.norm(residual))
        self._library.rotate(ctypes.byref(self.rotate_args(states, *position_embeddings)))
        heads = states.view(len(states), -1, self.head_dim)
        keys = self.num_heads + self.num_kv_heads
        attended = step_attention.forward(
            self.index, heads[:, : self.num_heads], heads[:, self.num_heads : keys], heads[:, keys:], self.params
        )
        if rows is not None:
            attended, residual = attended[rows], residual[rows]
        middle = self.middle_norm(self.o_proj(attended.flatten(1)), residual)
        residual += self.down_proj(self.gate_up_proj(middle))
        return residual[None]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of its buffers and heads."""
        linears = (self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj)
        sizes = [size for linear in linears for size in (linear.in_features, linear.out_features)]
        return (*sizes, self.num_heads, self.num_kv_heads, self.head_dim)

    def rotate_args(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> RotateArgs:
        """Return the arguments to apply rotary positions in place to queries and keys."""
        args = RotateArgs.from_buffer_copy(self._rotate)
        args.states, args.cos, args.sin = states.data_ptr(), cos.data_ptr(), sin.data_ptr()
        args.stride, args.num_rows = states.stride(0), len(states)
        args.num_threads = self._library.num_threads
        return args


class Norm(torch.nn.Module):
    """RMS norm of rows, after an addition if requested."""

    def __init__(self, library: KernelLibrary, norm: Any) -> None:
        super().__init__()
        self._library = library
        self._weight = norm.weight.float()
        self._args = NormArgs(size=self._weight.numel(), epsilon=_epsilon_of(norm))
        self.bind()

    def bind(self) -> None:
        """Read the address of its weight again."""
        self._args.weight = self._weight.data_ptr()

    def forward(self, rows: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the norm of rows [..., size]; with `residual`, of the sum of both, which is stored in `residual`."""
        rows = rows.contiguous()
        out = torch.empty_like(rows)
        self._library.rms_norm(ctypes.byref(self.args(rows, residual, out)))
        return out

    def args(self, rows: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> NormArgs:
        args = NormArgs.from_buffer_copy(self._args)
        args.inputs, args.outputs, args.num_rows = rows.data_ptr(), out.data_ptr(), rows.numel() // args.size
        args.residual = None if residual is None else residual.data_ptr()
        args.num_threads = self._library.num_threads
        return args


def _epsilon_of(norm: Any) -> float:
    return float(norm.variance_epsilon)


class DecoderStack(torch.nn.Module):
    """Replacement of a decoder's layers, which all have the same sizes. Not for two threads at a time."""

    def __init__(self, layers: Sequence[FusedLayer], library: KernelLibrary, *, is_whole: bool = True) -> None:
        """`is_whole`: these are all layers of the model, and nothing but the last one's outputs is used."""
        super().__init__()
        self._may_skip_rows = is_whole and len(layers) > 1
        self.layers = torch.nn.ModuleList(layers)
        self._fused = tuple(layers)
        self._library = library
        self._max_rows = layers[0].qkv_proj.max_rows
        # At most one. A list, because an assignment to an attribute of a module takes long.
        self._kept: list[_Program] = []

    def divided(self, ends: Sequence[int]) -> list[DecoderStack]:
        """Return decoders of the same layers that follow each other, divided before the layers `ends`."""
        bounds = sorted({0, *ends, len(self._fused)})
        return [DecoderStack(self._fused[a:b], self._library, is_whole=False) for a, b in itertools.pairwise(bounds)]

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step_attention: StepAttention,
        norm: Norm | None = None,
        **plain: Any,
    ) -> torch.Tensor:
        """Run all layers, and `norm` behind them. hidden_states are overwritten.

        The result may have only the `output_rows` of the step. With `norm`, the next step may overwrite it.
        """
        num_rows, plain = hidden_states.shape[1], {"position_embeddings": position_embeddings, **plain}
        if not isinstance(step_attention, KernelStep) or (self._max_rows is not None and num_rows > self._max_rows):
            for layer in self._fused:
                hidden_states = layer(hidden_states, step_attention=step_attention, **plain)
            return hidden_states if norm is None else norm(hidden_states)
        program = self._kept.pop() if self._kept else None
        if program is None or not program.fits(num_rows, norm):
            # The memory of an earlier one is free before that of the next is allocated.
            program = None
            program = _Program(self._fused, norm, self._library, 1 << (num_rows - 1).bit_length())
        rows = step_attention.batch.output_rows if self._may_skip_rows else None
        num_layers = len(self._fused) - (rows is not None)
        hidden_states = program.run(hidden_states, *position_embeddings, step_attention, num_layers)
        if program.num_bytes <= _KEPT_BYTES:
            self._kept.append(program)
        if rows is not None:
            step_attention = step_attention.of_rows(rows)
            hidden_states = self._fused[-1](hidden_states, step_attention=step_attention, rows=rows, **plain)
            return hidden_states if norm is None else norm(hidden_states)
        return hidden_states


class _Program:
    """The calls of all layers, and of a norm behind them.

    Owns the memory that their arguments point to, except the data of a step.
    """

    def __init__(self, layers: Sequence[FusedLayer], norm: Norm | None, library: KernelLibrary, max_rows: int) -> None:
        self._layers, self._norm = layers, norm
        self._library = library
        self._max_rows, self._num_threads = max_rows, library.num_threads
        first = layers[0]
        # `_added` is added to the residual by the next norm, or at the end.
        self._residual, self._added = (self._rows(first.qkv_proj.in_features) for _ in range(2))
        self._normed = self._rows(first.qkv_proj.in_features)
        self._cos, self._sin = (self._rows(first.head_dim) for _ in range(2))
        self._states = self._rows(first.qkv_proj.out_features)
        self._attended = self._rows(first.o_proj.in_features)
        self._gated = self._rows(first.down_proj.in_features)
        buffers = (self._residual, self._added, self._normed, self._cos, self._sin, self._states, self._attended)
        self.num_bytes = sum(buffer.nbytes for buffer in (*buffers, self._gated))
        # Large enough for each linear layer, so that it never moves.
        linears = [part for x in layers for part in (x.qkv_proj, x.o_proj, x.gate_up_proj, x.down_proj)]
        self._scratch = Scratch()
        self._scratch.address(max(linear.scratch_floats(max_rows) for linear in linears))
        # One of each per layer: stores of keys and of values, attention.
        self._stores = [(StoreArgs * len(layers))() for _ in range(2)]
        self._attentions = (AttentionArgs * len(layers))()
        # Layers of each kind, and the addresses of their keys and values in the pool of the last step.
        self._kinds: dict[AttentionParams, list[int]] = {}
        for i, layer in enumerate(layers):
            self._kinds.setdefault(layer.params, []).append(i)
        self._pool: PagedKV | None = None
        self._addresses: dict[AttentionParams, list[list[int]]] = {}
        # The calls of each layer before and after its attention.
        self._args = [self._layer_args(i) for i in range(len(layers))]
        self._last_args = [] if norm is None else [norm.args(self._added, self._residual, self._normed)]
        both = itertools.chain.from_iterable(itertools.chain.from_iterable(self._args))
        every = itertools.chain(both, self._last_args)
        self._sized = [args for args in every if isinstance(args, (NormArgs, LinearArgs, RotateArgs))]
        self._num_rows = max_rows
        self._program = ProgramArgs(num_threads=self._num_threads)
        # Whether the last step had requests with few new tokens (-1: no step yet), and its number of prompts. The calls
        # depend on both.
        self._arranged = (-1, 0)

    def fits(self, num_rows: int, norm: Norm | None) -> bool:
        is_same = self._norm is norm and self._library.num_threads == self._num_threads
        return is_same and num_rows <= self._max_rows

    def run(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: KernelStep, num_layers: int
    ) -> torch.Tensor:
        """Return the hidden states behind the first `num_layers` layers, [1, T, hidden_size].

        If these are all layers, return the states behind the norm.
        """
        num_rows = hidden.shape[1]
        if num_rows != self._num_rows:
            self._num_rows = num_rows
            for args in self._sized:
                args.num_rows = num_rows
        for ours, of_step in ((self._residual, hidden), (self._cos, cos), (self._sin, sin)):
            ours[:num_rows] = of_step[0]
        self._arrange(len(step.batch.lengths) - len(step.with_prompts), len(step.with_prompts))
        self._put_attention(step)
        calls_each = (len(self._calls) - len(self._last_args)) // len(self._layers)
        is_whole = num_layers == len(self._layers)
        self._program.num_calls = len(self._calls) if is_whole else calls_each * num_layers
        self._library.run_program(ctypes.byref(self._program))
        if is_whole and self._norm is not None:
            return self._normed[None, :num_rows]
        return (self._residual[:num_rows] + self._added[:num_rows])[None]

    def _rows(self, size: int) -> torch.Tensor:
        return torch.empty(self._max_rows, size, dtype=self._library.dtype)

    def _layer_args(self, i: int) -> tuple[tuple[ctypes.Structure, ...], tuple[ctypes.Structure, ...]]:
        """Return the arguments of a layer's calls before and after its attention, in order."""
        layer, scratch = self._layers[i], self._scratch
        residual, added, normed = self._residual, self._added, self._normed
        before = (
            layer.norm.args(added, residual, normed) if i else layer.norm.args(residual, None, normed),
            layer.qkv_proj.args(normed, self._states, scratch),
            layer.rotate_args(self._states, self._cos, self._sin),
            *(stores[i] for stores in self._stores),
        )
        return before, (
            layer.o_proj.args(self._attended, added, scratch),
            layer.middle_norm.args(added, residual, normed),
            layer.gate_up_proj.args(normed, self._gated, scratch),
            layer.down_proj.args(self._gated, added, scratch),
        )

    def _arrange(self, num_singles: int, num_prompts: int) -> None:
        """Set the calls of all layers, for a step with so many requests of either kind."""
        kinds = (min(num_singles, 1), num_prompts)
        if kinds == self._arranged:
            return
        self._arranged = kinds
        self._prompts = (PromptAttentionArgs * (num_prompts * len(self._layers)))()
        calls: list[ctypes.Structure] = []
        for i, (before, after) in enumerate(self._args):
            prompts = (self._prompts[i * num_prompts + j] for j in range(num_prompts))
            calls += [*before, *([self._attentions[i]] if num_singles else []), *prompts, *after]
        calls += self._last_args
        self._calls = (CallArgs * len(calls))(
            *(CallArgs(kernel=self._library.kernels[type(args)], args=ctypes.addressof(args)) for args in calls)
        )
        self._program.calls = ctypes.addressof(self._calls)

    def _read_addresses(self, pool: PagedKV) -> None:
        """Read the addresses of a pool, which keeps them."""
        self._pool = pool
        for params, members in self._kinds.items():
            layers = [self._layers[i].index for i in members]
            self._addresses[params] = [[part[i].data_ptr() for i in layers] for part in (pool.keys, pool.values)]

    def _put_attention(self, step: KernelStep) -> None:
        """Set where new keys and values are stored, and what queries read. Layers of a kind differ in the pool only."""
        num_kv_heads, head_dim = self._layers[0].num_kv_heads, self._layers[0].head_dim
        shape = (self._num_rows, num_kv_heads, self._layers[0].num_heads // num_kv_heads, head_dim)
        queries, stride = self._states.data_ptr(), self._states.stride(0)
        outputs, has_singles, num_prompts = self._attended.data_ptr(), *self._arranged
        if step.pool is not self._pool:
            self._read_addresses(step.pool)
        for params, members in self._kinds.items():
            keys, values = self._addresses[params]
            store = StoreArgs.from_buffer_copy(step.store_args(params.window))
            store.stride, store.size = stride, num_kv_heads * head_dim
            for j, pool in enumerate((keys, values)):
                store.states = queries + (shape[2] + j) * store.size * self._states.itemsize
                _fill(self._stores[j], members, store, pool=pool)
            if has_singles:
                single = step.single_args(params, shape, head_dim)
                single.queries, single.query_stride, single.outputs = queries, stride, outputs
                _fill(self._attentions, members, single, keys=keys, values=values)
            for j, request in enumerate(step.with_prompts):
                prompt = step.prompt_args(params, shape, head_dim)
                step.put_prompt(prompt, request, params.window, queries, stride, outputs)
                places = [i * num_prompts + j for i in members]
                _fill(self._prompts, places, prompt, keys=keys, values=values)


def _fill(array: Any, places: list[int], args: Any, **addresses: list[int]) -> None:
    """Copy `args` to these places of an array of such structures, with their own `addresses` in each place.

    One assignment per place and field would take longer than a layer.
    """
    words = np.frombuffer(array, np.uint64).reshape(len(array), -1)
    words[places] = np.frombuffer(args, np.uint64)
    for name, own in addresses.items():
        words[places, getattr(type(args), name).offset // words.itemsize] = own
