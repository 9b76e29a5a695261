"""The account of the whole KV pool: every page is free, cached, or held by one admitted request.

Prefixes that the prefix cache evicts may be kept in host memory (`host_memory.py`); `try_admit` fetches them back.

The life of a request here:
1. `try_admit` takes a row, locks the longest cached prefix and promises pages for the tokens known so far. The sum of
   all promises never exceeds the pages that are free or can be evicted, so growing up to the promise never fails.
2. `extend` provides pages for the tokens of the next step. Beyond the promise it may find none.
3. `share` publishes the whole pages computed so far, so that other requests find them while this one still runs.
4. `forget` releases, while the request runs, what no layer will read again: pages if all layers have sliding windows,
   and window pages if some have (`window_pages.py`).
5. `release` ends it: row and pages are freed, and computed whole pages go to the prefix cache if requested.

Between `step_began` and `step_ended` the engine may access all pages that the step's requests held when it began. Pages
released meanwhile are set aside, and freed when the last of their steps that began before has ended. A loop that waits
for each step needs neither call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from splitserve.cache.host_memory import HostTier
from splitserve.cache.pages import PageAllocator, ReqToTokenPool, kv_to_page_num
from splitserve.cache.prefix import Node, PrefixCache
from splitserve.cache.shared_pages import SharedPages
from splitserve.cache.window_pages import Claim, WindowPages
from splitserve.core.layout import first_token_read
from splitserve.core.request import Request


class InvariantViolation(AssertionError):
    """Error: pages or rows do not add up, because something was lost or is held twice."""


@dataclass(slots=True)
class Holding:
    """Pages, locked prefix and window pages of one admitted request."""

    request: Request
    row: int
    # Pages it was promised, cached prefix included. It may hold more.
    num_promised: int
    # request.pages[:num_shared] belong to the prefix cache, locked by `handle`, or were forgotten.
    num_shared: int
    handle: Node | None
    # Window pages of the request.
    claim: Claim
    # request.pages[:num_forgotten] have no owner: these numbers only fill their places and must not be read.
    num_forgotten: int = 0

    @property
    def num_pages_owed(self) -> int:
        """Promised pages it has not taken yet."""
        return max(0, self.num_promised - len(self.request.pages))

    @property
    def num_secured_pages(self) -> int:
        """Pages that it holds or is owed."""
        return len(self.request.pages) - self.num_forgotten + self.num_pages_owed


@dataclass(frozen=True, slots=True)
class Released:
    """Pages and a locked prefix that a request has released."""

    pages: list[int]
    handle: Node | None = None
    # All that the request held, if it has ended.
    holding: Holding | None = None


@dataclass(slots=True)
class StepReservation:
    """The requests of a step in flight, and what is set aside until it has ended."""

    requests: frozenset[Request]
    aside: list[Released] = field(default_factory=list)
    window_pages: list[int] = field(default_factory=list)


class PagedKVCache:
    def __init__(
        self,
        pages: PageAllocator,
        rows: ReqToTokenPool,
        prefix: PrefixCache,
        page_size: int,
        shared: SharedPages | None = None,
        host: HostTier | None = None,
        window: int | None = None,
        windows: WindowPages | None = None,
    ) -> None:
        self.pages = pages
        self.rows = rows
        self.prefix = prefix
        self.page_size = page_size
        # Table of owners if the pages belong to a pool of several workers; such a pool must not have a prefix cache.
        self._shared = shared
        # Host memory for evicted prefixes; None: they are dropped.
        self.host = host
        # Largest window of all layers, tokens; None: some layer attends to all tokens, and nothing is forgotten.
        self.window = None if shared else window
        # Window pages of layers with windows, if these have a smaller pool beside `pages`. None: they do not.
        self.windows = windows
        # Those of admitted requests, oldest row first. An aborted one with leased pages may have a newer one's rid.
        self.holdings: dict[Request, Holding] = {}
        # Pages that are reserved for requests but not allocated yet, of all holdings.
        self._owed = 0
        # Steps in flight, in the order in which they end.
        self._steps: deque[StepReservation] = deque()
        # Number of times that a request released pages. A waiting request is checked again only after that.
        self.num_releases = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        # Tokens of `prefix_hits` that were fetched from the host.
        self.prefix_host_hits = 0

    @property
    def num_grantable_pages(self) -> int:
        """Pages that are free or can be evicted, and are not promised."""
        return self.pages.available() + self.prefix.num_evictable_pages - self._owed

    def try_admit(
        self, request: Request, *, num_tokens: int, headroom: int = 0, max_prefix: int = 0, num_foreseen: int = 0
    ) -> bool:
        """Admit `request` and promise it pages for `num_tokens` tokens. False without room; then nothing changes.

        `headroom` pages must stay free beside all promises. At most the first `max_prefix` tokens, which must be
        promised ones, are looked up in the prefix cache and behind it on the host. Window pages, if there are any, are
        promised for `num_foreseen` tokens, if that is more.
        """
        if self.rows.available_size() == 0:
            return False
        match = self.prefix.match(request.tokens(0, max_prefix))
        if self.windows is not None and (usable := self.windows.num_usable(match.pages)) < len(match.pages):
            # The longest prefix that a request can continue.
            match = self.prefix.match(request.tokens(0, usable * self.page_size))
        self.prefix.lock(match.handle)
        num_promised = kv_to_page_num(num_tokens, self.page_size)
        owed = max(0, num_promised - len(match.pages))
        claim: Claim | None = None
        if owed + headroom <= self.num_grantable_pages:
            num_windowed = max(num_tokens, num_foreseen)
            claim = Claim(0, 0, 0) if self.windows is None else self.windows.claim(match.pages, num_windowed)
        if claim is None:
            self.prefix.unlock(match.handle)
            return False
        self._owed += owed
        request.row = row = self.rows.alloc()
        self.holdings[request] = Holding(request, row, num_promised, len(match.pages), match.handle, claim)
        request.pages = list(match.pages)
        self.rows.write(row, 0, request.pages)
        request.num_computed_tokens = len(match.pages) * self.page_size
        num_fetched = self._fetch(request, max_prefix)
        if request.num_retractions == 0:
            request.num_cached_tokens = request.num_computed_tokens
            self.prefix_queries += max_prefix
            self.prefix_hits += request.num_cached_tokens
            self.prefix_host_hits += num_fetched
        return True

    def extend(self, request: Request, num_tokens: int, *, is_arriving: bool = False) -> bool:
        """Allocate pages for the first `num_tokens` tokens. False if too few are left; then nothing changes.

        Never False within the promise, except while a step is in flight: promised pages may be set aside then.
        `is_arriving`: another worker computes their KV and sends what the next token attends to. Right after
        `try_admit`.
        """
        if num_tokens <= len(request.pages) * self.page_size:
            return True
        missing = kv_to_page_num(num_tokens, self.page_size) - len(request.pages)
        holding = self._held(request)
        paid = min(missing, holding.num_pages_owed)
        if missing - paid > self.num_grantable_pages:
            return False
        windows, begin = self.windows, 0
        if windows is not None:
            if is_arriving:
                begin = windows.skip(holding.claim, request.pages, num_tokens)
            if not windows.has_room(holding.claim, len(request.pages) + missing):
                return False
        for evicted in self.prefix.evict(max(0, missing - self.pages.available())):
            if self.host is not None:
                self.host.keep(evicted)
            self._free_pages(evicted.pages)
        new = self.pages.alloc(missing)
        self.rows.write(holding.row, len(request.pages), new)
        request.pages.extend(new)
        self._owed -= paid
        if windows is not None:
            windows.grow(holding.claim, request.pages, begin=begin)
        return True

    def shrink(self, request: Request, num_tokens: int) -> None:
        """Release pages beyond the request's first `num_tokens` tokens; nothing in them is computed."""
        keep = kv_to_page_num(num_tokens, self.page_size)
        if keep >= len(request.pages):
            return
        holding = self._held(request)
        owed = holding.num_pages_owed
        if self.windows is not None:
            self.windows.shrink(holding.claim, request.pages, keep)
        self._free_pages(request.pages[keep:])
        del request.pages[keep:]
        self._owed += holding.num_pages_owed - owed
        self.num_releases += 1

    def share(self, request: Request) -> None:
        """Publish the whole pages of computed tokens; the request continues with the cache's pages, locked."""
        holding = self._held(request)
        whole = request.num_computed_tokens // self.page_size
        if whole <= holding.num_shared or holding.num_forgotten or request.is_synthetic:
            return
        tokens = request.tokens(0, whole * self.page_size)
        match, duplicates = self.prefix.insert(tokens, request.pages[:whole])
        if len(match.pages) < whole:  # The cache keeps nothing, so the request still owns its pages.
            return
        self.prefix.lock(match.handle)
        self.prefix.unlock(holding.handle)
        if self.windows is not None:
            left = self.windows.exchange(holding.claim, request.pages[:whole], match.pages)
            if self._steps:
                self._steps[-1].window_pages += left
            else:
                self.windows.free(left)
        self._free_unused(request, Released(duplicates))
        request.pages[:whole] = match.pages
        self.rows.write(holding.row, 0, match.pages)
        holding.num_shared, holding.handle = whole, match.handle

    def forget(self, request: Request) -> None:
        """Release the pages of tokens that have left all windows. After that nothing more of the request is published.

        A prompt that is to be published stays whole until it is computed, and published pages stay until all of them
        have left. In the page table the first page that is still in a window replaces them. Window pages are released
        at once, but published ones stay until another request needs them.
        """
        windows = self.windows
        if self.window is None and windows is None:
            return
        holding = self._held(request)
        num_computed = request.num_computed_tokens
        if windows and windows.leave(holding.claim, request.pages, num_computed, request.num_prompt_tokens):
            self.num_releases += 1
        if self.window is None:
            return
        first = first_token_read(self.window, num_computed) // self.page_size
        first = min(first, len(request.pages) - 1)
        if first <= holding.num_forgotten or first < holding.num_shared:
            return
        if self.prefix.remembers and num_computed < request.num_prefill_tokens:
            return
        self._free_unused(request, Released(request.pages[holding.num_shared : first], holding.handle))
        holding.num_shared = holding.num_forgotten = first
        holding.handle = None
        request.pages[:first] = [request.pages[first]] * first
        self.rows.write(holding.row, 0, request.pages[:first])

    def stop_growing(self, request: Request) -> None:
        """Record that no later step computes tokens of the request. Its promised window pages are released."""
        if self.windows is not None:
            self.windows.stop_growing(self._held(request).claim, request.pages, request.num_computed_tokens)
            self.num_releases += 1

    def release(self, request: Request, *, publish: bool) -> None:
        """Release all that the request holds; once. `publish` first adds computed whole pages to the prefix cache."""
        if publish:
            self.share(request)
        holding = self._held(request)
        del self.holdings[request]
        self._owed -= holding.num_pages_owed
        self._free_unused(request, Released(request.pages[holding.num_shared :], holding.handle, holding))

    def step_began(self, requests: Iterable[Request]) -> None:
        """Note that the engine works on `requests`, until `step_ended`. Several steps may be in flight."""
        self._steps.append(StepReservation(frozenset(requests)))

    def step_ended(self) -> None:
        """Free the pages set aside for the oldest step, which has ended."""
        step = self._steps.popleft()
        for released in step.aside:
            self._free(released)
        if self.windows is not None and step.window_pages:
            self.windows.free(step.window_pages)
            self.num_releases += 1

    def resolve_exchange(self, request: Request) -> None:
        """Update the page numbers after a transfer that may have exchanged pages with another worker."""
        if self._shared is None or request.bootstrap is None:
            return
        row = self._held(request).row
        request.pages = self._shared.resolve(request.pages, tag=request.bootstrap.key.tag)
        self.rows.write(row, 0, request.pages)

    def holds(self, request: Request) -> bool:
        return request in self.holdings

    def num_pages_at_most(self, request: Request, num_tokens: int) -> int:
        """Return the most pages that a request holds while it grows to `num_tokens` tokens, its prompt at once."""
        num_pages = kv_to_page_num(num_tokens, self.page_size)
        if self.window is None:
            return num_pages
        return min(num_pages, kv_to_page_num(request.num_prefill_tokens + self.window, self.page_size) + 1)

    def flush(self) -> int:
        """Drop all cached prefixes that no request uses; return how many pages that freed."""
        num_free = self.pages.available()
        for evicted in self.prefix.evict(self.prefix.num_pages):
            self._free_pages(evicted.pages)
        if self.host is not None:
            self.host.clear()
        return self.pages.available() - num_free

    def replace_caches(self, prefix: PrefixCache, host: HostTier | None) -> None:
        """Replace the caches of prefixes; the content of replaced ones is dropped. Only while nothing is admitted."""
        if self.holdings or any(released.holding for step in self._steps for released in step.aside):
            raise InvariantViolation(f"caches cannot be replaced while {len(self.holdings)} requests hold pages")
        if prefix is not self.prefix:
            self.flush()
        elif self.host is not None and self.host is not host:
            self.host.clear()
        self.prefix, self.host = prefix, host

    def check(self, held: list[Request]) -> None:
        """Raise InvariantViolation unless `held` are all admitted requests and every page and row is accounted for."""
        self.prefix.check()
        if self.host is not None:
            self.host.check()
        if strays := self.holdings.keys() ^ set(held):
            raise InvariantViolation(f"holdings of {sorted(r.rid for r in strays)} have no owner")
        aside = [released for step in self._steps for released in step.aside]
        leaving = [released.holding for released in aside if released.holding is not None]
        own = [p for r in held for p in r.pages[self.holdings[r].num_shared :]]
        own += [p for released in aside for p in released.pages]
        accounted = self.pages.available() + self.prefix.num_pages + len(own)
        if len(set(own)) != len(own) or accounted != self.pages.num_pages:
            raise InvariantViolation(
                f"{self.pages.num_pages} pages, but {self.pages.available()} free + {self.prefix.num_pages} cached + "
                f"{len(own)} held ({len(set(own))} different)"
            )
        if self.windows is not None:
            self.windows.check([(h.claim, h.request.pages) for h in (*self.holdings.values(), *leaving)])
        num_rows = len(held) + len(leaving)
        if self.rows.available_size() + num_rows != len(self.rows.table):
            raise InvariantViolation(f"{self.rows.available_size()} rows free and {num_rows} held")
        owed = sum(holding.num_pages_owed for holding in self.holdings.values())
        # Pages aside of running requests were replaced by locked pages of the prefix cache. They are free when the step
        # has ended.
        left = self.num_grantable_pages + sum(len(released.pages) for released in aside if released.holding is None)
        if owed != self._owed or left < 0:
            raise InvariantViolation(f"{owed} pages are owed, {self._owed} accounted, {left} left")

    def _free_unused(self, request: Request, released: Released) -> None:
        """Free what the request has released, as soon as no step works on it."""
        step = next((step for step in reversed(self._steps) if request in step.requests), None)
        if step is None:
            self._free(released)
        else:
            step.aside.append(released)

    def _free(self, released: Released) -> None:
        holding = released.holding
        if released.pages or released.handle or holding:
            self.num_releases += 1
        if holding is not None:
            request = holding.request
            if self.windows is not None:
                self.windows.release(holding.claim, request.pages)
            self.rows.free(holding.row)
            request.pages = []
            request.row = None
        self.prefix.unlock(released.handle)
        self._free_pages(released.pages)

    def _free_pages(self, pages: Sequence[int]) -> None:
        if self.windows is not None:
            self.windows.drop(pages)
        self.pages.free(pages)

    def _held(self, request: Request) -> Holding:
        if (holding := self.holdings.get(request)) is None:
            raise InvariantViolation(f"request {request.rid} holds nothing: released twice or never admitted")
        return holding

    def _fetch(self, request: Request, max_prefix: int) -> int:
        """Copy pages that continue the cached prefix back from the host, and publish them. Return their tokens."""
        first = len(request.pages)
        found = self.host.find(request.tokens(0, max_prefix), first) if self.host is not None else []
        if self.host is None or not found:
            return 0
        num_tokens = (first + len(found)) * self.page_size
        if not self.extend(request, num_tokens):
            raise InvariantViolation(f"request {request.rid} was promised fewer than {num_tokens} tokens")
        self.host.restore(found, request.pages[first:])
        request.num_computed_tokens = num_tokens
        self.share(request)
        return len(found) * self.page_size
