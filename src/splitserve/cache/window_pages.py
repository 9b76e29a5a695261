"""Window pages: the smaller pool of layers with sliding windows, in models where other layers see everything.

Everybody names pages of the full layers' pool. `table` says which window page has the same tokens' KV of the windowed
layers: those that are, or were lately, inside somebody's window have one.

The life of a window page:
1. `grow` gives one to each page that an admitted request takes, unless its tokens are computed elsewhere and have left
   the window when they come (`arriving`).
2. It is *pinned* while it is in the window of a request that runs on its page; `leave` says how far one has come.
3. Then it is *idle*: who finds its page in the prefix cache can go on from there. Where pages are short, the one that
   was used least recently is taken.
4. `drop` frees it with its page.

A request is promised what its window takes at most (`Claim`), whoever else runs on the same pages: windows part. A
chunk of a prompt takes more, until it has been computed; for that some pages stay out of promises, as many as steps
take.

It knows neither requests nor prefixes, nor who waits for a page until a step has ended: `PagedKVCache` does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splitserve.cache.blocks import kv_to_page_num
from splitserve.cache.pages import PageAllocator
from splitserve.core.layout import first_token_read

# Page of the full layers' pool -> window page, or -1. int32 [num_pages]
WindowTable = npt.NDArray[np.int32]


@dataclass(slots=True)
class Claim:
    """What an admitted request has of the window pages: those of its pages [first, stop) are pinned for it."""

    num_promised: int
    first: int
    stop: int

    @property
    def num_pinned(self) -> int:
        return self.stop - self.first

    @property
    def num_secured(self) -> int:
        """Pinned, or promised."""
        return max(self.num_promised, self.num_pinned)


def window_pages_at_most(window: int, page_size: int) -> int:
    """That a request pins before it takes the tokens of a step: wherever its window begins in a page, and so many that
    what a step of n tokens takes beyond is never more than n / page_size."""
    return kv_to_page_num(window, page_size) + 2


def least_window_pages(window: int, page_size: int, step_tokens: int) -> int:
    """With fewer a single request might not get through its prompt."""
    return window_pages_at_most(window, page_size) + kv_to_page_num(step_tokens, page_size)


class WindowPages:
    """`num_pages` of them, `least_window_pages` or more, beside `num_full_pages`.

    `window`: tokens that the layer with the largest one sees. `step_tokens`: tokens of prompts in steps under way.
    """

    def __init__(
        self, num_full_pages: int, num_pages: int, page_size: int, window: int, *, step_tokens: int = 0
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.window = window
        # Read by the engine, too.
        self.table: WindowTable = np.full(num_full_pages, -1, dtype=np.int32)
        # What steps take beyond promises, at most.
        self.num_reserved = kv_to_page_num(step_tokens, page_size)
        self._pages = PageAllocator(num_pages)
        # Of those that are not filled from their beginning on, the first slot that is.
        self._begins: dict[int, int] = {}
        # Windows that each page of the full layers' pool is in.
        self._pins = [0] * num_full_pages
        # Pages whose window pages are pinned by nobody, least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        # Left over, while steps under way may look at them.
        self._num_aside = 0
        # What a request pins between steps; and is promised, if it has so many tokens.
        self.num_at_most = min(num_pages, window_pages_at_most(window, page_size))
        # Sums over all claims: of what is secured, and of that, what steps take.
        self._secured = 0
        self._beyond = 0

    @property
    def num_available(self) -> int:
        """Free or idle."""
        return self._pages.available() + len(self._idle)

    @property
    def can_admit(self) -> bool:
        """Whether all claims are covered, and beside them what steps take."""
        return max(0, self.num_reserved - self._beyond) <= self._num_grantable

    @property
    def _num_grantable(self) -> int:
        return self.num_pages - self._num_aside - self._secured

    def first_page(self, num_tokens: int) -> int:
        """Of `num_tokens` computed tokens, the number of the page where the next one's window begins."""
        return first_token_read(self.window, num_tokens) // self.page_size

    def num_usable(self, pages: Sequence[int]) -> int:
        """How many of a prefix's pages, at most, a request can go on behind: all that its next token sees is there."""
        end = len(pages)
        while end > 0:
            begin, slot = divmod(first_token_read(self.window, end * self.page_size), self.page_size)
            for i in range(end - 1, begin - 1, -1):
                if self.table[pages[i]] < 0 or self._begins.get(pages[i], 0) > (slot if i == begin else 0):
                    # Whoever ends behind it sees it, too.
                    end = i
                    break
            else:
                return end
        return 0

    # -- what requests have ---------------------------------------------------------------------------------------

    def claim(self, pages: Sequence[int], num_tokens: int) -> Claim:
        """For a request that goes on behind `pages`, with a promise for `num_tokens` tokens. See `can_admit` after."""
        num_promised = min(self.num_at_most, kv_to_page_num(num_tokens, self.page_size))
        claim = Claim(num_promised, self.first_page(len(pages) * self.page_size), len(pages))
        self._pin(pages[claim.first :])
        self._count(claim, 1)
        return claim

    def has_room(self, claim: Claim, stop: int) -> bool:
        """To grow up to `stop`; always within the promise, unless that waits for the end of a step."""
        num_more = max(0, stop - claim.first - claim.num_secured)
        return stop - claim.stop <= self.num_available and (num_more == 0 or num_more <= self._num_grantable)

    def grow(self, claim: Claim, pages: Sequence[int], *, begin: int = 0) -> None:
        """Take and pin window pages for the request's pages from `claim.stop` on. Look at `has_room` before.

        `begin`: slot of the first of them from which on it is filled.
        """
        new = pages[claim.stop :]
        for page, window_page in zip(new, self._take(len(new)), strict=True):
            self.table[page] = window_page
        if begin and new:
            self._begins[new[0]] = begin
        self._pin(new)
        self._move(claim, claim.first, len(pages))

    def skip(self, claim: Claim, pages: Sequence[int], num_tokens: int) -> int:
        """So many tokens come, computed elsewhere, of them only those that the next one sees.

        What the request has before these, it leaves. Returns the slot of its next page, behind what it has, from which
        on it will be filled.
        """
        self.leave(claim, pages, num_tokens, len(pages) * self.page_size)
        has_first = claim.first < claim.stop
        return 0 if has_first else first_token_read(self.window, num_tokens) % self.page_size

    def settle(self, claim: Claim, pages: Sequence[int], num_tokens: int) -> None:
        """The request takes no more; so many of its tokens are computed. What it has is all that it is promised."""
        self.leave(claim, pages, num_tokens, len(pages) * self.page_size)
        self._count(claim, -1)
        claim.num_promised = claim.num_pinned
        self._count(claim, 1)

    def leave(self, claim: Claim, pages: Sequence[int], num_tokens: int, num_prompt_tokens: int = 0) -> bool:
        """So many tokens are computed: what lies before the window of the next one is idle now.

        Returns whether that makes room for promises: what lies within the request's own is still its own.

        Steps under way see no more either: those of the request that begin later than the tokens' own. What holds none
        of the `num_prompt_tokens` tokens of a prompt is the first to be taken: others' prompts rarely end in an answer.
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
        """The request gives its pages from number `keep` on back; they are dropped next."""
        self._unpin(pages[keep : claim.stop])
        self._move(claim, claim.first, keep)

    def exchange(self, claim: Claim, old: Sequence[int], new: Sequence[int]) -> list[int]:
        """`new` pages take the place of the request's first ones, `old`, which have the same tokens.

        Returns window pages that are nobody's now. Steps under way may look at them; then they go to `free`.
        """
        left: list[int] = []
        for i, (given, kept) in enumerate(zip(old, new, strict=True)):
            if given == kept:
                continue
            is_pinned = claim.first <= i < claim.stop
            if is_pinned:
                self._pins[given] -= 1
            begin, window_page = self._begins.get(given, 0), self._detach(given)
            if window_page is not None and self._is_better(begin, kept):
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
        """The request has ended, or was not admitted."""
        self._unpin(pages[claim.first : claim.stop])
        self._count(claim, -1)

    # -- what pages have ------------------------------------------------------------------------------------------

    def of(self, pages: Sequence[int]) -> list[int]:
        """For a hand-over: of each its window page, -1 where it has none."""
        found: list[int] = self.table[list(pages)].tolist()
        return found

    def drop(self, pages: Iterable[int]) -> None:
        """These pages of the full layers' pool are freed; nobody's window is on them."""
        self._pages.free([w for page in pages if (w := self._detach(page)) is not None])

    def free(self, left: Sequence[int]) -> None:
        """What `exchange` has left over."""
        self._num_aside -= len(left)
        self._pages.free(left)

    def check(self, claims: Sequence[tuple[Claim, Sequence[int]]]) -> None:
        """Raise AssertionError unless every window page is free, aside, or of one page, and pinned by the requests of
        these claims, with their pages, and nobody else."""
        pins = [0] * len(self._pins)
        for claim, pages in claims:
            assert claim.stop <= len(pages), "a claim reaches beyond its request's pages"
            for page in pages[claim.first : claim.stop]:
                pins[page] += 1
                assert self.table[page] >= 0, f"page {page} is in a window and has no window page"
        assert pins == self._pins, "window pages are pinned by nobody, or not by who runs on them"
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
        # Pages aside gave way to pages that others have, too.
        assert self._secured <= self.num_pages, "more is promised than there is"

    def _take(self, count: int) -> list[int]:
        while self._pages.available() < count:
            page, _ = self._idle.popitem(last=False)
            self.drop([page])
        return self._pages.alloc(count)

    def _is_better(self, begin: int, page: int) -> bool:
        """Than what `page` has, if anything."""
        return self.table[page] < 0 or begin < self._begins.get(page, 0)

    def _attach(self, page: int, window_page: int, begin: int) -> None:
        self.table[page] = window_page
        if begin:
            self._begins[page] = begin
        if not self._pins[page]:
            self._idle[page] = None

    def _detach(self, page: int) -> int | None:
        """Its window page, if it has one; what is pinned stays pinned."""
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
        """A request that was promised less than a window, and outgrew that, takes none of what is kept for steps."""
        return max(0, claim.num_pinned - max(claim.num_promised, self.num_at_most))


class NoWindowPages:
    """All layers' KV is in one pool."""

    can_admit = True
    table = None
    num_pages = num_available = 0

    def __init__(self) -> None:
        self._claim = Claim(0, 0, 0)

    def num_usable(self, pages: Sequence[int]) -> int:
        return len(pages)

    def claim(self, pages: Sequence[int], num_tokens: int) -> Claim:
        return self._claim

    def has_room(self, claim: Claim, stop: int) -> bool:
        return True

    def grow(self, claim: Claim, pages: Sequence[int], *, begin: int = 0) -> None:
        return None

    def skip(self, claim: Claim, pages: Sequence[int], num_tokens: int) -> int:
        return 0

    def leave(self, claim: Claim, pages: Sequence[int], num_tokens: int, num_prompt_tokens: int = 0) -> bool:
        return False

    def shrink(self, claim: Claim, pages: Sequence[int], keep: int) -> None:
        return None

    def exchange(self, claim: Claim, old: Sequence[int], new: Sequence[int]) -> list[int]:
        return []

    def release(self, claim: Claim, pages: Sequence[int]) -> None:
        return None

    def of(self, pages: Sequence[int]) -> list[int]:
        return []

    def drop(self, pages: Iterable[int]) -> None:
        return None

    def free(self, left: Sequence[int]) -> None:
        return None

    def check(self, claims: Sequence[tuple[Claim, Sequence[int]]]) -> None:
        return None
