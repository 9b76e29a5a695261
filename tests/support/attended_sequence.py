"""A sequence for tests of attention by the kernels, which compute it in any chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import strategies as st

from splitserve.engine.attention.base import AttentionParams, PagedBatch
from splitserve.engine.attention.kernels import KernelBackend, KernelStep
from splitserve.engine.kernels.library import KernelLibrary
from splitserve.engine.pool import KVPool, layout_for
from splitserve.engine.probe import LayerShape


@dataclass(frozen=True)
class AttendedSequence:
    """A sequence of one layer: its heads, and its queries, keys and values."""

    num_kv_heads: int
    group: int
    head_size: int
    params: AttentionParams
    length: int
    page_size: int = 16
    # None: the head size.
    value_size: int | None = None

    @property
    def value_shape(self) -> tuple[int, int]:
        return self.num_kv_heads, self.value_size or self.head_size

    @cached_property
    def tensors(self) -> list[torch.Tensor]:
        """Queries, keys and values, [length, heads, size]. Tests may write to them."""
        return self._random(self.length, seed=0)

    def attend(self, library: KernelLibrary, chunks: Sequence[int], few: int, others: int = 0) -> torch.Tensor:
        """Return the outputs [length, heads, value_size] of the sequence, computed in chunks.

        few: chunks of up to `few` tokens use the kernel of decode steps. others: requests of one token in each step.

        Pages before the window are gone, as in a pool of window pages. What was never written is NaN, also before the
        memory of the pool.
        """
        size = self.page_size
        shape = LayerShape(0, self.num_kv_heads, self.head_size, self.value_shape[1], self.params.window)
        own_pages = -(-self.length // size)
        pool = KVPool(
            layout_for([shape], "bfloat16", page_size=size, num_pages=own_pages + others), torch.device("cpu")
        )
        for memories in (pool.keys, pool.values):
            for layer, memory in memories.items():
                # A page's numbers lie before it.
                before = memory[0].numel()
                whole = torch.full((before + memory.numel(),), torch.nan, dtype=memory.dtype)
                memories[layer] = whole[before:].view(memory.shape)
        backend = KernelBackend(pool, library)
        order = np.random.default_rng(self.length).permutation(own_pages)
        beside = self._random(others, seed=9)
        outputs, start = [], 0
        for chunk in chunks:
            pages = (order[: -(-(start + chunk) // size)], *(np.array([own_pages + i]) for i in range(others)))
            in_window = pages[0].copy()
            in_window[: max(0, start + 1 - (self.params.window or self.length)) // size] = -1
            window_pages = (in_window, *pages[1:])
            starts, counts = np.array([start] + [0] * others), np.array([chunk] + [1] * others)
            batch = PagedBatch(starts, counts, pages, size, window_pages if self.params.window else None)
            q, k, v = (torch.cat([x[start : start + chunk], y]) for x, y in zip(self.tensors, beside, strict=True))
            with patch.object(KernelStep, "longest_single", few):
                outputs.append(backend.plan(batch).forward(0, q, k, v, self.params)[:chunk].clone())
            start += chunk
        return torch.cat(outputs)

    def attend_in_float64(self) -> torch.Tensor:
        queries, keys, values = (x.double() for x in self.tensors)
        keys, values = (x.repeat_interleave(self.group, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.params.scaling
        if self.params.softcap is not None:
            scores = self.params.softcap * (scores / self.params.softcap).tanh()
        distance = torch.arange(self.length)[:, None] - torch.arange(self.length)
        scores[:, (distance < 0) | (distance >= (self.params.window or self.length))] = -torch.inf
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)

    def _random(self, length: int, seed: int) -> list[torch.Tensor]:
        keys = self.num_kv_heads, self.head_size
        shapes = ((self.num_kv_heads * self.group, self.head_size), keys, self.value_shape)
        generators = (torch.Generator().manual_seed(seed + i) for i in range(3))
        return [torch.randn(length, *s, generator=g).bfloat16() for s, g in zip(shapes, generators, strict=True)]


def sequence_with_zero_sums() -> AttendedSequence:
    """Return a sequence with a sum of -0 if keys without a weight are left out, and of +0 with them."""
    sequence = AttendedSequence(1, 1, 16, AttentionParams(1.0), 600)
    queries, keys, values = sequence.tensors
    queries.fill_(1.0)
    keys.fill_(0.0)
    values.fill_(-1.0)
    # The factor of earlier sums becomes zero, in the second part of the keys and for the first part.
    keys[576] = 100.0
    values[576] = -0.0
    values[577:] = 1.0
    return sequence


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.view(torch.int16), expected.view(torch.int16))


@st.composite
def chunkings(draw: st.DrawFn, length: int) -> list[int]:
    chunks: list[int] = []
    while (rest := length - sum(chunks)) > 0:
        chunks.append(draw(st.integers(1, rest)))
    return chunks
