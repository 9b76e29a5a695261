"""Who may come in while others run: what must stay free in the pool beside a newcomer.

A request is promised pages for the tokens it has. What it will generate is not reserved, for nobody knows how much that
is; instead there must stay free

1. for every admitted request and the newcomer `num_reserved_decode_tokens` tokens more than it has, or as many as it
   may still generate where these are fewer: so many steps pass before anybody has to give way;
2. enough that the longest running request could end, were all others retracted whose pages can be taken back.

With a reserve as large as the longest answer nobody ever has to give way. It does not know in what order requests come.

Where layers with sliding windows have a pool of their own, each is promised window pages for the tokens of rule 1; rule
2 needs none, since a window takes the same however long its request becomes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from splitserve.cache.blocks import kv_to_page_num
from splitserve.cache.kv_cache import PagedKVCache
from splitserve.core.request import Request

# Tokens of output that rule 2 foresees at most: an answer without `max_tokens` may fill the pool, and rarely does.
FORESEEN_TOKENS = 4096


class Admission:
    """`tokens_at_most` says how many tokens' KV a request may come to hold in this worker."""

    def __init__(
        self, cache: PagedKVCache, *, num_reserved_decode_tokens: int, tokens_at_most: Callable[[Request], int]
    ) -> None:
        self._cache = cache
        self._num_reserved = num_reserved_decode_tokens
        # The role's: another one, another bound.
        self.tokens_at_most = tokens_at_most
        # The last refusal: whom, and what must change before it is worth another look. A full worker asks every step.
        self._refused: tuple[Request | None, int, int] = (None, 0, 0)

    def try_admit(self, request: Request, *, max_prefix: int = 0, running: Collection[Request] = ()) -> bool:
        """Admit `request` if there is room; False, changing nothing, if not.

        `running`, on a decode worker: only these can be retracted, for others write to the pages of all the rest, as
        they will to the newcomer's. Nothing said: all can.
        """
        state = (request, self._cache.num_releases, len(running))
        if state == self._refused:
            return False
        num_tokens = min(request.num_tokens, self.tokens_at_most(request))
        if self._lets_end(running, self._pages(num_tokens)) and self._cache.try_admit(
            request,
            num_tokens=num_tokens,
            headroom=self._headroom(request),
            max_prefix=max_prefix,
            num_foreseen=min(request.num_tokens + self._num_reserved, self.tokens_at_most(request)),
        ):
            return True
        self._refused = state
        return False

    def goes_on(self, request: Request, num_tokens: int) -> bool:
        """Whether it may need another step here when it has `num_tokens` tokens, the last of them drawn here."""
        return num_tokens < self.tokens_at_most(request)

    def _lets_end(self, running: Collection[Request], num_pages: int) -> bool:
        """Rule 2, for a newcomer of `num_pages`."""
        if not running:
            return True
        retractable = {request.rid for request in running}
        pinned = sum(self._cache.num_secured_pages(r) for r in self._cache.admitted() if r.rid not in retractable)
        longest = max(self._foreseen(request, FORESEEN_TOKENS) for request in running)
        return longest + pinned + num_pages <= self._cache.pages.num_pages

    def _headroom(self, newcomer: Request) -> int:
        """Pages that rule 1 wants beside all promises."""
        num_pages = self._foreseen(newcomer, self._num_reserved) - self._pages(newcomer.num_tokens)
        for request in self._cache.admitted():
            if not request.is_finished:
                secured = self._cache.num_secured_pages(request)
                num_pages += max(0, self._foreseen(request, self._num_reserved) - secured)
        return max(0, num_pages)

    def _foreseen(self, request: Request, more: int) -> int:
        """Pages it holds at most until it has `more` tokens, or is at its end."""
        num_tokens = min(request.num_tokens + more, self.tokens_at_most(request))
        return self._cache.num_pages_at_most(request, num_tokens)

    def _pages(self, num_tokens: int) -> int:
        return kv_to_page_num(num_tokens, self._cache.page_size)


def prefix_limit(request: Request) -> int:
    """How many of its tokens may come from a cache: all but the last, or those whose logits nobody asks to see."""
    limit = request.num_tokens - 1
    if (position := request.next_input_logprob) is not None:
        limit = min(limit, position - 1)
    return limit
