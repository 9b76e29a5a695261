"""The waiting line and the running set of one worker, and the plan of the next step.

Scheduling is one rule: every running request's computed tokens chase its tokens, within the step's token budget. A
request that misses one token is decoding, one that misses more is prefilling its next chunk; the plan mixes both.
Decodes go first, then prompts already begun, then the waiting line in the policy's order while the pool has room; what
is left may go to guesses of the decodes' next tokens (speculation.py). Where a running request finds no page to grow
into, another gives way (retraction.py), and comes back before anybody else.

It does not know roles: who may enter the line, what happens to a computed chunk and who hears of a token is theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain, repeat

from splitserve.cache.kv_cache import PagedKVCache
from splitserve.core.batch import InputLogprobSpec, RequestResult, RequestStep, SampleSpec, StepPlan
from splitserve.core.request import Request
from splitserve.scheduler.admission import Admission, prefix_limit
from splitserve.scheduler.policy import WaitingOrder
from splitserve.scheduler.retraction import Retraction
from splitserve.scheduler.speculation import Speculation


@dataclass(frozen=True, slots=True)
class Batch:
    """A plan and, in the same order, the requests it is for."""

    plan: StepPlan
    requests: tuple[Request, ...]


class RunningSet:
    def __init__(
        self,
        cache: PagedKVCache,
        admission: Admission,
        retraction: Retraction,
        order: WaitingOrder,
        *,
        token_budget: int,
        max_running: int,
        speculation: Speculation | None = None,
    ) -> None:
        self.cache = cache
        self.admission = admission
        self.retraction = retraction
        self.order = order
        self.token_budget = token_budget
        self.max_running = max_running
        self.speculation = speculation
        # Not admitted yet: they hold no page and no row.
        self._waiting: dict[str, Request] = {}
        # Admitted and computed elsewhere, no place in the running set yet.
        self.prebuilt: deque[Request] = deque()
        # Admitted: each has a row and pages, in order of arrival.
        self.running: list[Request] = []

    def plan(self, now: float) -> Batch | None:
        """The next step, or None if there is nothing to compute."""
        if self.speculation is not None:
            self.speculation.give_back()
        self._fill_places(now)
        # A stable sort: decodes before chunks, each in order of arrival.
        order = sorted(self.running, key=lambda r: r.num_tokens - r.num_computed_tokens > 1)
        # Request -> where its step ends.
        ends: dict[Request, int] = {}
        budget = self.token_budget
        for request in order:
            if budget > 0 and request.row is not None:
                budget -= self._grow(request, budget, ends, now)
        self._admit_waiting(budget, ends, now)
        if not ends:
            return None
        requests, steps = tuple(ends), [step_of(request, end) for request, end in ends.items()]
        if self.speculation is not None:
            num_planned = sum(len(step.token_ids) for step in steps)
            self.speculation.add_proposals(requests, steps, self.token_budget - num_planned)
        return Batch(StepPlan(tuple(steps)), requests)

    def remove(self, rid: str) -> Request | None:
        """Take a request out, wherever it stands; its pages and row stay with it. None if it is not here."""
        if (waiting := self._waiting.pop(rid, None)) is not None:
            return waiting
        for place in (self.prebuilt, self.running):
            for request in place:
                if request.rid == rid:
                    place.remove(request)
                    return request
        return self.retraction.remove(rid)

    @property
    def waiting(self) -> Collection[Request]:
        """In order of arrival."""
        return self._waiting.values()

    def add(self, request: Request) -> None:
        """It waits to be admitted."""
        self._waiting[request.rid] = request

    def holders(self) -> list[Request]:
        """All in here that hold pages."""
        return [*self.running, *self.prebuilt]

    def requests(self) -> Iterator[Request]:
        """All in here."""
        return chain(self.running, self.prebuilt, self.waiting, self.retraction.requests())

    def is_empty(self) -> bool:
        return not (self._waiting or self.prebuilt or self.running or len(self.retraction))

    def _fill_places(self, now: float) -> None:
        """Give free places to those that have been running before, then to those that wait with their pages."""
        places = self.max_running - len(self.running)
        resumed = self.retraction.resume_retracted_reqs(self.admission, places, now)
        if resumed:
            self.running.extend(resumed)
            self.running.sort(key=lambda r: r.number)
        while self.prebuilt and len(self.running) < self.max_running:
            self.running.append(self.prebuilt.popleft())

    def _grow(self, request: Request, budget: int, ends: dict[Request, int], now: float) -> int:
        """Put the request's next tokens into the step, and others out of the pool where it has no page for them.

        Returns the tokens by which the step grew, which may be negative.
        """
        start = request.num_computed_tokens
        end = min(request.num_tokens, start + budget)
        freed = 0
        while not self.cache.extend(request, end):
            victim = self.retraction.victim(self.holders())
            if victim is None:
                return -freed
            if victim in ends:
                freed += ends.pop(victim) - victim.num_computed_tokens
            self._retract(victim, now)
            if victim is request:
                return -freed
        ends[request] = end
        return end - start - freed

    def _retract(self, request: Request, now: float) -> None:
        place = self.running if request in self.running else self.prebuilt
        place.remove(request)
        self.retraction.retract(request, now)

    def _admit_waiting(self, budget: int, ends: dict[Request, int], now: float) -> None:
        """Let in who waits, in the policy's order; the first that does not fit stops those behind it."""
        if budget <= 0 or not self._waiting or len(self.running) >= self.max_running or len(self.retraction):
            return
        for request in list(self.order(self.waiting)):
            if budget <= 0 or len(self.running) >= self.max_running:
                return
            if not self.admission.try_admit(request, max_prefix=prefix_limit(request)):
                return
            del self._waiting[request.rid]
            self.running.append(request)
            request.timeline.enter("running", now)
            budget -= self._grow(request, budget, ends, now)


def step_of(request: Request, end: int) -> RequestStep:
    """The request's next tokens, up to `end`, with what is asked of them."""
    start = request.num_computed_tokens
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
    return RequestStep(request.rid, request.row, request.tokens(start, end), start, sample, logprobs)


def input_logprobs_of(request: Request, start: int, end: int) -> InputLogprobSpec | None:
    """What a step over tokens [start, end) can say of the prompt's logprobs: the token at p is scored at p - 1."""
    if (position := request.next_input_logprob) is None:
        return None
    first = max(position, start + 1)
    last = min(end, request.num_prompt_tokens - 1)
    if first > last:
        return None
    return InputLogprobSpec(first - 1 - start, request.prompt_ids[first : last + 1], request.num_top_logprobs)


def take_result(request: Request, step: RequestStep, result: RequestResult) -> None:
    """Enter one step's outcome into its request. The request may be finished by it: what comes after is dropped."""
    proposals = step.sample.proposals if step.sample else ()
    num_rejected = len(proposals) - result.num_accepted
    request.input_logprobs.extend(result.input_logprobs)
    if proposals:
        request.num_verify_steps += 1
        request.num_proposed_tokens += len(proposals)
        request.num_accepted_tokens += result.num_accepted
    accepted = proposals[: result.num_accepted]
    for token_id, logprob in zip(accepted, result.accepted_logprobs or repeat(None), strict=False):
        if not request.is_finished:
            request.append(token_id, logprob)
    if result.token_id is not None and not request.is_finished:
        request.append(result.token_id, result.logprob)
    num_computed = request.num_computed_tokens + len(step.token_ids) - num_rejected
    request.num_computed_tokens = min(num_computed, request.num_tokens)
