"""Copy plans between two KV layouts: from two page lists to the byte ranges to copy. Pure arithmetic, property-tested.

1. Pairs list the heads of each component that this source sends to this target (`pairing.py`).
2. For each chunk, `plan` turns a range of tokens into rows on both sides. A row is head_dim elements of one token and
   one head. Rows that are adjacent on both sides become one copy.
3. If the dtypes differ, or packing turns many small copies into few large ones, the result is a CastPlan instead.

Component pairs of equal geometry (all layers of most models) are planned once. No Python loop runs over pages or
tokens. Depends on layouts only, not on ranks or transports.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from splitserve.core.layout import DTYPE_BYTES, KVComponent, KVLayout, first_token_read
from splitserve.transfer.convert import CastPlan, Rows, travels_as
from splitserve.transfer.copies import COPY, Copies, coalesce, joined, over_regions
from splitserve.transfer.pairing import HeadPair, overlap

# Packing costs a pass over the bytes. It pays off only if it divides the number of writes by at least this factor.
_PACKING_GAIN = 4


class RoomPages(NamedTuple):
    """A room's pages in one pool, in token order from token 0 on."""

    pages: Sequence[int]
    # Window page of each page, -1 for none. Empty if layers with windows have no pool of their own.
    window_pages: Sequence[int] = ()

    def of(self, window: int | None, layout: KVLayout) -> Sequence[int]:
        """Return the pages used by components with `window`."""
        return self.window_pages if layout.has_window_pages(window) else self.pages


class LayoutPlan(NamedTuple):
    copies: Copies
    casts: list[CastPlan]


class _Side(NamedTuple):
    """Position of a pair's rows in one of its two components."""

    axes: str
    # Rows per token in the component, and how many of them precede the pair's first row.
    num_heads: int
    skipped: int
    # Rows from the start of one page to the start of the next.
    stride: int
    dtype: str

    def rows(self, pages: Rows, page_size: int, tokens: Rows, num_heads: int) -> Rows:
        """Return row numbers in the component's region, [num_tokens, num_heads]."""
        page, slot = pages[tokens // page_size][:, None], (tokens % page_size)[:, None]
        head = self.skipped + np.arange(num_heads)
        if self.axes == "NHD":
            rows: Rows = page * self.stride + slot * self.num_heads + head
        else:
            rows = page * self.stride + head * page_size + slot
        return rows


class _Geometry(NamedTuple):
    """All that determines a pair's rows, except the regions."""

    src: _Side
    dst: _Side
    num_heads: int
    # Elements of a row.
    row: int
    window: int | None

    def tokens(self, chunk: range, num_tokens: int) -> Rows:
        """Return the tokens of `chunk` that decode will read."""
        return np.arange(max(chunk.start, first_token_read(self.window, num_tokens)), chunk.stop)


def plan(
    src: KVLayout,
    dst: KVLayout,
    src_pages: RoomPages,
    dst_pages: RoomPages,
    tokens: range,
    num_tokens: int,
    pairs: Sequence[HeadPair] | None = None,
    *,
    wire_dtype: str | None = None,
    pack_below: int = 0,
) -> LayoutPlan:
    """Plan the transfer of `tokens` from `src_pages` into `dst_pages`, in a room of `num_tokens` prompt tokens.

    Both page lists reach at least to the end of `tokens`. Region i is component i.
    `pairs` is this source's part of the target (`sources_of`). None: everything that the source holds of it.
    For sliding-window layers, only the tokens that decode will read are sent.
    If `wire_dtype` is narrower than the target's dtype, rows travel in it and `plan_unpack` must follow.
    Copies smaller than `pack_below` bytes on average become a CastPlan if that makes them far fewer.
    Raises ValueError if the layouts differ, or if pages are missing or outside either pool.
    """
    if not 0 <= tokens.start <= tokens.stop <= num_tokens or tokens.step != 1:
        raise ValueError(f"tokens {tokens} are not a range of the room's {num_tokens}")
    groups: dict[_Geometry, list[tuple[int, int]]] = defaultdict(list)
    for pair in overlap(src, dst) if pairs is None else pairs:
        groups[_geometry(src, dst, pair, wire_dtype)].append((pair.src, pair.dst))
    copies, casts = [np.empty(0, dtype=COPY)], []
    for geometry, found in groups.items():
        carried = geometry.tokens(tokens, num_tokens)
        ours = _checked("source", src_pages, src, geometry.window, tokens.stop, carried)
        theirs = _checked("target", dst_pages, dst, geometry.window, tokens.stop, carried)
        cast = _cast_plan(geometry, found, (src, ours), (dst, theirs), carried)
        direct = _direct(cast)
        if direct is None or _is_worth_packing(cast, direct, pack_below):
            casts.append(cast)
        else:
            copies.append(over_regions(direct, cast.regions[:, 0], cast.regions[:, 1]))
    return LayoutPlan(joined(copies), [cast for cast in casts if cast.num_bytes])


def plan_unpack(dst: KVLayout, dst_pages: RoomPages, tokens: range, num_tokens: int, wire_dtype: str) -> list[CastPlan]:
    """Plan the widening of `tokens` of a room that travelled as `wire_dtype`, inside the target's own pages.

    Run it once all of the room has arrived.
    """
    groups: dict[_Geometry, list[tuple[int, int]]] = defaultdict(list)
    for i, c in enumerate(dst.components):
        if (narrow := travels_as(c.dtype, wire_dtype)) != c.dtype:
            sides = [_side(c, dst.page_size, c.first_head, dtype) for dtype in (narrow, c.dtype)]
            groups[_between(sides[0], sides[1], c.num_heads, c)].append((i, i))
    casts = []
    for geometry, found in groups.items():
        carried = geometry.tokens(tokens, num_tokens)
        side = dst, _checked("target", dst_pages, dst, geometry.window, num_tokens, carried)
        casts.append(_cast_plan(geometry, found, side, side, carried))
    return casts


def _checked(side: str, room: RoomPages, layout: KVLayout, window: int | None, num_tokens: int, carried: Rows) -> Rows:
    """Return the pages of components with `window`. Check that they hold `num_tokens` and lie inside the pool."""
    pages = np.asarray(room.of(window, layout), dtype=np.int64)
    if len(pages) * layout.page_size < num_tokens:
        raise ValueError(f"{len(pages)} {side} pages of {layout.page_size} tokens do not hold {num_tokens} tokens")
    used = pages[carried // layout.page_size] if layout.has_window_pages(window) else pages
    num_pages = layout.num_window_pages if layout.has_window_pages(window) else layout.num_pages
    if len(used) and (used.min() < 0 or used.max() >= num_pages):
        raise ValueError(f"{side} pages reach outside the pool of {num_pages} pages")
    return pages


def _geometry(src: KVLayout, dst: KVLayout, pair: HeadPair, wire_dtype: str | None) -> _Geometry:
    a, b = src.components[pair.src], dst.components[pair.dst]
    heads = range(pair.first_head, pair.first_head + pair.num_heads)
    if not set(heads) <= set(a.heads) & set(b.heads):
        raise ValueError(f"heads {heads} of layer {b.layer} ({b.name}) are not in both {a.heads} and {b.heads}")
    return _between(
        _side(a, src.page_size, pair.first_head, a.dtype),
        _side(b, dst.page_size, pair.first_head, travels_as(b.dtype, wire_dtype)),
        pair.num_heads,
        b,
    )


def _side(component: KVComponent, page_size: int, first_head: int, dtype: str) -> _Side:
    # More rows of a narrower dtype fit into a page.
    rows_per_row = DTYPE_BYTES[component.dtype] // DTYPE_BYTES[dtype]
    stride = page_size * component.num_heads * rows_per_row
    return _Side(component.axes, component.num_heads, first_head - component.first_head, stride, dtype)


def _between(src: _Side, dst: _Side, num_heads: int, component: KVComponent) -> _Geometry:
    if src.axes == dst.axes == "NHD" and num_heads == src.num_heads == dst.num_heads:
        # In both, a token's heads are adjacent: treat them as one wide row.
        src, dst = (side._replace(num_heads=1, stride=side.stride // num_heads) for side in (src, dst))
        return _Geometry(src, dst, 1, component.head_dim * num_heads, component.window)
    return _Geometry(src, dst, num_heads, component.head_dim, component.window)


def _cast_plan(
    geometry: _Geometry,
    regions: list[tuple[int, int]],
    source: tuple[KVLayout, Rows],
    target: tuple[KVLayout, Rows],
    tokens: Rows,
) -> CastPlan:
    (src, src_pages), (dst, dst_pages) = source, target
    src_rows = geometry.src.rows(src_pages, src.page_size, tokens, geometry.num_heads).reshape(-1)
    dst_rows = geometry.dst.rows(dst_pages, dst.page_size, tokens, geometry.num_heads).reshape(-1)
    if geometry.dst.axes == "HND" and geometry.num_heads > 1:
        # Sort in the order of the target's pages: by page, then head, then token.
        unpermuted = np.arange(len(dst_pages), dtype=np.int64)
        order = np.argsort(geometry.dst.rows(unpermuted, dst.page_size, tokens, geometry.num_heads), axis=None)
        src_rows, dst_rows = src_rows[order], dst_rows[order]
    pairs = np.array(regions, dtype=np.int64)
    return CastPlan(pairs, src_rows, dst_rows, geometry.row, geometry.src.dtype, geometry.dst.dtype)


def _direct(cast: CastPlan) -> Copies | None:
    """Return the rows of one region as coalesced copies. None if they must be converted."""
    if cast.src_dtype != cast.dst_dtype:
        return None
    size = cast.packed_row_bytes
    runs = np.zeros(len(cast.src_rows), dtype=COPY)
    runs["src_offset"], runs["dst_offset"], runs["length"] = cast.src_rows * size, cast.dst_rows * size, size
    return coalesce(runs)


def _is_worth_packing(cast: CastPlan, direct: Copies, pack_below: int) -> bool:
    if not len(direct) or len(cast.src_rows) * cast.packed_row_bytes >= pack_below * len(direct):
        return False
    num_packed = 1 + int((np.diff(cast.dst_rows) != 1).sum())
    return num_packed * _PACKING_GAIN <= len(direct)
