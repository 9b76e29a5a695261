"""The order in which waiting requests are admitted.

    fcfs   first come, first served
    lpm    longest prefix match: most cached prompt tokens first, while they are still cached
    spf    shortest prompt first

lpm and spf age: a request that arrived a second earlier counts as `AGEING` tokens better. So under spf the order of two
waiting requests never changes, and a prompt of L tokens is overtaken only by requests that arrive within L / AGEING
seconds after it. A larger `priority` comes before all of that. Retracted requests are not in this queue: they are
admitted before it.
"""

from __future__ import annotations

from collections.abc import Collection

from splitserve.cache.kv_cache import PagedKVCache
from splitserve.core.config import SchedulePolicy
from splitserve.core.request import Request

# Tokens per second.
AGEING = 1000.0
# Requests that lpm looks up in one step, oldest first: a look-up walks the whole prompt.
LPM_WINDOW = 128


class WaitingOrder:
    """Order of the waiting queue. `has_priorities`: requests may differ in `priority`."""

    def __init__(self, policy: SchedulePolicy, cache: PagedKVCache, *, has_priorities: bool = False) -> None:
        self._policy = policy
        self._cache = cache
        self._has_priorities = has_priorities

    def __call__(self, waiting: Collection[Request]) -> Collection[Request]:
        """Sort `waiting`, which is in order of arrival, into the order of admission."""
        if len(waiting) < 2 or (self._policy is SchedulePolicy.FCFS and not self._has_priorities):
            return waiting
        places = [(-r.priority, self._place(r, i), r.number) for i, r in enumerate(waiting)]
        return [request for _, request in sorted(zip(places, waiting, strict=True), key=lambda pair: pair[0])]

    def _place(self, request: Request, i: int) -> float:
        """Return the sort key of `request`, the i-th in order of arrival; the smallest is first."""
        age = AGEING * request.timeline.entered["received"]
        match self._policy:
            case SchedulePolicy.FCFS:
                return 0.0
            case SchedulePolicy.SPF:
                return age + request.num_prefill_tokens
            case SchedulePolicy.LPM:
                return age - (self._num_cached_tokens(request) if i < LPM_WINDOW else 0)

    def _num_cached_tokens(self, request: Request) -> int:
        return len(self._cache.prefix.match(request.prompt_ids).pages) * self._cache.page_size
