"""Division of memory if some of a model's layers have sliding windows and others attend to all tokens.

The windowed layers' pool (`cache/window_pages.py`) has a share of the pages that the full layers have, but not more
than all requests and steps can use. A request of any length takes no more of it than its window and a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from splitserve.cache.blocks import kv_to_page_num
from splitserve.cache.window_pages import least_window_pages, window_pages_at_most
from splitserve.core.layout import KVLayout
from splitserve.engine.parallel.ranks import Ranks

# Requests of this length fill both pools alike, unless another ratio is configured.
FORESEEN_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class WindowDemand:
    """The most that a worker's scheduler uses of a windowed layers' own pool."""

    # Maximum pages of that pool per page of the full layers' pool. 1: there is one pool. None: from `FORESEEN_TOKENS`.
    full_tokens_ratio: float | None
    # Prompt tokens in all steps in flight.
    step_tokens: int
    max_requests: int
    # Option that requires one pool for all layers whatever the ratio is; None: no such option.
    obstacle: str | None = None

    def num_window_pages(self, num_pages: int, page_size: int, window: int) -> int:
        """Return the window pages beside `num_pages` of the full layers; 0: one pool. `window`: in tokens."""
        ratio = window / FORESEEN_TOKENS if self.full_tokens_ratio is None else self.full_tokens_ratio
        if ratio >= 1.0:
            return 0
        most = self.max_requests * window_pages_at_most(window, page_size) + kv_to_page_num(self.step_tokens, page_size)
        wanted = min(math.ceil(num_pages * ratio), most)
        found = max(wanted, least_window_pages(window, page_size, self.step_tokens))
        return found if found < num_pages else 0


def window_of_some(one_page: KVLayout, ranks: Ranks | None) -> int | None:
    """Return the largest window of a model that has layers with and without one, on this rank or on others.

    None for any other model. Every rank calls it. Raises RanksLostError.
    """
    has_full = any(component.window is None for component in one_page.components)
    largest = max((component.window or 0 for component in one_page.components), default=0)
    if ranks is not None:
        has_full = ranks.least(-int(has_full)) < 0
        largest = -ranks.least(-largest)
    return largest if has_full and largest else None
