"""Bits of attention by the kernels: the same for a token in any step, in each build that this CPU can run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.engine.attention.base import AttentionParams, PagedBatch
from splitserve.engine.attention.kernels import KernelBackend
from splitserve.engine.kernels.library import KernelLibrary
from splitserve.engine.pool import KVPool, layout_for
from splitserve.engine.probe import LayerShape

PAGE_SIZE = 16


@dataclass(frozen=True)
class AttendedSequence:
    """A sequence of one layer: its heads, and its queries, keys and values."""

    num_kv_heads: int
    group: int
    head_size: int
    params: AttentionParams
    length: int

    def attend(self, library: KernelLibrary, chunks: Sequence[int], few: int, others: int = 0) -> torch.Tensor:
        """Return the outputs [length, heads, head_size] of the sequence, computed in chunks.

        few: chunks of up to `few` tokens use the kernel of decode steps. others: requests of one token in each step.
        """
        shape = LayerShape(0, self.num_kv_heads, self.head_size, self.head_size, self.params.window)
        own_pages = -(-self.length // PAGE_SIZE)
        layout = layout_for([shape], "bfloat16", page_size=PAGE_SIZE, num_pages=own_pages + others)
        backend = KernelBackend(KVPool(layout, torch.device("cpu")), library)
        order = np.random.default_rng(self.length).permutation(own_pages)
        heads = (self.num_kv_heads * self.group, self.num_kv_heads, self.num_kv_heads)
        given = [_random(self.length, n, self.head_size, seed=i) for i, n in enumerate(heads)]
        beside = [_random(others, n, self.head_size, seed=9 + i) for i, n in enumerate(heads)]
        outputs, start = [], 0
        for chunk in chunks:
            pages = (order[: -(-(start + chunk) // PAGE_SIZE)], *(np.array([own_pages + i]) for i in range(others)))
            batch = PagedBatch(np.array([start] + [0] * others), np.array([chunk] + [1] * others), pages, PAGE_SIZE)
            step = backend.plan(batch)
            step.longest_single = few
            rows = [torch.cat([x[start : start + chunk], y]) for x, y in zip(given, beside, strict=True)]
            outputs.append(step.forward(0, *rows, self.params)[:chunk].clone())
            start += chunk
        return torch.cat(outputs)


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.view(torch.int16), expected.view(torch.int16))


@st.composite
def chunkings(draw: st.DrawFn, length: int) -> list[int]:
    chunks: list[int] = []
    while (rest := length - sum(chunks)) > 0:
        chunks.append(draw(st.integers(1, rest)))
    return chunks


@pytest.mark.parametrize(
    ("num_kv_heads", "group", "head_size", "window", "softcap"),
    [
        (3, 3, 64, None, None),
        # More KV heads than one task of a decode step has.
        (5, 1, 128, 100, None),
        (1, 8, 256, 700, 50.0),
        (1, 7, 48, None, 30.0),
        (2, 5, 16, 1, None),
    ],
)
@settings(max_examples=10)
@given(data=st.data())
def test_a_token_gets_the_same_bits_in_any_step(
    library: KernelLibrary,
    num_kv_heads: int,
    group: int,
    head_size: int,
    window: int | None,
    softcap: float | None,
    data: st.DataObject,
) -> None:
    if head_size % library.lanes:
        pytest.skip("the kernels do not support such heads")
    length = data.draw(st.sampled_from([1, 63, 64, 130, 511, 513, 1100]))
    params = AttentionParams(0.2, window=window, softcap=softcap)
    sequence = AttendedSequence(num_kv_heads, group, head_size, params, length)
    whole = sequence.attend(library, [length], few=0)
    chunks = data.draw(chunkings(length))
    torch.set_num_threads(data.draw(st.integers(1, 4)))
    found = sequence.attend(
        library, chunks, few=data.draw(st.sampled_from([0, 4, 16])), others=data.draw(st.integers(0, 3))
    )
    assert _same_bits(found, whole)


def test_a_token_gets_the_same_bits_alone_as_in_its_prompt(library: KernelLibrary) -> None:
    sequence = AttendedSequence(3, 3, 64, AttentionParams(0.2), 600)
    assert _same_bits(sequence.attend(library, [1] * 600, few=1), sequence.attend(library, [600], few=0))
