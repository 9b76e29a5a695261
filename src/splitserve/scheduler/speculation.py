"""Speculation: guesses of the next tokens go into a decode's step, and those that come true spare a step each.

What happens to a step that samples its request's next token:
1. `add_proposals` finds how many guesses it has room for: of `num_draft_tokens`, what is left of the answer, of the
   step's budget and of the pool. Nobody is retracted for a guess, and no waiting prompt is kept out.
2. The proposer makes them. They follow the step's token as if they had been sampled already.
3. The engine draws a token after each and accepts those that equal what was drawn (`core/verify.py`).
4. `take_result` (running.py) takes the accepted ones and the token after them, up to the first that ends the request.
5. `give_back`, before the next step is planned, returns pages that were taken for guesses alone.

It does not know how guesses are made. Requests with grammars get none: their next tokens are masked one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Protocol

from msgspec.structs import replace

from splitserve.cache.kv_cache import PagedKVCache
from splitserve.core.batch import RequestStep, StepPlan, StepResult
from splitserve.core.request import Request
from splitserve.errors import EngineError

logger = logging.getLogger(__name__)


class Proposer(Protocol):
    def propose(self, steps: Sequence[RequestStep], rooms: Sequence[int]) -> list[list[int]]:
        """Guesses of the tokens that follow each step, at most rooms[i] of them. Raises EngineError.

        Each step computes one token and samples. Pages for its guesses are in its row.
        """
        ...


class Speculation:
    def __init__(self, proposer: Proposer, cache: PagedKVCache, num_draft_tokens: int) -> None:
        self._proposer = proposer
        self._cache = cache
        self._num_draft_tokens = num_draft_tokens
        # They may hold pages for tokens that they did not get, or that were not accepted.
        self._extended: list[Request] = []
        # Steps of requests that verified guesses, the guesses, and how many of these were accepted; since the start.
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def give_back(self, under_way: Collection[Request] = ()) -> None:
        """Those `under_way` keep theirs until their step has ended."""
        for request in self._extended:
            if request not in under_way and self._cache.holds(request):
                self._cache.shrink(request, request.num_tokens)
        self._extended = [request for request in self._extended if request in under_way]

    def add_proposals(self, requests: Sequence[Request], steps: list[RequestStep], budget: int) -> None:
        """Put guesses into `steps`, those of `requests`, in place: `budget` tokens at most."""
        chosen: list[int] = []
        rooms: list[int] = []
        for i, (request, step) in enumerate(zip(requests, steps, strict=True)):
            room = self._room(request, step, budget)
            if room > 0:
                chosen.append(i)
                rooms.append(room)
                budget -= room
        if not chosen:
            return
        for i, guesses in zip(chosen, self._propose([steps[i] for i in chosen], rooms), strict=True):
            step, sample = steps[i], steps[i].sample
            if guesses and sample is not None:
                sample = replace(sample, proposals=guesses)
                steps[i] = replace(step, token_ids=[*step.token_ids, *guesses], sample=sample)

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Count a step's guesses."""
        for step, outcome in zip(plan.requests, result.requests, strict=True):
            if step.sample is not None and step.sample.proposals:
                self.num_drafts += 1
                self.num_draft_tokens += len(step.sample.proposals)
                self.num_accepted_tokens += outcome.num_accepted

    def _room(self, request: Request, step: RequestStep, budget: int) -> int:
        """How many guesses the step gets; pages for them are the request's then."""
        is_decode = step.sample is not None and len(step.token_ids) == 1 and bool(request.output_ids)
        if not is_decode or request.grammar is not None:
            return 0
        # One token comes without a guess.
        wanted = min(self._num_draft_tokens, budget, request.num_tokens_at_most - request.num_tokens - 1)
        if wanted <= 0:
            return 0
        self._extended.append(request)
        if self._cache.extend(request, request.num_tokens + wanted):
            return wanted
        return len(request.pages) * self._cache.page_size - request.num_tokens

    def _propose(self, steps: list[RequestStep], rooms: list[int]) -> list[list[int]]:
        try:
            return self._proposer.propose(steps, rooms)
        except EngineError as error:
            # Whoever can do without guesses goes on.
            logger.warning("no proposals for this step: %s", error.message)
            return [[] for _ in steps]
