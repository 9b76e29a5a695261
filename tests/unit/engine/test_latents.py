"""The kernel for attention over latents: results of plain arithmetic, and equal bits in any step and on any threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.engine.attention.base import AttentionParams, PagedBatch
from splitserve.engine.attention.latents import LatentBackend, are_latents_supported
from splitserve.engine.kernels.library import KernelLibrary
from splitserve.engine.pool import KVPool, layout_for
from splitserve.engine.probe import LayerShape

SIZE, VALUE_SIZE, PAGE_SIZE = 40, 32, 16
PARAMS = AttentionParams(scaling=0.2, is_latent=True)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@dataclass
class Sequences:
    """Sequences of random rows and queries in one pool, computed in any steps."""

    lengths: Sequence[int]
    num_heads: int
    library: KernelLibrary

    def __post_init__(self) -> None:
        counts = [-(-n // PAGE_SIZE) for n in self.lengths]
        shape = LayerShape(0, 1, SIZE, VALUE_SIZE, None, is_latent=True)
        pool = KVPool(layout_for((shape,), "bfloat16", page_size=PAGE_SIZE, num_pages=sum(counts)), torch.device("cpu"))
        assert are_latents_supported(pool, {VALUE_SIZE}, self.library)
        # Content of unwritten pages must not matter.
        pool.latents[0].fill_(torch.nan)
        numbers = np.random.default_rng(0).permutation(sum(counts))
        self._pages = np.split(numbers, np.cumsum(counts)[:-1])
        self._backend = LatentBackend(pool, self.library)
        self.rows = [random(n, SIZE, seed=i) for i, n in enumerate(self.lengths)]
        self.queries = [random(n, self.num_heads, SIZE, seed=100 + i) for i, n in enumerate(self.lengths)]

    def step(self, parts: dict[int, range]) -> dict[int, torch.Tensor]:
        """Compute these tokens of these sequences; return each one's results."""
        batch = PagedBatch(
            np.array([p.start for p in parts.values()]),
            np.array([len(p) for p in parts.values()]),
            tuple(self._pages[i][: -(-p.stop // PAGE_SIZE)] for i, p in parts.items()),
            PAGE_SIZE,
        )
        query, key = (
            torch.cat([states[i][p.start : p.stop] for i, p in parts.items()]) for states in (self.queries, self.rows)
        )
        out = self._backend.plan(batch).forward(0, query, key[:, None], key[:, None, :VALUE_SIZE], PARAMS)
        return dict(zip(parts, out.split([len(p) for p in parts.values()]), strict=True))

    def whole(self, sequence: int) -> torch.Tensor:
        """Return a sequence's results in one step of its own."""
        return self.step({sequence: range(self.lengths[sequence])})[sequence]

    def exact(self, sequence: int) -> torch.Tensor:
        q, k = self.queries[sequence].float(), self.rows[sequence].float()
        scores = torch.einsum("thd,sd->hts", q, k) * PARAMS.scaling
        hidden = torch.ones(len(k), len(k), dtype=torch.bool).triu(1)
        return torch.einsum("hts,sd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), k[:, :VALUE_SIZE])


@pytest.mark.parametrize("num_heads", [1, 6, 16, 40, 128])
def test_results_are_those_of_plain_arithmetic(library: KernelLibrary, num_heads: int) -> None:
    sequences = Sequences((1, 17, 70, 600), num_heads, library)
    together = sequences.step({i: range(n) for i, n in enumerate(sequences.lengths)})
    for i, found in together.items():
        torch.testing.assert_close(found.float(), sequences.exact(i), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("num_heads", [6, 16, 40])
def test_chunks_other_requests_and_threads_change_no_bit(library: KernelLibrary, num_heads: int) -> None:
    sequences = Sequences((1100, 530, 90), num_heads, library)
    expected = [sequences.whole(i) for i in range(3)]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found: list[list[torch.Tensor]] = [[], [], []]
        done = [0, 0, 0]
        chunks = iter([(512, 1, 64), (1, 500, 1), (63, 0, 1), (64, 1, 1), (400, 27, 20), (1, 1, 3)] + [(1, 1, 1)] * 70)
        while any(n < length for n, length in zip(done, sequences.lengths, strict=True)):
            parts = {
                i: range(n, min(n + chunk, length))
                for i, (n, chunk, length) in enumerate(zip(done, next(chunks), sequences.lengths, strict=True))
                if chunk and n < length
            }
            for i, out in sequences.step(parts).items():
                found[i].append(out)
                done[i] += len(out)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(torch.cat(one), other)


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(1, 300),
    num_heads=st.integers(1, 20),
    cuts=st.lists(st.integers(1, 299), max_size=5),
    threads=st.integers(1, 4),
)
def test_any_chunks_give_the_same_bits(
    library: KernelLibrary, length: int, num_heads: int, cuts: list[int], threads: int
) -> None:
    sequences = Sequences((length,), num_heads, library)
    torch.set_num_threads(1)
    expected = sequences.whole(0)
    torch.set_num_threads(threads)
    ends = sorted({*(cut for cut in cuts if cut < length), length})
    found = [sequences.step({0: range(a, b)})[0] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    assert torch.equal(torch.cat(found), expected)
