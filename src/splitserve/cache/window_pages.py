"""Window pages: the smaller pool of layers with sliding windows, in models with other layers that attend to all tokens.

Callers name pages of the full layers' pool. `table` maps such a page to the window page with the KV of the same tokens
in the windowed layers. Pages that are, or were lately, inside a window of a request have one.

The life of a window page:
1. `grow` allocates one for each page that an admitted request takes, unless another worker computes its tokens and they
   have left the window when they arrive (`skip`).
2. It is *pinned* while it is in the window of a request that runs on its page; `leave` moves that window on.
3. Then it is *idle*: a request that finds its page in the prefix cache can continue from there. If pages are short, the
   least recently used one is taken.
4. `drop` frees it with its page.

A request is promised the most pages that its window takes (`Claim`), even if other requests run on the same pages,
because windows diverge. A chunk of a prompt takes more until it has been computed; for that, as many pages as steps
take are never promised.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splitserve.cache.pages import PageAllocator, kv_to_page_num
from splitserve.core.layout import first_token_read

# Page of the full layers' pool -> window page, or -1. int32 [num_pages]
WindowTable = npt.NDArray[np.int32]


@dataclass(slots=True)
class Claim:
    """The window pages of an admitted request: those of its pages [first, stop) are pinned for it."""

    num_promised: int
    first: int
    stop: int

    @property
    def num_pinned(self) -> int:
        return self.stop - self.first

    @property
    def num_secured(self) -> int:
        """Pages pinned or promised."""
        return max(self.num_promised, self.num_pinned)


def window_pages_at_most(window: int, page_size: int) -> int:
    """Return the most window pages a request pins between steps, wherever its window begins within a page.

    It is large enough that a step of n tokens takes at most n / page_size pages more."""
    return kv_to_page_num(window, page_size) + 2


def least_window_pages(window: int, page_size: int, step_tokens: int) -> int:
    """Return the fewest window pages with which any single request can finish its prompt."""
    return window_pages_at_most(window, page_size) + kv_to_page_num(step_tokens, page_size)


class WindowPages:
    """A pool of `num_pages` window pages, `least_window_pages` or more, beside `num_full_pages`.

    `window`: largest window of all layers, tokens. `step_tokens`: prompt tokens in steps in flight.
    """

    def __init__(
        self, num_full_pages: int, num_pages: int, page_size: int, window: int, *, step_tokens: int = 0
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.window = window
        # The engine reads it, too.
        self.table: WindowTable = np.full(num_full_pages, -1, dtype=np.int32)
        # Maximum number of pages that steps take beyond promises.
        self.num_reserved = kv_to_page_num(step_tokens, page_size)
        self._pages = PageAllocator(num_pages)
        # Page -> first filled slot. Only pages that are not filled from their beginning.
        self._begins: dict[int, int] = {}
        # Number of windows that contain each page of the full layers' pool.
        self._pins = [0] * num_full_pages
        # Pages with unpinned window pages, least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        # Replaced pages that steps in flight may still read.
        self._num_aside = 0
        # Maximum pages that a request pins between steps. A request with enough tokens is promised this many.
        self.num_at_most = min(num_pages, window_pages_at_most(window, page_size))
        # Sums over all claims: pages secured, and of these, pages taken for steps.
        self._secured = 0
        self._beyond = 0

    @property
    def num_available(self) -> int:
        return self._pages.available() + len(self._idle)

    @property
    def _num_grantable(self) -> int:
        return self.num_pages - self._num_aside - self._secured

    def first_page(self, num_tokens: int) -> int:
        """Return the number of the page in which the next token's window begins, after `num_tokens` computed tokens."""
        return first_token_read(self.window, num_tokens) // self.page_size

    def num_usable(self, pages: Sequence[int]) -> int:
        """Return the largest number of a prefix's pages that a request can continue with a complete window."""
        end = len(pages)
        while end > 0:
            begin, slot = divmod(first_token_read(self.window, end * self.page_size), self.page_size)
            for i in range(end - 1, begin - 1, -1):
                if self.table[pages[i]] < 0 or self._begins.get(pages[i], 0) > (slot if i == begin else 0):
                    # A prefix that ends behind this page needs it, too.
                    end = i
                    break
            else:
                return end
        return 0

    def claim(self, pages: Sequence[int], num_tokens: int) -> Claim | None:
        """Claim pages for a request that continues `pages`, promised for `num_tokens` tokens.

        None: there is no room for it beside all claims and the pages that steps take beyond them.
        """
        num_promised = min(self.num_at_most, kv_to_page_num(num_tokens, self.page_size))
        claim = Claim(num_promised, self.first_page(len(pages) * self.page_size), len(pages))
        self._pin(pages[claim.first :])
        self._count(claim, 1)
        if max(0, self.num_reserved - self._beyond) > self._num_grantable:
            self.release(claim, pages)
            return None
        return claim

    def has_room_beside(self, num_requests: int, most: int) -> bool:
        """Return whether `num_requests` take at most `most` window pages and leave room for one more request."""
        num_pages = num_requests * self.num_at_most
        return num_pages <= min(most, self.num_pages - self.num_reserved - self.num_at_most)

    def has_room(self, claim: Claim, stop: int) -> bool:
        """Return whether a claim can grow up to `stop`.

        It always can within its promise, unless pages wait for the end of a step.
        """
        num_more = max(0, stop - claim.first - claim.num_secured)
        return stop - claim.stop <= self.num_available and (num_more == 0 or num_more <= self._num_grantable)

    def grow(self, claim: Claim, pages: Sequence[int], *, begin: int = 0) -> None:
        """Take and pin window pages for the request's pages from `claim.stop` on. Check `has_room` before.

        `begin`: first slot to be filled of the first of these pages.
        """
        new = pages[claim.stop :]
        for page, window_page in zip(new, self._take(len(new)), strict=True):
            self.table[page] = window_page
        if begin and new:
            self._begins[new[0]] = begin
        self._pin(new)
        self._move(claim, claim.first, len(pages))

    def skip(self, claim: Claim, pages: Sequence[int], num_tokens: int) -> int:
        """Prepare for `num_tokens` tokens computed by another worker: only those in the next token's window arrive.

        Pages of the request before the window are unpinned. Returns the first slot to be filled of its next page.
        """
        self.leave(claim, pages, num_tokens, len(pages) * self.page_size)
        has_first = claim.first < claim.stop
        return 0 if has_first else first_token_read(self.window, num_tokens) % self.page_size

    def stop_growing(self, claim: Claim, pages: Sequence[int], num_tokens: int) -> None:
        """Reduce the promise of a request that takes no more pages to those it has. `num_tokens`: computed tokens."""
        self.leave(claim, pages, num_tokens, len(pages) * self.page_size)
        self._count(claim, -1)
        claim.num_promised = claim.num_pinned
        self._count(claim, 1)

    def leave(self, claim: Claim, pages: Sequence[int], num_tokens: int, num_prompt_tokens: int = 0) -> bool:
        """Unpin the pages before the window of the next token; `num_tokens` tokens are computed.

        Returns whether that makes room for promises: pages within the request's own promise stay its own.

        Steps in flight do not read these pages: the request's later steps begin behind the computed tokens. Pages
        without any of the `num_prompt_tokens` prompt tokens are taken first: prompts of other requests rarely contain
        an output.
        """
        first, secured = self.first_page(num_tokens), self._secured
        if first <= claim.first:
            return False
        left = pages[claim.first : min(first, claim.stop)]
        self._unpin(left)
        for page in left[max(0, kv_to_page_num(num_prompt_tokens, self.page_size) - claim.first) :]:
            if page in self._idle:
                self._idle.move_to_end(page, last=False)
        self._move(claim, first, max(first, claim.stop))
        return self._secured < secured

    def shrink(self, claim: Claim, pages: Sequence[int], keep: int) -> None:
        """Unpin the request's pages from number `keep` on; the caller drops them next."""
        self._unpin(pages[keep : claim.stop])
        self._move(claim, claim.first, keep)

    def exchange(self, claim: Claim, old: Sequence[int], new: Sequence[int]) -> list[int]:
        """Replace the request's first pages, `old`, by `new` ones with the same tokens.

        Returns window pages without an owner. Steps in flight may read them; after these the caller passes them to
        `free`.
        """
        left: list[int] = []
        for i, (given, kept) in enumerate(zip(old, new, strict=True)):
            if given == kept:
                continue
            is_pinned = claim.first <= i < claim.stop
            if is_pinned:
                self._pins[given] -= 1
            begin, window_page = self._begins.get(given, 0), self._detach(given)
            # The window page with more tokens stays.
            if window_page is not None and (self.table[kept] < 0 or begin < self._begins.get(kept, 0)):
                if (other := self._detach(kept)) is not None:
                    left.append(other)
                self._attach(kept, window_page, begin)
            elif window_page is not None:
                left.append(window_page)
            if is_pinned:
                self._pin([kept])
        self._num_aside += len(left)
        return left

    def release(self, claim: Claim, pages: Sequence[int]) -> None:
        """End the claim of a request that has ended, or was not admitted."""
        self._unpin(pages[claim.first : claim.stop])
        self._count(claim, -1)

    def of(self, pages: Sequence[int]) -> list[int]:
        """Return the window page of each page, for a KV transfer; -1 for a page without one."""
        found: list[int] = self.table[list(pages)].tolist()
        return found

    def drop(self, pages: Iterable[int]) -> None:
        """Free the window pages of pages of the full layers' pool, which are in no window."""
        self._pages.free([w for page in pages if (w := self._detach(page)) is not None])

    def free(self, left: Sequence[int]) -> None:
        """Free window pages that `exchange` returned."""
        self._num_aside -= len(left)
        self._pages.free(left)

    def check(self, claims: Sequence[tuple[Claim, Sequence[int]]]) -> None:
        """Raise AssertionError unless the window pages add up.

        Each must be free, aside, or mapped by one page, and pinned by exactly the requests of these claims.
        """
        pins = [0] * len(self._pins)
        for claim, pages in claims:
            assert claim.stop <= len(pages), "a claim reaches beyond its request's pages"
            for page in pages[claim.first : claim.stop]:
                pins[page] += 1
                assert self.table[page] >= 0, f"page {page} is in a window and has no window page"
        assert pins == self._pins, "pins of window pages differ from the requests that run on them"
        mapped = np.flatnonzero(self.table >= 0).tolist()
        assert len(set(self.table[mapped].tolist())) == len(mapped), "a window page has two owners"
        assert set(self._idle) == {page for page in mapped if not pins[page]}, (
            "idle window pages are not those unpinned"
        )
        assert set(self._begins) <= set(mapped), "a window page that is gone has a beginning"
        found = self._pages.available() + len(mapped) + self._num_aside
        assert found == self.num_pages, f"{found} window pages free, held and aside of {self.num_pages}"
        sums = sum(c.num_secured for c, _ in claims), sum(self._taken_by_steps(c) for c, _ in claims)
        assert sums == (self._secured, self._beyond), f"secured and beyond are {sums}, accounted otherwise"
        # Pages aside have replacements that other requests hold.
        assert self._secured <= self.num_pages, "more is promised than there is"

    def _take(self, count: int) -> list[int]:
        while self._pages.available() < count:
            page, _ = self._idle.popitem(last=False)
            self.drop([page])
        return self._pages.alloc(count)

    def _attach(self, page: int, window_page: int, begin: int) -> None:
        self.table[page] = window_page
        if begin:
            self._begins[page] = begin
        if not self._pins[page]:
            self._idle[page] = None

    def _detach(self, page: int) -> int | None:
        """Remove and return a page's window page, if it has one; pins stay."""
        window_page = int(self.table[page])
        if window_page < 0:
            return None
        self.table[page] = -1
        self._begins.pop(page, None)
        self._idle.pop(page, None)
        return window_page

    def _pin(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._pins[page] += 1
            self._idle.pop(page, None)

    def _unpin(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._pins[page] -= 1
            if not self._pins[page]:
                self._idle[page] = None

    def _move(self, claim: Claim, first: int, stop: int) -> None:
        self._count(claim, -1)
        claim.first, claim.stop = first, stop
        self._count(claim, 1)

    def _count(self, claim: Claim, sign: int) -> None:
        self._secured += sign * claim.num_secured
        self._beyond += sign * self._taken_by_steps(claim)

    def _taken_by_steps(self, claim: Claim) -> int:
        """Return the pages of a claim that count as taken by steps.

        A request that was promised less than a window and outgrew that takes none of the pages reserved for steps.
        """
        return max(0, claim.num_pinned - max(claim.num_promised, self.num_at_most))
