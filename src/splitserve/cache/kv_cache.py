"""One account of the whole KV pool: every page is free, cached, or held by one admitted request.

The life of a request in here:
1. `try_admit` takes a row, locks the longest cached prefix and reserves room up to the request's longest possible end.
   The sum of all reservations never exceeds what is free or can be evicted, so an admitted request never fails to grow.
2. `extend` makes sure that pages for the tokens of the next step are there.
3. `share` publishes the whole pages computed so far, so that others find them while the request still runs.
4. `release` ends it: row and pages go back, computed whole pages into the prefix cache where that is wanted.

It does not know why a request is admitted or released, nor what the pages contain.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitserve.cache.blocks import kv_to_page_num
from splitserve.cache.pages import PageAllocator
from splitserve.cache.prefix import PrefixCache, PrefixHandle
from splitserve.cache.shared_pages import SharedPages
from splitserve.cache.slots import ReqToTokenPool
from splitserve.core.request import Request


class InvariantViolation(AssertionError):
    """Pages or rows do not add up: something was lost or is held twice."""


@dataclass(slots=True)
class Holding:
    """What one admitted request holds besides its row."""

    # Pages the request may come to hold, cached prefix included.
    pages_at_most: int
    # request.pages[:num_shared] belong to the prefix cache and are kept by `handle`; the rest belong to the request.
    num_shared: int
    handle: PrefixHandle | None


class PagedKVCache:
    def __init__(
        self,
        pages: PageAllocator,
        rows: ReqToTokenPool,
        prefix: PrefixCache,
        page_size: int,
        shared: SharedPages | None = None,
    ) -> None:
        self.pages = pages
        self.rows = rows
        self.prefix = prefix
        self.page_size = page_size
        # Where our pages are part of a pool of several workers; then there must be no prefix cache to hold them too.
        self._shared = shared
        self._holdings: dict[str, Holding] = {}
        # Pages still to come to admitted requests: the sum of pages_at_most - len(request.pages).
        self._reserved = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def num_tokens_total(self) -> int:
        return self.pages.num_pages * self.page_size

    def try_admit(self, request: Request, *, max_tokens: int, max_prefix: int = 0) -> bool:
        """Admit `request`, which will hold at most `max_tokens` tokens; False, changing nothing, if there is no room.

        Of its tokens at most the first `max_prefix` are looked up in the prefix cache.
        """
        if self.rows.available_size() == 0:
            return False
        match = self.prefix.match(request.tokens(0, max_prefix))
        self.prefix.lock(match.handle)
        pages_at_most = kv_to_page_num(max_tokens, self.page_size)
        still_to_come = pages_at_most - len(match.pages)
        if self._reserved + still_to_come > self.pages.available() + self.prefix.num_evictable_pages:
            self.prefix.unlock(match.handle)
            return False
        self._reserved += still_to_come
        self._holdings[request.rid] = Holding(pages_at_most, len(match.pages), match.handle)
        request.row = self.rows.alloc()
        request.pages = list(match.pages)
        self.rows.write(request.row, 0, request.pages)
        request.num_computed_tokens = request.num_cached_tokens = len(match.pages) * self.page_size
        self.prefix_queries += max_prefix
        self.prefix_hits += request.num_cached_tokens
        return True

    def extend(self, request: Request, num_tokens: int) -> None:
        """Give `request` pages for its first `num_tokens` tokens. Never fails within what it was admitted for."""
        missing = kv_to_page_num(num_tokens, self.page_size) - len(request.pages)
        if missing <= 0:
            return
        holding, row = self._held(request)
        if len(request.pages) + missing > holding.pages_at_most:
            raise InvariantViolation(f"request {request.rid} outgrows its reservation of {holding.pages_at_most} pages")
        new = self._take(missing)
        self.rows.write(row, len(request.pages), new)
        request.pages.extend(new)
        self._reserved -= missing

    def share(self, request: Request) -> None:
        """Publish the whole pages of computed tokens; the request goes on with the cache's pages, locked."""
        holding, row = self._held(request)
        whole = request.num_computed_tokens // self.page_size
        if whole <= holding.num_shared:
            return
        tokens = request.tokens(0, whole * self.page_size)
        match, duplicates = self.prefix.insert(tokens, request.pages[:whole])
        if len(match.pages) < whole:  # A cache that keeps nothing: the pages stay the request's own.
            return
        self.prefix.lock(match.handle)
        self.prefix.unlock(holding.handle)
        self.pages.free(duplicates)
        request.pages[:whole] = match.pages
        self.rows.write(row, 0, match.pages)
        holding.num_shared, holding.handle = whole, match.handle

    def release(self, request: Request, *, publish: bool) -> None:
        """Take everything back; once. `publish` puts the computed whole pages into the prefix cache first."""
        if publish:
            self.share(request)
        holding, row = self._held(request)
        del self._holdings[request.rid]
        self._reserved -= holding.pages_at_most - len(request.pages)
        self.prefix.unlock(holding.handle)
        self.pages.free(request.pages[holding.num_shared :])
        self.rows.free(row)
        request.pages = []
        request.row = None

    def settle(self, request: Request) -> None:
        """Take note of an exchange of pages with another worker, where there was one. After the hand-over."""
        if self._shared is None or request.bootstrap is None:
            return
        _, row = self._held(request)
        request.pages = self._shared.settle(request.pages, tag=request.bootstrap.key.tag)
        self.rows.write(row, 0, request.pages)

    def holds(self, request: Request) -> bool:
        return request.rid in self._holdings

    def flush(self) -> int:
        """Forget everything no request uses; how many pages that freed."""
        evicted = self.prefix.evict(self.prefix.num_pages)
        self.pages.free(evicted)
        return len(evicted)

    def check(self, held: list[Request]) -> None:
        """Raise InvariantViolation unless `held` are all admitted requests and every page and row is accounted for."""
        self.prefix.check()
        if {r.rid for r in held} != set(self._holdings):
            raise InvariantViolation(f"holdings of {set(self._holdings) ^ {r.rid for r in held}} have no owner")
        own = [p for r in held for p in r.pages[self._holdings[r.rid].num_shared :]]
        accounted = self.pages.available() + self.prefix.num_pages + len(own)
        if len(set(own)) != len(own) or accounted != self.pages.num_pages:
            raise InvariantViolation(
                f"{self.pages.num_pages} pages, but {self.pages.available()} free + {self.prefix.num_pages} cached + "
                f"{len(own)} held ({len(set(own))} different)"
            )
        if self.rows.available_size() + len(held) != len(self.rows.table):
            raise InvariantViolation(f"{self.rows.available_size()} rows free and {len(held)} held")
        reserved = sum(self._holdings[r.rid].pages_at_most - len(r.pages) for r in held)
        if reserved != self._reserved:
            raise InvariantViolation(f"{self._reserved} pages reserved, {reserved} expected")

    def _held(self, request: Request) -> tuple[Holding, int]:
        holding = self._holdings.get(request.rid)
        if holding is None or request.row is None:
            raise InvariantViolation(f"request {request.rid} holds nothing: released twice or never admitted")
        return holding, request.row

    def _take(self, count: int) -> list[int]:
        short = count - self.pages.available()
        if short > 0:
            self.pages.free(self.prefix.evict(short))
        return self.pages.alloc(count)
