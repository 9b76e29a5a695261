"""From two layouts and two page lists to the copies that carry one into the other. Pure arithmetic, property-tested.

Today both pools must be cut the same way (same page size, layers, heads and dtype; the number of pages is free), and a
page is one contiguous piece of each component. Nothing outside this file relies on that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from splitserve.core.layout import KVLayout
from splitserve.disaggregation.copies import COPY, Copies, coalesce


def check_compatible(src: KVLayout, dst: KVLayout) -> str | None:
    """Why pages of `src` cannot be copied into `dst`, naming both values; None where they can."""
    if src.page_size != dst.page_size:
        return f"page size {src.page_size} against {dst.page_size}"
    if len(src.components) != len(dst.components):
        return f"{len(src.components)} KV components against {len(dst.components)}"
    for a, b in zip(src.components, dst.components, strict=True):
        if a != b:
            return f"KV component {a} against {b}"
    return None


def plan_copies(src: KVLayout, dst: KVLayout, src_pages: Sequence[int], dst_pages: Sequence[int]) -> Copies:
    """Copies that put page src_pages[i] of every component into dst_pages[i], in order of components and pages.

    Raises ValueError for incompatible layouts, lists of different lengths, and pages outside either pool.
    """
    if difference := check_compatible(src, dst):
        raise ValueError(f"layouts differ: {difference}")
    if len(src_pages) != len(dst_pages):
        raise ValueError(f"{len(src_pages)} source pages for {len(dst_pages)} target pages")
    for side, pages, layout in (("source", src_pages, src), ("target", dst_pages, dst)):
        if pages and (min(pages) < 0 or max(pages) >= layout.num_pages):
            raise ValueError(f"{side} pages reach outside the pool of {layout.num_pages} pages")
    table = np.empty((len(src.components), len(src_pages)), dtype=COPY)
    sizes = np.array([c.page_bytes(src.page_size) for c in src.components], dtype=np.uint64)[:, None]
    table["src_region"] = table["dst_region"] = np.arange(len(src.components))[:, None]
    table["src_offset"] = np.array(src_pages, dtype=np.uint64)[None, :] * sizes
    table["dst_offset"] = np.array(dst_pages, dtype=np.uint64)[None, :] * sizes
    table["length"] = sizes
    return coalesce(table.reshape(-1))
