"""Waiting queue and running batch of one worker, and the plan of the next step.

Scheduling is one rule: the computed tokens of each running request catch up with its tokens, within the token budget of
the step. A request that misses one token is decoding, a request that misses more is prefilling its next chunk. A plan
mixes both: decodes first, then prompts that have begun, then the waiting queue in the policy's order while the pool has
room. The rest of the budget may go to draft tokens of the decodes (speculation.py). If a running request finds no free
page, another one is retracted (retraction.py), and resumes before any new request is admitted.

A step may be planned while the step before it is in flight. Requests change only when its result is there. The plan
assumes their state after it: tokens computed and one more sampled, with the id LAST_SAMPLED in the plan. There is no
plan before the result in two cases: a request must be retracted, because its KV must be complete first; or sampling
depends on the ids of earlier tokens (penalties, grammars).

In a pipeline (`pp_size` above 1) several steps are in flight, its micro-batches. There no request continues from a
token that is not sampled yet: requests that wait for one are left out. The others go into the next micro-batch, in even
shares. A prompt's chunks follow each other without waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from splitserve.cache.kv_cache import PagedKVCache
from splitserve.core.batch import (
    LAST_SAMPLED,
    InputLogprobSpec,
    RequestResult,
    RequestStep,
    SampleSpec,
    StepPlan,
)
from splitserve.core.config import SchedulerConfig
from splitserve.core.request import DisaggregationMode, Request
from splitserve.core.steps import WaitReason
from splitserve.core.timeline import Attribute, Span, Stage
from splitserve.scheduler.admission import AdmissionTurn, PoolAdmission, WaitingOrder, prefix_limit
from splitserve.scheduler.chunk_size import ChunkController
from splitserve.scheduler.retraction import Retraction
from splitserve.scheduler.speculation import Speculation


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """A plan and its requests, in the same order."""

    plan: StepPlan
    requests: tuple[Request, ...]
    # Maximum number of prompt tokens of the step. 0: there is no prompt to compute.
    chunk_limit: int = 0
    # Reason why waiting requests were not admitted.
    reason: WaitReason = WaitReason.NONE


@dataclass(frozen=True, slots=True)
class StepPeriod:
    """Clock times at which the engine began and ended a step, seconds."""

    start: float
    end: float
    # Whether the time includes waits for other steps, as in a pipeline.
    is_shared: bool = False


# Request -> its tokens [start, end) in the step.
Spans = dict[Request, tuple[int, int]]
# A request and its tokens [start, end) that could be computed next.
Missing = tuple[Request, int, int]

# Minimum tokens that prompts get in a micro-batch, if that many are left. A pass over fewer takes hardly less time.
LEAST_CHUNK = 256


class RunningSet:
    """Queues of one role, within the limits of `settings`. `speculation`, `chunks`: None if off."""

    def __init__(
        self,
        cache: PagedKVCache,
        retraction: Retraction,
        settings: SchedulerConfig,
        mode: DisaggregationMode,
        *,
        speculation: Speculation | None = None,
        chunks: ChunkController | None = None,
        pp_size: int = 1,
    ) -> None:
        self.cache = cache
        self.retraction = retraction
        is_prefill, is_decode = mode is DisaggregationMode.PREFILL, mode is DisaggregationMode.DECODE
        self.admission = PoolAdmission(cache, settings.num_reserved_decode_tokens, prompts_only=is_prefill)
        self.order = WaitingOrder(settings, cache)
        self.token_budget = settings.chunked_prefill_size
        # Tokens of the budget that prompts may use together; it bounds how long decodes wait for prompts.
        self.prompt_budget = settings.local_prefill_size if is_decode else self.token_budget
        self.max_running = settings.max_running_requests
        self.speculation = speculation
        # Limits prompts beside decodes further. None: chunks have a fixed size.
        self.chunks = chunks
        # Micro-batches to keep in flight.
        self.pp_size = pp_size
        # Requests that are not admitted yet, by rid, in order of arrival. They hold no pages and no row.
        self.waiting: dict[str, Request] = {}
        # Admitted requests that another worker computed. They wait for a free place in the running batch.
        self.prebuilt: deque[Request] = deque()
        # Why requests still waited after the last plan.
        self.last_reason = WaitReason.NONE
        # Admitted requests in order of arrival. Each has a row and pages.
        self.running: list[Request] = []

    def plan(
        self, now: float, in_flight: Sequence[ScheduledBatch] = (), ahead: Request | None = None
    ) -> ScheduledBatch | None:
        """Return the next step; None if there is nothing to compute, or nothing that can be planned yet.

        `in_flight`: the steps in flight, in order, with unknown results; more than one only in a pipeline. The caller
        may drop a plan for a newer one. `ahead`: the first request in another queue that found no room; of the waiting
        requests that rank behind it, only those that may overtake it are admitted.
        """
        # The last step of each request.
        before: dict[Request, RequestStep] = {}
        for batch in in_flight:
            before.update(zip(batch.requests, batch.plan.requests, strict=True))
        if self.pp_size == 1 and any(r.params.needs_history and s.sample is not None for r, s in before.items()):
            return None
        if self.speculation is not None:
            self.speculation.release_unused(before)
        self._fill_running_batch(now)
        decodes, chunks = self._missing(before)
        if self.pp_size > 1:
            num_sampling = sum(step.sample is not None for step in before.values())
            decodes = decodes[: even_share(len(decodes) + num_sampling, self.pp_size)]
        prompt_budget = self._budget_of_prompts(decodes, chunks, in_flight)
        spans: Spans = {}
        budget = self.token_budget
        for request, start, end in chain(decodes, chunks):
            if budget <= 0:
                break
            if request.row is None:
                continue
            if end - start > 1:
                # Only prompts follow from here on.
                budget = min(budget, prompt_budget)
                if budget <= 0:
                    break
            end = min(end, start + budget)
            if self.cache.extend(request, end):
                spans[request] = (start, end)
                budget -= end - start
            elif before:
                return None
            else:
                budget += self._make_room(request, end, spans, now)
        has_prompts = bool(chunks or self.waiting)
        reason = self._admit_waiting(min(budget, prompt_budget), spans, now, ahead)
        self.last_reason = reason
        if not spans:
            return None
        requests, steps = tuple(spans), [step_of(request, start, end) for request, (start, end) in spans.items()]
        if self.speculation is not None:
            num_planned = sum(len(step.token_ids) for step in steps)
            self.speculation.add_proposals(requests, steps, self.token_budget - num_planned)
        return ScheduledBatch(StepPlan(tuple(steps)), requests, prompt_budget if has_prompts else 0, reason)

    def add(self, request: Request) -> None:
        """Append a request to the waiting queue."""
        self.waiting[request.rid] = request

    def remove(self, rid: str) -> Request | None:
        """Remove a request from its queue and return it. It keeps its pages and row. None: it is not queued."""
        if (waiting := self.waiting.pop(rid, None)) is not None:
            return waiting
        for queue in (self.prebuilt, self.running):
            for request in queue:
                if request.rid == rid:
                    queue.remove(request)
                    return request
        return self.retraction.remove(rid)

    def holders(self) -> list[Request]:
        """Return all requests of this set that hold pages."""
        return [*self.running, *self.prebuilt]

    def requests(self) -> Iterator[Request]:
        return chain(self.running, self.prebuilt, self.waiting.values(), self.retraction.requests())

    def num_missing_tokens(self, request: Request) -> int:
        """Return how many tokens of a waiting request are not in the prefix cache."""
        num_cached = len(self.cache.prefix.match(request.prompt_ids).pages) * self.cache.page_size
        return request.num_tokens - num_cached

    def is_empty(self) -> bool:
        return not (self.waiting or self.prebuilt or self.running or len(self.retraction))

    def _fill_running_batch(self, now: float) -> None:
        """Fill the running batch with retracted requests first, then with prebuilt ones."""
        num_free = self.max_running - len(self.running)
        resumed = self.retraction.resume_retracted_reqs(self.admission, num_free, now)
        if resumed:
            self.running.extend(resumed)
            self.running.sort(key=lambda r: r.number)
        while self.prebuilt and len(self.running) < self.max_running:
            request = self.prebuilt.popleft()
            request.timeline.reason = self.last_reason
            request.timeline.enter("running", now)
            self.running.append(request)

    def _missing(self, before: Mapping[Request, RequestStep]) -> tuple[list[Missing], list[Missing]]:
        """Return what can be computed next of running requests: decodes, and chunks of prompts; each by arrival."""
        decodes: list[Missing] = []
        chunks: list[Missing] = []
        for request in self.running:
            if request.grammar is not None and not request.grammar.is_ready(soon=True):
                continue
            # Written out for speed: this loop and the one over its result take most of the time of a plan.
            start, end = request.num_computed_tokens, len(request.prompt_ids) + len(request.output_ids)
            if before and (step := before.get(request)) is not None:
                start = step.end
                if step.sample is not None:
                    if self.pp_size > 1 or end + 1 >= self.admission.num_tokens_at_most(request):
                        continue
                    end += 1
            (decodes if end - start == 1 else chunks).append((request, start, end))
        return decodes, chunks

    def _budget_of_prompts(
        self, decodes: Sequence[Missing], chunks: Sequence[Missing], in_flight: Sequence[ScheduledBatch]
    ) -> int:
        """Return how many tokens of prompts the next step may have. 0: none in this step."""
        if self.pp_size > 1:
            return min(self.prompt_budget, self._share_of_prompts(chunks, in_flight))
        if self.chunks is None or not (chunks or self.waiting):
            return self.prompt_budget
        context = chunks[0][1] if chunks else 0
        return self.chunks.limit(len(decodes), context, self.prompt_budget)

    def _share_of_prompts(self, chunks: Sequence[Missing], in_flight: Sequence[ScheduledBatch]) -> int:
        """Return how many of the prompts' tokens go into one micro-batch."""
        enough = self.pp_size * self.prompt_budget
        num_tokens = sum(end - start for _, start, end in chunks)
        num_tokens += sum(n for batch in in_flight for s in batch.plan.requests if (n := len(s.token_ids)) > 1)
        for request in self.waiting.values():
            if num_tokens >= enough:
                break
            num_tokens += request.num_tokens
        return max(LEAST_CHUNK, even_share(num_tokens, self.pp_size))

    def _make_room(self, request: Request, end: int, spans: Spans, now: float) -> int:
        """Put the request's tokens up to `end` into the step; retract others until the pool has pages for them.

        Return by how many tokens the step's budget grew, which may be negative.
        """
        freed = 0
        while not self.cache.extend(request, end):
            victim = self.retraction.victim(self.holders())
            if victim is None:
                return freed
            start_of_victim, end_of_victim = spans.pop(victim, (0, 0))
            freed += end_of_victim - start_of_victim
            queue = self.running if victim in self.running else self.prebuilt
            queue.remove(victim)
            self.retraction.retract(victim, now)
            if victim is request:
                return freed
        spans[request] = (request.num_computed_tokens, end)
        return freed - (end - request.num_computed_tokens)

    def _admit_waiting(self, budget: int, spans: Spans, now: float, ahead: Request | None) -> WaitReason:
        """Admit waiting requests in the policy's order. Behind the first without room, only small ones are admitted.

        Return the reason why requests still wait.
        """
        has_retracted = len(self.retraction) > 0
        if not has_retracted and (self.prebuilt or (self.waiting and len(self.running) >= self.max_running)):
            return WaitReason.MAX_RUNNING
        turn = AdmissionTurn(self.admission, ahead)
        for request in list(turn.in_order(self.order(self.waiting.values()))) if budget > 0 else ():
            if has_retracted and not request.is_probe:
                break
            if len(self.running) >= self.max_running:
                return WaitReason.MAX_RUNNING if turn.blocked is None else turn.reason
            if budget <= 0 or turn.is_over:
                break
            if not turn.try_admit(request, max_prefix=prefix_limit(request)):
                continue
            del self.waiting[request.rid]
            self.running.append(request)
            request.timeline.reason = self.last_reason
            request.timeline.enter("running", now)
            end = min(request.num_tokens, request.num_computed_tokens + budget)
            budget += self._make_room(request, end, spans, now)
        if has_retracted:
            return WaitReason.RETRACTED
        if turn.blocked is not None or ahead is not None:
            return WaitReason.KV_POOL
        return WaitReason.BUDGET if self.waiting else WaitReason.NONE


def even_share(count: int, num_parts: int) -> int:
    """Return the largest of `num_parts` parts of `count` that are as even as possible."""
    return -(-count // num_parts)


def step_of(request: Request, start: int, end: int) -> RequestStep:
    """Return the step of the request's tokens [start, end). A token beyond its last one is still to be sampled."""
    assert request.row is not None
    prompt_ids, output_ids = request.prompt_ids, request.output_ids
    num_missing = len(prompt_ids) + len(output_ids) - start
    token_ids: Sequence[int]
    if num_missing == 1 and output_ids:
        token_ids = output_ids[-1:]
    else:
        token_ids = request.tokens(start, end) if num_missing > 0 else (LAST_SAMPLED,)
    sample = None
    if end - start >= num_missing:
        sample = SampleSpec(
            request.params,
            end,
            prompt_ids,
            output_ids,
            request.return_logprob,
            request.num_top_logprobs,
            request.return_hidden_states,
            request.grammar,
        )
    logprobs = None if request.logprob_start is None else input_logprobs_of(request, start, end)
    following = request.tokens(end, end + 1)[0] if sample is None else None
    return RequestStep(request.rid, request.row, token_ids, start, sample, logprobs, following, request.draft_state)


def input_logprobs_of(request: Request, start: int, end: int) -> InputLogprobSpec | None:
    """Return which prompt logprobs a step over tokens [start, end) computes: position p - 1 scores the token at p."""
    if (position := request.next_input_logprob) is None:
        return None
    first = max(position, start + 1)
    last = min(end, request.num_prompt_tokens - 1)
    if first > last:
        return None
    return InputLogprobSpec(first - 1 - start, request.prompt_ids[first : last + 1], request.num_top_logprobs)


def take_result(request: Request, step: RequestStep, result: RequestResult) -> None:
    """Enter one step's result into its request. If that finishes the request, later tokens are dropped."""
    if result.input_logprobs:
        request.input_logprobs.extend(result.input_logprobs)
    num_computed = request.num_computed_tokens + len(step.token_ids)
    if step.sample is not None and (proposals := step.sample.proposals):
        request.num_verify_steps += 1
        request.num_proposed_tokens += len(proposals)
        request.num_accepted_tokens += result.num_accepted
        accepted = proposals[: result.num_accepted]
        columns = (result.accepted_logprobs or repeat(None), result.hidden_states or repeat(None))
        for token_id, logprob, state in zip(accepted, *columns, strict=False):
            if not request.is_finished:
                request.append(token_id, logprob, state)
        num_computed -= len(proposals) - result.num_accepted
    if result.token_id is None and step.sample is not None:
        # The mask of its grammar was not ready: the last token is computed again.
        num_computed -= 1
    if result.token_id is not None and request.finish is None:
        request.append(result.token_id, result.logprob, result.hidden_states[-1] if result.hidden_states else None)
    if result.draft_state is not None:
        request.draft_state = result.draft_state
    # An accepted proposal may have finished the request, with others behind it.
    request.num_computed_tokens = min(num_computed, request.num_tokens) if result.num_accepted else num_computed


def computes_prompt(request: Request, step: RequestStep) -> bool:
    """Return whether a step computes tokens that came with the request. Other steps decode."""
    return step.start < request.num_prefill_tokens


def add_step_spans(batch: ScheduledBatch, number: int, times: StepPeriod) -> None:
    """Add a step to the timelines of its requests. Call it before the results are stored in the requests."""
    start, end, num_tokens = times.start, times.end, batch.plan.num_tokens
    for request, step in zip(batch.requests, batch.plan.requests, strict=True):
        if request.is_finished:
            continue
        count = len(step.token_ids)
        if computes_prompt(request, step):
            values: dict[str, Attribute] = {"tokens": count, "batch_tokens": num_tokens, "step": number}
            request.timeline.add(Span(Stage.PREFILL_CHUNK, start, end, values))
        else:
            request.timeline.add_decode_step(number, start, end, count / num_tokens)
