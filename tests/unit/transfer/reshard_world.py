"""A whole logical cache, cut naively into the pools of ranks: what every plan is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from splitserve.core.layout import KVComponent, KVLayout

DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}


@dataclass(frozen=True)
class Kind:
    """A component of the model, before it is cut."""

    name: str
    layer: int
    total_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True)
class Cut:
    """How one side cuts the model: every rank's layout follows from it."""

    tp: int
    # Layers of each pipeline stage.
    stages: tuple[tuple[int, ...], ...]
    page_size: int
    num_pages: int
    axes: str
    dtype: str

    def ranks(self, kinds: list[Kind]) -> list[tuple[int, KVLayout]]:
        """(tensor parallel rank, layout), stage by stage."""
        return [(r, self._layout(kinds, stage, r)) for stage in self.stages for r in range(self.tp)]

    def _layout(self, kinds: list[Kind], layers: tuple[int, ...], rank: int) -> KVLayout:
        components = []
        for kind in kinds:
            if kind.layer in layers:
                # More ranks than heads: neighbours hold the same one.
                n = max(1, kind.total_heads // self.tp)
                first = rank * n if kind.total_heads >= self.tp else rank * kind.total_heads // self.tp
                components.append(
                    KVComponent(
                        kind.name, kind.layer, self.dtype, n, first, kind.total_heads, kind.head_dim,
                        axes=self.axes, window=kind.window,
                    )
                )  # fmt: skip
        return KVLayout(self.page_size, self.num_pages, tuple(components))


@st.composite
def models(draw):
    """Components of a few layers: GQA with any heads, or MLA; layers with and without sliding windows."""
    layers = draw(st.integers(1, 4))
    windows = [draw(st.none() | st.integers(1, 40)) for _ in range(layers)]
    if draw(st.booleans()):
        return [Kind("latent", n, 1, draw(st.sampled_from([1, 6])), windows[n]) for n in range(layers)]
    heads, k_dim, v_dim = draw(st.sampled_from([1, 2, 4, 6])), draw(st.sampled_from([1, 4])), 4
    return [Kind(name, n, heads, d, windows[n]) for n in range(layers) for name, d in (("k", k_dim), ("v", v_dim))]


@st.composite
def cuts(draw, kinds, num_tokens, dtype):
    heads = kinds[0].total_heads
    tp = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8) if heads % n == 0 or n % heads == 0]))
    layers = sorted({k.layer for k in kinds})
    ends = [*sorted(draw(st.sets(st.sampled_from(layers), max_size=len(layers) - 1)) - {0}), len(layers)]
    stages = tuple(tuple(range(a, b)) for a, b in pairwise([0, *ends]))
    page_size = draw(st.integers(1, 32))
    num_pages = -(-num_tokens // page_size) + draw(st.integers(0, 3))
    return Cut(tp, stages, page_size, num_pages, draw(st.sampled_from(["NHD", "HND"])), dtype)


def pages_of(draw, layout, num_tokens):
    """Half the time in a run, as an allocator gives them out."""
    n = -(-num_tokens // layout.page_size)
    if draw(st.booleans()):
        return list(range(layout.num_pages - n, layout.num_pages))
    return draw(st.permutations(range(layout.num_pages)))[:n]


def chunks_of(draw, num_tokens, page_size):
    """The room's tokens in chunks of whole source pages."""
    cut = draw(st.sets(st.integers(0, num_tokens // page_size), max_size=3))
    ends = sorted({0, num_tokens, *(page_size * n for n in cut)})
    return [range(a, b) for a, b in pairwise(ends)]


class Cache:
    """The KV of one room: `values[kind][token, head]` is a row."""

    def __init__(self, kinds: list[Kind], num_tokens: int, dtype: str, seed: int) -> None:
        self.kinds = kinds
        self.num_tokens = num_tokens
        rng = np.random.default_rng(seed)
        self.values = {
            (k.name, k.layer): rng.normal(0, 100, (num_tokens, k.total_heads, k.head_dim)).astype(DTYPES[dtype])
            for k in kinds
        }

    def place(
        self, layout: KVLayout, pools: list[np.ndarray], pages: list[int], *, read_only: bool = False, start: int = 0
    ) -> None:
        """Put what a rank holds of the room into its pages, row by row; `read_only`: only what decode will read.

        Tokens from `start` on.
        """
        for component, pool in zip(layout.components, pools, strict=True):
            values = self.values[component.name, component.layer]
            first = start
            if read_only and component.window is not None:
                first = max(start, self.num_tokens - component.window + 1)
            for token in range(first, self.num_tokens):
                page, slot = pages[token // layout.page_size], token % layout.page_size
                for i, head in enumerate(component.heads):
                    view = rows_of(component, layout, pool)[page]
                    place = view[slot, i] if component.axes == "NHD" else view[i, slot]
                    place[:] = values[token, head].astype(DTYPES[component.dtype])


def naive(cache: Cache, layout: KVLayout, pages: list[int], start: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """(what a target's pool holds after a naive copy, which of its bytes that wrote), for each component."""
    low, high = empty_pools(layout, 0x00), empty_pools(layout, 0xFF)
    for pools in (low, high):
        cache.place(layout, pools, pages, read_only=True, start=start)
    return [(a, a == b) for a, b in zip(low, high, strict=True)]


def rows_of(component: KVComponent, layout: KVLayout, pool: np.ndarray) -> np.ndarray:
    inner = (layout.page_size, component.num_heads)
    shape = inner if component.axes == "NHD" else inner[::-1]
    return pool.view(DTYPES[component.dtype]).reshape(layout.num_pages, *shape, component.head_dim)


def empty_pools(layout: KVLayout, fill: int) -> list[np.ndarray]:
    return [np.full(layout.num_pages * c.page_bytes(layout.page_size), fill, np.uint8) for c in layout.components]


def run(copies: np.ndarray, sources: list[np.ndarray], targets: list[np.ndarray], counts: list[np.ndarray]) -> None:
    """Copy as a transport does; `counts` gets the number of writes of each byte."""
    for a, a_offset, b, b_offset, length in copies.tolist():
        assert a_offset + length <= len(sources[a])
        assert b_offset + length <= len(targets[b])
        targets[b][b_offset : b_offset + length] = sources[a][a_offset : a_offset + length]
        counts[b][b_offset : b_offset + length] += 1
