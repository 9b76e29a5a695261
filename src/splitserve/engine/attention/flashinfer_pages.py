"""A step in FlashInfer's format: pages of all requests in one list, their offsets, and the fill of the last pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splitserve.engine.attention.base import PagedBatch
from splitserve.engine.attention.torch_sdpa import first_visible

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PageLists:
    """A step as the library's page table. R requests."""

    # Request r's new tokens are [query_begins[r], query_begins[r + 1]) of the step. [R + 1]
    query_begins: Int32Array
    # Its pages are pages[page_begins[r]:page_begins[r + 1]]. [R + 1]
    page_begins: Int32Array
    pages: Int32Array
    # Tokens in each request's last page, in [1, page_size]. [R]
    last_page_tokens: Int32Array
    # Tokens of each request, new ones included. [R]
    num_tokens: Int32Array


def page_lists(batch: PagedBatch, window: int | None = None) -> PageLists:
    """Return the lists for layers with `window`, without the pages before it, because positions count from the end."""
    firsts = (first_visible(batch.starts, window) // batch.page_size).tolist()
    seen = [pages[first:] for pages, first in zip(batch.pages_for(window), firsts, strict=True)]
    counts = np.array([len(pages) for pages in seen], np.int64)
    ends = batch.starts + batch.lengths
    return PageLists(
        query_begins=batch.offsets.astype(np.int32),
        page_begins=np.concatenate((np.zeros(1, np.int64), np.cumsum(counts))).astype(np.int32),
        pages=np.concatenate(seen).astype(np.int32),
        last_page_tokens=((ends - 1) % batch.page_size + 1).astype(np.int32),
        num_tokens=ends.astype(np.int32),
    )
