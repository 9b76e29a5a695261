"""Requests that gave their pages back because the pool ran dry, and how they come back.

The life of a retracted request:
1. `victim` chooses it. Least work lost: of the least important running requests the one with the fewest computed
   tokens, for these must be copied or computed again. The first in rank (the oldest of the most important) never is.
2. `retract` copies its computed pages to host memory where the bound allows, and releases them with its row. What a
   prefix cache takes of them may still be there later, and spares the copy back.
3. It stands in line by rank, before everybody who never ran. `resume_retracted_reqs` admits the first again, copies
   its KV back, or leaves what is missing to be computed, as for any request whose computed tokens lag behind.

Nobody starves: the first in rank runs on whatever happens, newcomers wait while anybody stands here, so the running
ones end or join the line until its first fits. What the request sampled stays; its next token depends on seed and
position alone, so its output is what it would have been.

It knows pages by number only; their copies are `HostMemory`'s.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from splitserve.cache.blocks import kv_to_page_num
from splitserve.cache.host_memory import HostCopies, HostCopy, HostMemory
from splitserve.cache.kv_cache import InvariantViolation, PagedKVCache
from splitserve.core.request import Request
from splitserve.scheduler.admission import Admission, prefix_limit

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Retracted:
    """A request in the line, and what host memory holds of it."""

    request: Request
    # Of the pages of tokens [0, num_saved_tokens) but the first ones, which were forgotten; None: nothing was saved.
    copy: HostCopy | None
    num_saved_tokens: int
    num_forgotten_pages: int = 0
    # Without a copy: nobody but this worker is to compute it.
    is_local: bool = False


class Retraction:
    """`host_memory`: bytes that copies may take together."""

    def __init__(self, cache: PagedKVCache, copies: HostCopies, host_memory: int) -> None:
        self._cache = cache
        self._memory = HostMemory(copies, host_memory)
        # By rank.
        self._line: list[Retracted] = []
        self.num_retracted_total = 0

    @property
    def num_host_bytes(self) -> int:
        return self._memory.num_bytes

    def __len__(self) -> int:
        return len(self._line)

    def victim(self, running: Collection[Request]) -> Request | None:
        """Who of the running is to give way; None where nobody but the first in rank is left."""
        if len(running) < 2:
            return None
        first = min(running, key=lambda r: r.rank)
        others = (r for r in running if r is not first)
        return min(others, key=lambda r: (r.priority, r.num_computed_tokens, -r.number))

    def retract(self, request: Request, now: float) -> None:
        """Take a running request's pages and row; it stands in line from here on."""
        item = self._save(request)
        where = f"{item.copy.num_bytes / 2**20:.1f} MiB copied" if item.copy else "its KV will be computed again"
        logger.info("request %s is retracted after %d tokens: %s", request.rid, request.num_tokens, where)
        self._cache.release(request, publish=True)
        request.num_computed_tokens = 0
        request.num_retractions += 1
        self.num_retracted_total += 1
        request.timeline.enter("retracted", now)
        insort(self._line, item, key=lambda r: r.request.rank)

    def resume_retracted_reqs(self, admission: Admission, places: int, now: float) -> list[Request]:
        """Those that have pages again, at most `places`; the first that does not fit stops those behind it."""
        resumed: list[Request] = []
        while self._line and len(resumed) < places:
            item = self._line[0]
            if not admission.try_admit(item.request, max_prefix=prefix_limit(item.request)):
                break
            self._drop(item)
            self._bring_back(item)
            item.request.timeline.enter("running", now)
            resumed.append(item.request)
        return resumed

    def add(self, request: Request, now: float) -> None:
        """Take in a request that holds nothing, to be computed again in this worker."""
        request.timeline.enter("retracted", now)
        insort(self._line, Retracted(request, None, 0, is_local=True), key=lambda r: r.request.rank)

    def pop_uncopied(self) -> list[Request]:
        """Those with no copy, for whoever knows a better place to compute them than this worker."""
        uncopied = [item for item in self._line if item.copy is None and not item.is_local]
        for item in uncopied:
            self._drop(item)
        return [item.request for item in uncopied]

    def requests(self) -> Iterable[Request]:
        return (item.request for item in self._line)

    def remove(self, rid: str) -> Request | None:
        """Take a request out of the line, and forget its copy; None if it is not here."""
        for item in self._line:
            if item.request.rid == rid:
                self._drop(item)
                return item.request
        return None

    def check(self) -> None:
        """Raise InvariantViolation unless the copies add up and nobody in line holds pages."""
        held = sum(item.copy.num_bytes for item in self._line if item.copy)
        if held != self.num_host_bytes or held > self._memory.limit:
            raise InvariantViolation(f"{held} bytes of copies, {self.num_host_bytes} accounted of {self._memory.limit}")
        if holding := [item.request.rid for item in self._line if self._cache.holds(item.request)]:
            raise InvariantViolation(f"retracted requests {holding} hold pages")

    def _save(self, request: Request) -> Retracted:
        """Copy what it has computed, if the host has room."""
        num_saved = request.num_computed_tokens
        num_forgotten = self._cache.num_forgotten_pages(request)
        copy = self._memory.save(request.pages[num_forgotten : kv_to_page_num(num_saved, self._cache.page_size)])
        return Retracted(request, copy, num_saved if copy else 0, num_forgotten)

    def _drop(self, item: Retracted) -> None:
        self._line.remove(item)
        if item.copy is not None:
            self._memory.drop(item.copy)

    def _bring_back(self, item: Retracted) -> None:
        """Fill an admitted request's pages from its copy, but for those that the prefix cache still had."""
        request = item.request
        if item.copy is None or item.num_saved_tokens <= request.num_computed_tokens:
            return
        first = max(len(request.pages), item.num_forgotten_pages)
        self._cache.extend(request, item.num_saved_tokens, is_arriving=True)
        self._memory.restore(item.copy, first - item.num_forgotten_pages, request.pages[first:])
        request.num_computed_tokens = item.num_saved_tokens
        # What was forgotten is not there now either.
        self._cache.forget(request)
