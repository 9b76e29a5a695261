"""Attention over paged latents (`engine/mla.py`) with the kernel of `_native/latents.c`; CPUs, numbers of 16 bits.

A step is divided into units of some rows: new tokens of a request, and within each token its heads. If there are fewer
units than threads can share evenly, threads compute parts of the keys of a unit. Neither changes a row's result.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from splitserve.engine.attention.base import AttentionParams, IntArray, PagedBatch, PagedKV
from splitserve.engine.attention.torch_sdpa import TorchSdpaBackend, TorchSdpaStep, dtype_of
from splitserve.engine.kernels.library import KernelLibrary, LatentAttentionArgs

# With at least this many units per thread, one thread computes a unit.
_UNITS_PER_THREAD = 4
# Limits of latents.c.
_MAX_SIZE, _MAX_VALUE_SIZE, _VALUE_MULTIPLE = 576, 512, 16


@dataclass(frozen=True, slots=True)
class _LatentUnits:
    """Arrays to which LatentAttentionArgs points; `_native/latents.c` has their meaning."""

    pages: IntArray
    units: IntArray
    sizes: IntArray
    items: IntArray
    firsts: IntArray

    @classmethod
    def of(cls, batch: PagedBatch, num_heads: int, library: KernelLibrary) -> _LatentUnits:
        pages = np.zeros((len(batch.pages), max(len(pages) for pages in batch.pages)), np.int64)
        for row, own in zip(pages, batch.pages, strict=True):
            row[: len(own)] = own
        counts = -(-batch.lengths * num_heads // library.latent_rows)
        requests = np.repeat(np.arange(len(counts)), counts)
        first_rows = (np.arange(len(requests)) - np.repeat(np.cumsum(counts) - counts, counts)) * library.latent_rows
        sizes = np.minimum(batch.lengths[requests] * num_heads - first_rows, library.latent_rows)
        last = batch.starts[requests] + (first_rows + sizes - 1) // num_heads
        # Units with more keys take longer, and begin first.
        order = np.argsort(-last, kind="stable")
        units = np.stack([requests, batch.starts[requests], batch.offsets[requests], first_rows], axis=1)[order]
        parts = last[order] // library.latent_part + 1
        firsts = np.concatenate((np.zeros(1, np.int64), np.cumsum(parts)))
        owners = np.repeat(np.arange(len(parts)), parts)
        items = np.stack([owners, np.arange(len(owners)) - firsts[owners]], axis=1)
        return cls(pages, *(np.ascontiguousarray(a) for a in (units, sizes[order], items, firsts)))


class LatentBackend(TorchSdpaBackend):
    """AttentionBackend over one pool of 16-bit latents in CPU memory. Not for two threads at a time."""

    def __init__(self, pool: PagedKV, library: KernelLibrary, *, widen: bool = False) -> None:
        super().__init__(pool, widen=widen)
        self.library = library

    def plan(self, batch: PagedBatch) -> LatentStep:
        return LatentStep(self, batch)


class LatentStep(TorchSdpaStep):
    """StepAttention with the native kernel."""

    def __init__(self, backend: LatentBackend, batch: PagedBatch) -> None:
        super().__init__(backend, batch)
        self._library = backend.library
        # By number of heads.
        self._units: dict[int, _LatentUnits] = {}
        self._partials = torch.empty(0, dtype=torch.float32)

    def forward(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        latents, _ = self._store_new(layer, key, value, params)
        query = query.contiguous()
        num_tokens, num_heads, size = query.shape
        if num_heads not in self._units:
            self._units[num_heads] = _LatentUnits.of(self.batch, num_heads, self._library)
        units = self._units[num_heads]
        out = query.new_empty(num_tokens, num_heads, value.shape[-1])
        num_threads, num_units, num_items = self._library.num_threads, len(units.sizes), len(units.items)
        is_shared = num_threads > 1 and num_units < _UNITS_PER_THREAD * num_threads and num_units < num_items
        if is_shared and not self._partials.numel():
            self._partials = torch.empty(num_items * self._library.latent_partials, dtype=torch.float32)
        args = LatentAttentionArgs(
            queries=query.data_ptr(),
            latents=latents.data_ptr(),
            outputs=out.data_ptr(),
            partials=self._partials.data_ptr() if is_shared else None,
            pages=units.pages.ctypes.data,
            units=units.units.ctypes.data,
            sizes=units.sizes.ctypes.data,
            items=units.items.ctypes.data,
            firsts=units.firsts.ctypes.data,
            pages_stride=units.pages.shape[1],
            num_units=num_units,
            num_items=num_items,
            num_heads=num_heads,
            size=size,
            value_size=value.shape[-1],
            page_size=self.batch.page_size,
            scale=params.scaling,
            num_threads=num_threads,
        )
        self._library.latent_attention(ctypes.byref(args))
        return out


def are_latents_supported(pool: PagedKV, value_sizes: set[int], library: KernelLibrary) -> bool:
    """Return whether the kernel supports this pool. `value_sizes`: sizes of a value in its layers."""
    return (
        pool.device.type == "cpu"
        and bool(pool.latents)
        and not pool.keys
        and dtype_of(pool) is library.dtype
        and all(c.head_dim <= _MAX_SIZE and c.head_dim % 2 == 0 for c in pool.components)
        and all(size <= _MAX_VALUE_SIZE and size % _VALUE_MULTIPLE == 0 for size in value_sizes)
    )
