"""Admission to the pool: in which order waiting requests are admitted, and how many pages must stay free then.

A request is promised pages for the tokens it has. Its future output is not reserved, because its length is unknown.
Instead two rules must hold:

1. For each admitted request and the new one, `num_reserved_decode_tokens` more tokens than it has must fit, or as many
   as it may still generate if these are fewer. So many steps pass before any request is retracted.
2. The longest running request could finish if all others with retractable pages were retracted.

With a reserve as large as the longest output no request is ever retracted. If layers with sliding windows have a pool
of their own, each request is promised window pages for the tokens of rule 1. Rule 2 needs none, because a window takes
the same pages however long its request becomes.

The order of waiting requests:

    fcfs   first come, first served
    lpm    longest prefix match: most cached prompt tokens first, while they are still cached
    spf    shortest prompt first

lpm and spf age: a request that arrived a second earlier counts as `AGEING` tokens better. So under spf the order of two
waiting requests never changes, and a prompt of L tokens is behind only those that arrive within L / AGEING seconds
after it. A larger `priority` comes before all of that. Retracted requests are not in this queue: they are admitted
before it, but after probes. Neither rule applies to probes.

The first request without room may wait long for its pages. Small requests behind it may overtake it, within bounds that
keep it from starving (`may_overtake`).
"""

from __future__ import annotations

from collections.abc import Collection

from splitserve.cache.kv_cache import PagedKVCache
from splitserve.cache.pages import kv_to_page_num
from splitserve.core.config import SchedulePolicy, SchedulerConfig
from splitserve.core.request import Request
from splitserve.core.steps import WaitReason

# Maximum output tokens that rule 2 assumes: an output without `max_tokens` may fill the pool, but rarely does.
FORESEEN_TOKENS = 4096
# Rows that only probes may use.
NUM_PROBE_ROWS = 1
# Requests that overtook others hold at most 1 / OVERTAKING_PARTS of the pool together.
OVERTAKING_PARTS = 4
# Maximum number of requests behind the first one without room that are considered per step.
OVERTAKING_WINDOW = 64


class PoolAdmission:
    """Admission of requests to the pool. `prompts_only`: no step here computes output."""

    def __init__(self, cache: PagedKVCache, num_reserved_decode_tokens: int, *, prompts_only: bool = False) -> None:
        self._cache = cache
        self._num_reserved = num_reserved_decode_tokens
        # Output tokens that count for requests that overtake, if they may generate so many. They include the reserve.
        self._num_counted = max(FORESEEN_TOKENS, num_reserved_decode_tokens)
        self._prompts_only = prompts_only
        # Requests refused since the last release of pages, with the number of running requests then. They are checked
        # again if either changes. This saves time in a full worker, where `try_admit` is called in each step.
        self._refused: set[tuple[Request, int]] = set()
        self._num_releases = 0
        # Requests that overtook another one, and hold pages or will get them back.
        self.overtakers: list[Request] = []

    def try_admit(self, request: Request, *, max_prefix: int = 0, running: Collection[Request] = ()) -> bool:
        """Admit `request` if there is room. Otherwise return False and change nothing.

        `running`, on a decode worker: the only requests that can be retracted. Peers write to the pages of all others,
        and will write to those of `request`. Empty: all can be retracted.
        """
        if self._num_releases != self._cache.num_releases:
            self._num_releases = self._cache.num_releases
            self._refused.clear()
        state = (request, len(running))
        if state in self._refused:
            return False
        at_most = self.num_tokens_at_most(request)
        num_tokens = min(request.num_tokens, at_most)
        # A probe has its own row, and needs a page or two for a short time: both rules would delay it for nothing.
        is_allowed = request.is_probe or (
            self._cache.rows.available_size() > NUM_PROBE_ROWS
            and self._lets_end(running, kv_to_page_num(num_tokens, self._cache.page_size))
        )
        if is_allowed and self._cache.try_admit(
            request,
            num_tokens=num_tokens,
            headroom=0 if request.is_probe else self._headroom(request),
            max_prefix=max_prefix,
            num_foreseen=min(request.num_tokens + self._num_reserved, at_most),
        ):
            return True
        self._refused.add(state)
        return False

    def is_small(self, request: Request) -> bool:
        """Return whether the pages of `request` are few enough to overtake others."""
        return self._foreseen(request, self._num_counted) <= self._cache.pages.num_pages // OVERTAKING_PARTS

    def may_overtake(self, request: Request, blocked: Request) -> bool:
        """Return whether `request` may be admitted before `blocked`, an older one without room.

        All that overtake count with the pages they hold at their end, `_num_counted` tokens later at most. Both rules
        hold for `blocked` beside them, so it is admitted when the requests before it have ended, at the latest.
        """
        # Retracted requests resume before any new one.
        if blocked.num_retractions or blocked.is_probe or request.priority < blocked.priority:
            return False
        self.overtakers = [r for r in self.overtakers if not r.is_finished or self._cache.holds(r)]
        windows, num_pages = self._cache.windows, self._cache.pages.num_pages
        ahead = [*self.overtakers, request]
        num_held = sum(self._foreseen(r, self._num_counted) for r in ahead)
        return (
            num_held <= num_pages // OVERTAKING_PARTS
            and num_held + self._foreseen(blocked, self._num_reserved) <= num_pages
            and (windows is None or windows.has_room_beside(len(ahead), windows.num_pages // OVERTAKING_PARTS))
        )

    def num_tokens_at_most(self, request: Request) -> int:
        """Return the most tokens of KV that a request may hold in this worker."""
        return request.num_prefill_tokens if self._prompts_only else request.num_tokens_at_most

    def _lets_end(self, running: Collection[Request], num_pages: int) -> bool:
        """Return whether rule 2 holds if a request of `num_pages` is admitted."""
        if not running:
            return True
        retractable = set(running)
        pinned = sum(h.num_secured_pages for r, h in self._cache.holdings.items() if r not in retractable)
        longest = max(self._foreseen(request, FORESEEN_TOKENS) for request in running)
        return longest + pinned + num_pages <= self._cache.pages.num_pages

    def _headroom(self, newcomer: Request) -> int:
        """Return the free pages that rule 1 requires beside all promises."""
        num_pages = self._foreseen(newcomer, self._num_reserved) - kv_to_page_num(
            newcomer.num_tokens, self._cache.page_size
        )
        for holding in self._cache.holdings.values():
            if not holding.request.is_finished:
                foreseen = self._foreseen(holding.request, self._num_reserved)
                num_pages += max(0, foreseen - holding.num_secured_pages)
        return max(0, num_pages)

    def _foreseen(self, request: Request, more: int) -> int:
        """Return the most pages a request holds until it has `more` tokens or is finished."""
        num_tokens = min(request.num_tokens + more, self.num_tokens_at_most(request))
        return self._cache.num_pages_at_most(request, num_tokens)


def prefix_limit(request: Request) -> int:
    """Return how many tokens may come from a prefix cache. A token that needs logits is always computed."""
    limit = request.num_tokens - 1
    if (position := request.next_input_logprob) is not None:
        limit = min(limit, position - 1)
    return limit


class AdmissionTurn:
    """Admission from one queue in one step: `try_admit` takes its requests in order, until `is_over`.

    `ahead`: the first waiting request of another queue, which waits for `reason`. Requests that rank behind it are
    admitted only if it lacks pages and they may overtake it. None: no such request.
    """

    def __init__(self, rule: PoolAdmission, ahead: Request | None, reason: WaitReason = WaitReason.KV_POOL) -> None:
        self._rule = rule
        self._ahead = ahead
        self._reason_ahead = reason
        # The first request of this queue without room.
        self.blocked: Request | None = None
        # True: no other request can be admitted in this step.
        self.is_over = False
        self._num_left = OVERTAKING_WINDOW

    @property
    def reason(self) -> WaitReason:
        """Reason why a refused request waits."""
        return self._reason_ahead if self.blocked is None else WaitReason.KV_POOL

    def in_order(self, requests: Collection[Request]) -> Collection[Request]:
        """Return `requests`, which are in the policy's order, with those last that rank behind `ahead`."""
        ahead = self._ahead
        return requests if ahead is None else sorted(requests, key=lambda request: ahead.rank < request.rank)

    def try_admit(self, request: Request, *, max_prefix: int, running: Collection[Request] = ()) -> bool:
        """Admit `request` if it has room and, behind a request without, may overtake it. As in `PoolAdmission`."""
        if (blocked := self._first_before(request)) is None:
            if self._rule.try_admit(request, max_prefix=max_prefix, running=running):
                return True
            self.blocked = request
            return False
        self._num_left -= 1
        may_overtake = self._num_left >= 0 and self.reason is WaitReason.KV_POOL
        if may_overtake and not self._rule.is_small(request):
            return False
        # The search ends at the first failure to bound its cost. A smaller request behind this one may wait longer.
        self.is_over = not (
            may_overtake
            and self._rule.may_overtake(request, blocked)
            and self._rule.try_admit(request, max_prefix=max_prefix, running=running)
        )
        if not self.is_over:
            self._rule.overtakers.append(request)
        return not self.is_over

    def _first_before(self, request: Request) -> Request | None:
        """Return the request without room that `request` would overtake. None: there is no such request."""
        ahead, is_new = self._ahead, not (request.num_retractions or request.is_probe)
        return self.blocked or (ahead if ahead is not None and is_new and ahead.rank < request.rank else None)


# Tokens per second.
AGEING = 1000.0
# Requests that lpm looks up in one step, oldest first: a look-up walks the whole prompt.
LPM_WINDOW = 128


class WaitingOrder:
    """Order of the waiting queue."""

    def __init__(self, settings: SchedulerConfig, cache: PagedKVCache) -> None:
        self._policy = settings.schedule_policy
        self._cache = cache

    def __call__(self, waiting: Collection[Request]) -> Collection[Request]:
        """Sort `waiting`, which is in order of arrival, into the order of admission."""
        if len(waiting) < 2 or (self._policy is SchedulePolicy.FCFS and not any(r.priority for r in waiting)):
            return waiting
        keys = [(-r.priority, self._sort_key(r, i), r.number) for i, r in enumerate(waiting)]
        return [request for _, request in sorted(zip(keys, waiting, strict=True), key=lambda pair: pair[0])]

    def _sort_key(self, request: Request, i: int) -> float:
        """Return the sort key of `request`, the i-th in order of arrival; the smallest is first."""
        age = AGEING * request.timeline.entered["received"]
        match self._policy:
            case SchedulePolicy.FCFS:
                return 0.0
            case SchedulePolicy.SPF:
                return age + request.num_prefill_tokens
            case SchedulePolicy.LPM:
                if i >= LPM_WINDOW:
                    return age
                return age - len(self._cache.prefix.match(request.prompt_ids).pages) * self._cache.page_size
