"""Speculation: draft tokens are added to a decode's step, and each accepted one saves a step.

For a step that samples its request's next token:
1. `add_proposals` computes how many draft tokens fit: at most `num_draft_tokens`, what is left of the output, of the
   step's budget and of the pool. No request is retracted for a draft token, and no waiting prompt is kept out.
2. The proposer returns them. They follow the step's token as if they had been sampled already.
3. The engine samples a token after each and accepts proposals that equal the sampled tokens (`verified` of
   `core/batch.py`).
4. `take_result` (running.py) appends the accepted ones and the token after them, up to the first that ends the request.
5. `release_unused`, before the next step is planned, releases pages that were allocated for draft tokens only.

Requests with grammars get no draft tokens: their next tokens are masked one by one. Of the proposers, the draft model
is in `engine/draft.py`. `NgramProposer` looks up the longest suffix of the text, of `MIN_NGRAM_MATCH` to `max_match`
tokens, that also occurs earlier, at its latest occurrence. The tokens behind it are the proposals. If they reach the
end of the text, they are repeated: a text that repeats itself is expected to continue so.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from splitserve.cache.kv_cache import PagedKVCache
from splitserve.core.batch import RequestStep, SampleSpec, StepPlan, StepResult
from splitserve.core.errors import EngineError
from splitserve.core.request import Request
from splitserve.core.speculative import MIN_NGRAM_MATCH

logger = logging.getLogger(__name__)


class Proposer(Protocol):
    def propose(self, steps: Sequence[RequestStep], rooms: Sequence[int]) -> list[list[int]]:
        """Return draft tokens that follow each step, at most rooms[i] of them. Raises EngineError.

        Each step computes one token and samples. Pages for its draft tokens are in its row.
        """
        ...


class Speculation:
    def __init__(self, proposer: Proposer, cache: PagedKVCache, num_draft_tokens: int) -> None:
        self._proposer = proposer
        self._cache = cache
        self._num_draft_tokens = num_draft_tokens
        # Requests that may hold pages for draft tokens that they did not get, or that were rejected.
        self._extended: list[Request] = []
        # Steps of requests that verified proposals, the proposals, and how many of these were accepted; since startup.
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def release_unused(self, in_flight: Collection[Request] = ()) -> None:
        """Release pages of draft tokens. Requests in `in_flight` keep theirs until their step has ended."""
        for request in self._extended:
            if request not in in_flight and self._cache.holds(request):
                self._cache.shrink(request, request.num_tokens)
        self._extended = [request for request in self._extended if request in in_flight]

    def add_proposals(self, requests: Sequence[Request], steps: list[RequestStep], budget: int) -> None:
        """Add at most `budget` draft tokens to `steps`, the steps of `requests`, in place."""
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
        try:
            proposed = self._proposer.propose([steps[i] for i in chosen], rooms)
        except EngineError as error:
            # Speculation is optional: the step runs without it.
            logger.warning("no proposals for this step: %s", error.message)
            return
        for i, proposals in zip(chosen, proposed, strict=True):
            step, sample = steps[i], steps[i].sample
            if proposals and sample is not None:
                sample = replace(sample, proposals=proposals)
                steps[i] = replace(step, token_ids=[*step.token_ids, *proposals], sample=sample)

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        for step, outcome in zip(plan.requests, result.requests, strict=True):
            if step.sample is not None and step.sample.proposals:
                self.num_drafts += 1
                self.num_draft_tokens += len(step.sample.proposals)
                self.num_accepted_tokens += outcome.num_accepted

    def _room(self, request: Request, step: RequestStep, budget: int) -> int:
        """Return how many draft tokens the step gets, and allocate their pages to the request."""
        is_decode = step.sample is not None and len(step.token_ids) == 1 and bool(request.output_ids)
        if not is_decode or request.grammar is not None:
            return 0
        # One token is sampled without a draft token.
        wanted = min(self._num_draft_tokens, budget, request.num_tokens_at_most - request.num_tokens - 1)
        if wanted <= 0:
            return 0
        self._extended.append(request)
        if self._cache.extend(request, request.num_tokens + wanted):
            return wanted
        return len(request.pages) * self._cache.page_size - request.num_tokens


class Text:
    """The tokens of a request. They only grow."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_ids = prompt_ids
        self._tokens: npt.NDArray[np.int32] = np.array(prompt_ids, dtype=np.int32)
        self._length = len(prompt_ids)

    def follow(self, output_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """Append new output tokens and return all tokens. A view, valid until the next call."""
        length = len(self.prompt_ids) + len(output_ids)
        if length > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * length)
        self._tokens[self._length : length] = output_ids[self._length - len(self.prompt_ids) :]
        self._length = length
        return self._tokens[:length]


class NgramProposer:
    """A Proposer by prompt lookup."""

    def __init__(self, max_match: int) -> None:
        self._max_match = max_match
        # rid -> text of the request.
        self._texts: dict[str, Text] = {}

    def propose(self, steps: Sequence[RequestStep], rooms: Sequence[int]) -> list[list[int]]:
        texts: dict[str, Text] = {}
        proposals = []
        for step, room in zip(steps, rooms, strict=True):
            spec = step.sample
            assert spec is not None
            texts[step.rid] = text = self._text(step.rid, spec)
            proposals.append(continuation(text.follow(spec.output_ids), self._max_match, room))
        self._texts = texts
        return proposals

    def _text(self, rid: str, spec: SampleSpec) -> Text:
        text = self._texts.get(rid)
        # Another request may reuse an id.
        return text if text is not None and text.prompt_ids is spec.prompt_ids else Text(spec.prompt_ids)


def continuation(tokens: npt.NDArray[np.int32], max_match: int, count: int) -> list[int]:
    """Return `count` tokens that may follow, or none if the last `MIN_NGRAM_MATCH` tokens did not occur before."""
    last = len(tokens) - 1
    # Positions before the last token at which the suffix of the current length ends.
    ends = np.flatnonzero(tokens[:-1] == tokens[last])
    found = ends[:0]
    for back in range(1, max_match):
        ends = ends[ends >= back]
        ends = ends[tokens[ends - back] == tokens[last - back]]
        if not len(ends):
            break
        if back + 1 >= MIN_NGRAM_MATCH:
            found = ends
    if not len(found):
        return []
    behind = tokens[found[-1] + 1 : found[-1] + 1 + count]
    return [int(token) for token in np.resize(behind, count)]
