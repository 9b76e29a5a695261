"""The waiting line and the running set of one worker, and the plan of the next step.

Scheduling is one rule: every running request's computed tokens chase its tokens, within the step's token budget. A
request that misses one token is decoding, one that misses more is prefilling its next chunk; the plan mixes both.
Decodes go first, then prompts already begun, then the waiting line in order of arrival while the pool has room.

It does not know roles: who may enter the line, what happens to a computed chunk and who hears of a token is theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from splitserve.cache.kv_cache import PagedKVCache
from splitserve.core.batch import InputLogprobSpec, RequestResult, RequestStep, SampleSpec, StepPlan
from splitserve.core.request import Request


@dataclass(frozen=True, slots=True)
class Batch:
    """A plan and, in the same order, the requests it is for."""

    plan: StepPlan
    requests: tuple[Request, ...]


class RunningSet:
    """`tokens_at_most` says how many tokens' KV a request may come to hold in this worker."""

    def __init__(
        self,
        cache: PagedKVCache,
        *,
        token_budget: int,
        max_running: int,
        tokens_at_most: Callable[[Request], int],
    ) -> None:
        self.cache = cache
        self.token_budget = token_budget
        self.max_running = max_running
        self.tokens_at_most = tokens_at_most
        # Not admitted yet: they hold no page and no row.
        self.waiting: deque[Request] = deque()
        # Admitted: each has a row and a reservation in the cache.
        self.running: list[Request] = []

    def plan(self, now: float) -> Batch | None:
        """The next step, or None if there is nothing to compute."""
        budget = self.token_budget
        steps: list[RequestStep] = []
        requests: list[Request] = []
        # A stable sort: decodes before chunks, each in order of arrival.
        for request in sorted(self.running, key=lambda r: r.num_tokens - r.num_computed_tokens > 1):
            if budget > 0:
                budget -= self._schedule(request, budget, steps, requests)
        while budget > 0 and self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            if not self._admit(request):
                break
            self.waiting.popleft()
            self.running.append(request)
            request.timeline.enter("running", now)
            budget -= self._schedule(request, budget, steps, requests)
        return Batch(StepPlan(tuple(steps)), tuple(requests)) if steps else None

    def remove(self, rid: str) -> Request | None:
        """Take a request out, waiting or running; its pages and row stay with it. None if it is not here."""
        for place in (self.waiting, self.running):
            for request in place:
                if request.rid == rid:
                    place.remove(request)
                    return request
        return None

    def _admit(self, request: Request) -> bool:
        max_tokens = self.tokens_at_most(request)
        return self.cache.try_admit(request, max_tokens=max_tokens, max_prefix=prefix_limit(request))

    def _schedule(self, request: Request, budget: int, steps: list[RequestStep], requests: list[Request]) -> int:
        """Add the request's next tokens to the step; how many."""
        start = request.num_computed_tokens
        end = min(request.num_tokens, start + budget)
        self.cache.extend(request, end)
        assert request.row is not None
        sample = None
        if end == request.num_tokens:
            sample = SampleSpec(
                request.params,
                end,
                request.prompt_ids,
                request.output_ids,
                request.return_logprob,
                request.num_top_logprobs,
                request.grammar,
            )
        logprobs = input_logprobs_of(request, start, end)
        steps.append(RequestStep(request.rid, request.row, request.tokens(start, end), start, sample, logprobs))
        requests.append(request)
        return end - start


def prefix_limit(request: Request) -> int:
    """How many of its tokens may come from a cache: all but the last, or those whose logits nobody asks to see."""
    limit = request.num_tokens - 1
    if request.logprob_start is not None:
        limit = min(limit, max(request.logprob_start - 1, 0))
    return limit


def input_logprobs_of(request: Request, start: int, end: int) -> InputLogprobSpec | None:
    """What a step over tokens [start, end) can say of the prompt's logprobs: the token at p is scored at p - 1."""
    if request.logprob_start is None:
        return None
    first = max(request.logprob_start, start + 1)
    last = min(end, request.num_prompt_tokens - 1)
    if first > last:
        return None
    return InputLogprobSpec(first - 1 - start, request.prompt_ids[first : last + 1], request.num_top_logprobs)


def take_result(request: Request, step: RequestStep, result: RequestResult) -> None:
    """Enter one step's outcome into its request. The request may be finished by it."""
    request.num_computed_tokens += len(step.token_ids)
    request.input_logprobs.extend(result.input_logprobs)
    if result.token_id is not None:
        request.append(result.token_id, result.logprob)
