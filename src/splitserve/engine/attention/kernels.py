"""Paged attention with our kernels; CPUs, numbers of 16 bits.

Requests with few new tokens use `_native/attention.c`, others `_native/prompts.c`. Both compute the same bits
(`_native/attend.h`). A token's result depends on its own visible keys only, not on the step that computes it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from splitserve.engine.attention.base import AttentionParams, IntArray, PagedBatch, PagedKV
from splitserve.engine.attention.torch_sdpa import TorchSdpaBackend, TorchSdpaStep, dtype_of, first_visible
from splitserve.engine.kernels.library import (
    MAX_GROUP,
    MAX_HEAD_SIZE,
    AttentionArgs,
    KernelLibrary,
    PromptAttentionArgs,
    StoreArgs,
)

# PART of attend.h. The keys of a unit of work belong to one part.
_PART_KEYS = 512
# Maximum number of new tokens of a request for which reading its keys once per token costs less than gathering them.
_FEW_TOKENS = 16
# Keys, summed over query heads, below which waking a second thread takes longer than the work.
_MIN_KEYS_TO_SHARE = 4096


@dataclass(frozen=True, slots=True)
class _Singles:
    """Tokens that are computed one by one, for layers of one window: the arrays that AttentionArgs points to.

    Each token is a request for the kernel.
    """

    tokens: IntArray
    pages: IntArray
    units: IntArray
    firsts: IntArray
    # Visible keys of all tokens.
    num_keys: int

    @classmethod
    def of(cls, batch: PagedBatch, tokens: IntArray, window: int | None) -> _Singles:
        """`tokens`: of the step."""
        owners = (np.searchsorted(batch.offsets, tokens, side="right") - 1).tolist()
        positions = batch.starts[owners] + tokens - batch.offsets[owners]
        begins, ends = first_visible(positions, window).tolist(), (positions + 1).tolist()
        pages_of = batch.pages_for(window)
        pages = np.zeros((len(owners), max((len(pages_of[r]) for r in set(owners)), default=0)), np.int64)
        # Loops: for few requests a call of numpy takes longer. For many, or long contexts, these loops take at most a
        # thousandth of the time of the attention.
        units, firsts, num_keys = [], [0], 0
        for i, (owner, begin, end) in enumerate(zip(owners, begins, ends, strict=True)):
            pages[i, : len(pages_of[owner])] = pages_of[owner]
            num_keys += end - begin
            while begin < end:
                part_end = min(end, (begin // _PART_KEYS + 1) * _PART_KEYS)
                units.append((i, begin, part_end))
                begin = part_end
            firsts.append(len(units))
        return cls(tokens, pages, np.array(units, np.int64), np.array(firsts, np.int64), num_keys)


class KernelBackend(TorchSdpaBackend):
    """AttentionBackend over one pool of 16-bit numbers in CPU memory. Not for two threads at a time."""

    def __init__(self, pool: PagedKV, library: KernelLibrary) -> None:
        super().__init__(pool)
        self.library = library

    def plan(self, batch: PagedBatch) -> KernelStep:
        return KernelStep(self, batch)


class KernelStep(TorchSdpaStep):
    """StepAttention with the native kernels."""

    longest_single = _FEW_TOKENS

    def __init__(self, backend: KernelBackend, batch: PagedBatch) -> None:
        super().__init__(backend, batch)
        self._library, self._kernels = backend.library, backend
        # Tokens of the step that are computed one by one.
        self._tokens = np.flatnonzero(np.repeat(batch.lengths <= self.longest_single, batch.lengths))
        self._singles: dict[int | None, _Singles] = {}
        self._args: dict[AttentionParams, AttentionArgs] = {}
        # Memory that `_args` point to.
        self._partials: list[torch.Tensor] = []
        # Keys as in `_slots`.
        self._store_args: dict[bool, StoreArgs] = {}

    def of_rows(self, rows: IntArray) -> KernelStep:
        """Return this step for a layer that stores all keys and values, and computes only the outputs of `rows`."""
        step = KernelStep(self._kernels, self.batch)
        step._tokens, step.with_prompts = rows, []
        return step

    def store_args(self, window: int | None) -> StoreArgs:
        """Return the arguments that all layers with `window` share; states and pool memory are per layer."""
        is_windowed = self.batch.is_windowed(window)
        if is_windowed not in self._store_args:
            slots, tails = self.slots_for(window)
            self._store_args[is_windowed] = StoreArgs(
                slots=slots.data_ptr(),
                zeroed=None if tails is None else tails.data_ptr(),
                num_rows=len(slots),
                num_zeroed=0 if tails is None else len(tails),
            )
        return self._store_args[is_windowed]

    def single_args(self, params: AttentionParams, query_shape: Sequence[int], value_size: int) -> AttentionArgs:
        """Return the arguments for all layers of one kind, without those that differ from layer to layer.

        query_shape: [tokens, num_kv_heads, query heads per KV head, head_size].
        """
        if params in self._args:
            return self._args[params]
        singles, num_heads = self._singles_of(params.window), query_shape[1] * query_shape[2]
        partials = torch.empty(len(singles.units) * num_heads * (value_size + 2), dtype=torch.float32)
        self._partials.append(partials)
        arrays = {name: getattr(singles, name) for name in ("tokens", "pages", "units", "firsts")}
        addresses = {name: array.__array_interface__["data"][0] for name, array in arrays.items()}
        args = self._args[params] = AttentionArgs(
            **self._given(params, query_shape, value_size),
            **addresses,
            partials=partials.data_ptr(),
            pages_stride=singles.pages.shape[1],
            num_requests=len(singles.tokens),
            num_units=len(singles.units),
            num_threads=1 if singles.num_keys * num_heads < _MIN_KEYS_TO_SHARE else self._library.num_threads,
        )
        return args

    def prompt_args(self, params: AttentionParams, query_shape: Sequence[int], value_size: int) -> PromptAttentionArgs:
        """Return the arguments for all prompts and layers of one kind, without those of a prompt or a layer."""
        given = self._given(params, query_shape, value_size)
        return PromptAttentionArgs(window=params.window or 0, num_threads=self._library.num_threads, **given)

    def _given(self, params: AttentionParams, query_shape: Sequence[int], value_size: int) -> dict[str, Any]:
        """Return the arguments that both kernels have."""
        sizes = dict(zip(("num_kv_heads", "group", "head_size"), query_shape[1:], strict=True))
        assert params.scaling > 0
        scales = {"scale": params.scaling, "softcap": params.softcap or 0.0}
        others = {"page_size": self.batch.page_size, "uses_tiles": self._library.multiplies_tiles}
        return {**sizes, **scales, **others, "value_size": value_size}

    def put_prompt(
        self, args: PromptAttentionArgs, request: int, window: int | None, queries: int, stride: int, outputs: int
    ) -> None:
        """Set the arguments of a prompt: queries and outputs are the addresses of the step's first token."""
        batch, token_size = self.batch, 2 * args.num_kv_heads * args.group
        offset = int(batch.offsets[request])
        args.queries, args.query_stride = queries + offset * stride * 2, stride
        args.outputs = outputs + offset * token_size * args.value_size
        args.pages = batch.pages_for(window)[request].ctypes.data
        args.num_tokens, args.start = int(batch.lengths[request]), int(batch.starts[request])

    def _store(self, pages: torch.Tensor, new: torch.Tensor, window: int | None) -> None:
        if new.stride(2) != 1 or new.stride(1) != new.shape[2]:
            new = new.contiguous()
        args = self.store_args(window)
        args.states, args.stride = new.data_ptr(), new.stride(0)
        args.pool, args.size = pages.data_ptr(), new.shape[1] * new.shape[2]
        self._library.store_tokens(ctypes.byref(args))

    def _singles_of(self, window: int | None) -> _Singles:
        if window not in self._singles:
            self._singles[window] = _Singles.of(self.batch, self._tokens, window)
        return self._singles[window]

    def _attend_prompts(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams, out: torch.Tensor
    ) -> None:
        query = _with_whole_rows(query)
        args = self.prompt_args(params, query.shape, out.shape[-1])
        args.keys, args.values = keys.data_ptr(), values.data_ptr()
        for request in self.with_prompts:
            self.put_prompt(args, request, params.window, query.data_ptr(), query.stride(0), out.data_ptr())
            self._library.prompt_attention(ctypes.byref(args))

    def _attend_singles(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams, out: torch.Tensor
    ) -> None:
        if not len(self._tokens):
            return
        query = _with_whole_rows(query)
        args = self.single_args(params, query.shape, out.shape[-1])
        args.queries, args.query_stride = query.data_ptr(), query.stride(0)
        args.keys, args.values, args.outputs = keys.data_ptr(), values.data_ptr(), out.data_ptr()
        self._library.decode_attention(ctypes.byref(args))


def _with_whole_rows(query: torch.Tensor) -> torch.Tensor:
    """Return query [T, num_kv_heads, heads per KV head, head_size] so that the numbers of a token are adjacent."""
    group, head_size = query.shape[2:]
    return query if query.stride()[1:] == (group * head_size, head_size, 1) else query.contiguous()


def is_supported(pool: PagedKV, num_heads: int, library: KernelLibrary) -> bool:
    """Return whether the kernel supports the heads of this pool, with `num_heads` query heads."""
    if pool.device.type != "cpu" or pool.latents:
        return False
    return all(
        dtype_of(pool) is library.dtype
        and c.head_dim <= MAX_HEAD_SIZE
        and c.head_dim % library.lanes == 0
        and num_heads // c.num_heads <= MAX_GROUP
        for c in pool.components
    )
