"""A whole logical cache, cut naively into the pools of ranks: what every plan is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

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

    def place(self, layout: KVLayout, pools: list[np.ndarray], pages: list[int], *, read_only: bool = False) -> None:
        """Put what a rank holds of the room into its pages, row by row; `read_only`: only what decode will read."""
        for component, pool in zip(layout.components, pools, strict=True):
            values = self.values[component.name, component.layer]
            first = 0
            if read_only and component.window is not None:
                first = max(0, self.num_tokens - component.window + 1)
            for token in range(first, self.num_tokens):
                page, slot = pages[token // layout.page_size], token % layout.page_size
                for i, head in enumerate(component.heads):
                    view = rows_of(component, layout, pool)[page]
                    place = view[slot, i] if component.axes == "NHD" else view[i, slot]
                    place[:] = values[token, head].astype(DTYPES[component.dtype])


def rows_of(component: KVComponent, layout: KVLayout, pool: np.ndarray) -> np.ndarray:
    inner = (layout.page_size, component.num_heads)
    shape = inner if component.axes == "NHD" else inner[::-1]
    return pool.view(DTYPES[component.dtype]).reshape(layout.num_pages, *shape, component.head_dim)


def empty_pools(layout: KVLayout, fill: int) -> list[np.ndarray]:
    return [np.full(layout.num_pages * c.page_bytes(layout.page_size), fill, np.uint8) for c in layout.components]


def run(copies: np.ndarray, sources: list[np.ndarray], targets: list[np.ndarray], counts: list[np.ndarray]) -> None:
    """What a transport does with a copy list; `counts` says how often each byte was written."""
    for a, a_offset, b, b_offset, length in copies.tolist():
        assert a_offset + length <= len(sources[a])
        assert b_offset + length <= len(targets[b])
        targets[b][b_offset : b_offset + length] = sources[a][a_offset : a_offset + length]
        counts[b][b_offset : b_offset + length] += 1
