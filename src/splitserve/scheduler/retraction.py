"""Requests that released their pages because the pool was full, and how they resume.

The life of a retracted request:
1. `victim` chooses it, so that the least work is lost: of the running requests with the lowest priority the one with
   the fewest computed tokens, because these must be copied or computed again. The first in rank (the oldest of the
   highest priority) is never chosen.
2. `retract` copies its computed pages to host memory within the bound, and releases them with its row. Pages that a
   prefix cache keeps may still be there later, which saves copying them back. If the model is sharded over ranks, the
   copy exists on all ranks or on none (`engine/parallel/copies.py`).
3. It waits in order of rank, before all requests that never ran. `resume_retracted_reqs` admits the first one again and
   copies its KV back, or leaves what is missing to be computed, as for any request with missing tokens.

No request starves: the first in rank always runs, and no new request but a probe passes a retracted one. So
running requests finish or are retracted until the first one fits. Sampled tokens stay. The next token depends on seed
and position alone, so the output is the same as without retraction.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from splitserve.cache.host_memory import HostCopies, HostCopy, HostMemory
from splitserve.cache.kv_cache import InvariantViolation, PagedKVCache
from splitserve.cache.pages import kv_to_page_num
from splitserve.core.options import size_text
from splitserve.core.request import Request
from splitserve.scheduler.admission import PoolAdmission, prefix_limit

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Retracted:
    """A retracted request, and its copy in host memory."""

    request: Request
    # Copy of the pages of tokens [0, num_saved_tokens) without the first, forgotten ones; None: nothing was saved.
    copy: HostCopy | None
    num_saved_tokens: int
    # Computed tokens that it lost. Those that it does not get back are computed again.
    num_lost_tokens: int = 0
    num_forgotten_pages: int = 0
    # Whether only this worker may compute it again. Only for requests without a copy.
    is_local: bool = False


class Retraction:
    """The queue of retracted requests. `host_memory`: bytes that their copies may take together."""

    def __init__(self, cache: PagedKVCache, copies: HostCopies, host_memory: int) -> None:
        self._cache = cache
        self.memory = HostMemory(copies, host_memory)
        # Retracted requests, in order of rank.
        self._queue: list[Retracted] = []
        self.num_retracted_total = 0
        # Retracted requests that resumed with all their KV, and tokens that were computed again for the others.
        self.num_resumed_whole_total = 0
        self.num_recomputed_tokens_total = 0

    def __len__(self) -> int:
        return len(self._queue)

    def victim(self, running: Collection[Request]) -> Request | None:
        """Return the running request to retract; None if only the first in rank is left."""
        if len(running) < 2:
            return None
        first = min(running, key=lambda r: r.rank)
        others = (r for r in running if r is not first)
        return min(others, key=lambda r: (r.priority, r.num_computed_tokens, -r.number))

    def retract(self, request: Request, now: float) -> None:
        """Release a running request's pages and row, and queue it."""
        item = self._save(request)
        where = f"{size_text(item.copy.num_bytes)} copied" if item.copy else "its KV will be computed again"
        logger.info("request %s is retracted after %d tokens: %s", request.rid, request.num_tokens, where)
        self._cache.release(request, publish=True)
        request.num_computed_tokens = 0
        request.num_retractions += 1
        self.num_retracted_total += 1
        request.timeline.enter("retracted", now)
        insort(self._queue, item, key=lambda r: r.request.rank)

    def resume_retracted_reqs(self, admission: PoolAdmission, at_most: int, now: float) -> list[Request]:
        """Resume at most `at_most` requests and return them; the first that does not fit stops those behind it."""
        resumed: list[Request] = []
        while self._queue and len(resumed) < at_most:
            item = self._queue[0]
            if not admission.try_admit(item.request, max_prefix=prefix_limit(item.request)):
                break
            self._restore(item)
            self._drop(item)
            if not item.is_local:
                # The loss of the others was counted when they left for their prefill worker.
                self._count(item.num_lost_tokens - item.request.num_computed_tokens)
            item.request.timeline.enter("running", now)
            resumed.append(item.request)
        return resumed

    def add(self, request: Request, now: float) -> None:
        """Queue a request that holds nothing, to be computed again in this worker."""
        request.timeline.enter("retracted", now)
        insort(self._queue, Retracted(request, None, 0, is_local=True), key=lambda r: r.request.rank)

    def pop_uncopied(self) -> list[Request]:
        """Remove and return the requests without a copy, which the caller may have computed by another worker."""
        uncopied = [item for item in self._queue if item.copy is None and not item.is_local]
        for item in uncopied:
            self._drop(item)
            self._count(item.num_lost_tokens)
        return [item.request for item in uncopied]

    def requests(self) -> Iterable[Request]:
        return (item.request for item in self._queue)

    def remove(self, rid: str) -> Request | None:
        """Remove a request and its copy from the queue, and return the request. None: it is not queued."""
        for item in self._queue:
            if item.request.rid == rid:
                self._drop(item)
                return item.request
        return None

    def check(self) -> None:
        """Raise InvariantViolation unless the copies add up and no queued request holds pages."""
        held = sum(item.copy.num_bytes for item in self._queue if item.copy)
        if held != self.memory.num_bytes or held > self.memory.limit:
            raise InvariantViolation(
                f"{held} bytes of copies, {self.memory.num_bytes} accounted of {self.memory.limit}"
            )
        if holding := [item.request.rid for item in self._queue if self._cache.holds(item.request)]:
            raise InvariantViolation(f"retracted requests {holding} hold pages")

    def _save(self, request: Request) -> Retracted:
        """Copy the computed KV of a request if the host has room."""
        num_saved = request.num_computed_tokens
        num_forgotten = self._cache.holdings[request].num_forgotten
        copy = self.memory.save(request.pages[num_forgotten : kv_to_page_num(num_saved, self._cache.page_size)])
        return Retracted(request, copy, num_saved if copy else 0, num_saved, num_forgotten)

    def _count(self, num_missing: int) -> None:
        """Count a request that leaves the queue. `num_missing`: computed tokens that it did not get back."""
        self.num_recomputed_tokens_total += max(0, num_missing)
        self.num_resumed_whole_total += num_missing <= 0

    def _drop(self, item: Retracted) -> None:
        self._queue.remove(item)
        if item.copy is not None:
            self.memory.drop(item.copy)

    def _restore(self, item: Retracted) -> None:
        """Fill an admitted request's pages from its copy, except those that the prefix cache still had."""
        request = item.request
        if item.copy is None or item.num_saved_tokens <= request.num_computed_tokens:
            return
        first = max(len(request.pages), item.num_forgotten_pages)
        self._cache.extend(request, item.num_saved_tokens, is_arriving=True)
        self.memory.restore(item.copy, first - item.num_forgotten_pages, request.pages[first:])
        request.num_computed_tokens = item.num_saved_tokens
        # Pages that were forgotten before are not restored either.
        self._cache.forget(request)
