"""The scheduler of one worker: receives messages, plans steps, commits their results, sends tokens.

A loop (loops.py) decides *when* the four steps below happen, a role (roles/) decides *what* they do to a request:

    receive   take messages from the front end, compiled grammars, expired deadlines and progress of the role's queues;
              publish what has changed in the caches since the last turn
    plan      plan the next step from the running batch
    commit    enter the engine's result into requests and send it to the front end
    rest      nothing to compute: check that nothing leaked, wait for the next message or transfer

A loop that overlaps this with steps also calls `step_began` and `step_ended`, and plans the next step behind those in
flight.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from splitserve.cache.kv_cache import InvariantViolation, PagedKVCache
from splitserve.core.batch import StepPlan, StepResult
from splitserve.core.errors import (
    CapacityError,
    EngineError,
    InvalidRequestError,
    PromptTooLongError,
    RequestAbortedError,
    SplitserveError,
    WorkerUnavailableError,
)
from splitserve.core.messages import (
    AbortRequest,
    FlushCacheReply,
    FlushCacheRequest,
    GenerateRequest,
    KVIndexReply,
    KVIndexRequest,
    RoleRequest,
    SchedulerState,
    StateReply,
    StateRequest,
    ToScheduler,
)
from splitserve.core.request import Request
from splitserve.scheduler.grammar_queue import GrammarQueue
from splitserve.scheduler.limits import Deadlines, RequestLimits, timed_out
from splitserve.scheduler.lockstep import Member
from splitserve.scheduler.ports import SchedulerPorts
from splitserve.scheduler.role_switch import SchedulerRoleSwitch
from splitserve.scheduler.roles.role import Role
from splitserve.scheduler.running import ScheduledBatch, still_open

logger = logging.getLogger(__name__)


class Scheduler:
    def __init__(
        self,
        role: Role,
        cache: PagedKVCache,
        ports: SchedulerPorts,
        limits: RequestLimits,
        grammars: GrammarQueue,
        role_switch: SchedulerRoleSwitch,
        group: Member | None = None,
    ) -> None:
        """`group`: ranks that compute their steps together. None: this rank steps independently."""
        self.role = role
        self._role_switch = role_switch
        self._group = group
        self.grammars = grammars
        self._cache = cache
        self._inbox = ports.inbox
        self._outbox = ports.outbox
        self._clock = ports.clock
        self._limits = limits
        self._kv_events = ports.kv_events
        self._deadlines = Deadlines()
        self._num_accepted = 0
        self._num_steps = 0
        self._num_computed_tokens = 0
        self._num_violations = 0
        self._has_worked = False
        self._rate = GenerationRate()

    def receive(self) -> None:
        for message in self._inbox.drain():
            self._handle(message)
        self._enter_compiled()
        self._end_failed_grammars()
        for request in self._deadlines.pop_expired(self._clock.now()):
            self._expire(request)
        self.role.advance()
        self._outbox.flush()
        self._answer_role_orders()
        self._kv_events.publish()

    def plan(self, under_way: Sequence[ScheduledBatch] = ()) -> ScheduledBatch | None:
        role = self.role
        batch = role.running.plan(self._clock.now(), under_way, role.first_without_room)
        if batch is None and not under_way and self._group is not None and self._group.is_called:
            return ScheduledBatch(StepPlan(()), ())
        return batch

    def step_began(self, batch: ScheduledBatch) -> None:
        self._cache.step_began(batch.requests)

    def step_ended(self) -> None:
        """Notify the cache that the oldest step in flight has ended."""
        self._cache.step_ended()

    def commit(self, batch: ScheduledBatch, result: StepResult) -> None:
        self._num_steps += 1
        self._num_computed_tokens += batch.plan.num_tokens
        self._has_worked = True
        if (speculation := self.role.running.speculation) is not None:
            speculation.observe(batch.plan, result)
        num_output_tokens = self._outbox.num_output_tokens
        for request, outcome in zip(batch.requests, result.requests, strict=True):
            if outcome.error and not request.is_finished:
                logger.error("request %s failed in a step: %s", request.rid, outcome.error)
                failure = request.grammar.failure if request.grammar else None
                self.role.abort(request.rid, failure or EngineError(outcome.error))
        self.role.finish_step(*still_open(batch, result))
        self._rate.add(self._outbox.num_output_tokens - num_output_tokens, self._clock.now())
        self._outbox.flush()

    def fail_step(self, batch: ScheduledBatch, error: EngineError) -> None:
        """End the requests of a step that the engine could not run with `error`; the worker continues."""
        logger.error("step failed: %s", error.message)
        for request in batch.requests:
            if not request.is_finished:
                self.role.abort(request.rid, error)
        self._outbox.flush()

    def wait(self, timeout: float) -> None:
        self._inbox.wait(timeout)

    def rest(self, timeout: float) -> None:
        if self._has_worked and self.role.is_idle():
            self._has_worked = False
            self._rate.stop(self._clock.now())
            self._check()
        # No step runs here, so an idle role holds nothing at all.
        self._answer_role_orders(is_resting=self.role.is_idle() and not self.grammars)
        self.wait(timeout)

    def state(self) -> SchedulerState:
        prefix, queues, running = self._cache.prefix, self.role.queue_state(), self.role.running
        retraction, speculation = running.retraction, running.speculation
        return SchedulerState(
            num_running_reqs=len(running.running),
            num_waiting_reqs=self.role.num_waiting() + len(self.grammars),
            num_grammar_queue_reqs=len(self.grammars),
            num_retracted_reqs=len(retraction),
            retraction_host_bytes=retraction.num_host_bytes,
            num_retracted_requests_total=retraction.num_retracted_total,
            page_size=self._cache.page_size,
            pages_total=self._cache.pages.num_pages,
            pages_free=self._cache.pages.available(),
            pages_cached=prefix.num_pages,
            window_pages_total=self._cache.windows.num_pages,
            window_pages_free=self._cache.windows.num_available,
            rows_total=len(self._cache.rows.table),
            rows_free=self._cache.rows.available_size(),
            prefix_cache_queries=self._cache.prefix_queries,
            prefix_cache_hits=self._cache.prefix_hits,
            prefix_cache_host_hits=self._cache.prefix_host_hits,
            prefix_host_bytes=self._cache.host.num_bytes if self._cache.host else 0,
            num_steps_total=self._num_steps,
            num_computed_tokens_total=self._num_computed_tokens,
            num_finished_reqs_total=self._outbox.num_finished,
            last_gen_throughput=self._rate.last,
            spec_decode_num_drafts_total=speculation.num_drafts if speculation else 0,
            spec_decode_num_draft_tokens_total=speculation.num_draft_tokens if speculation else 0,
            spec_decode_num_accepted_tokens_total=speculation.num_accepted_tokens if speculation else 0,
            num_tokens_held=sum(r.num_tokens for r in running.requests()),
            num_invariant_violations_total=self._num_violations,
            **queues,
        )

    def check_invariants(self) -> None:
        """Raise InvariantViolation unless every page, row and slot is accounted for."""
        self._cache.check(self.role.holders())
        self.role.running.retraction.check()
        queues = self.role.queue_state()
        if self.role.is_idle() and queues.get("metadata_slots_free") != queues.get("metadata_slots_total"):
            raise InvariantViolation(f"idle, but metadata slots are taken: {queues}")

    def _check(self) -> None:
        try:
            self.check_invariants()
        except AssertionError as violation:
            # A leak must not end the worker's streams. It is reported in the log and on /metrics.
            self._num_violations += 1
            logger.error("the KV pool does not add up: %s", violation)

    def _handle(self, message: ToScheduler) -> None:
        match message:
            case GenerateRequest():
                self._accept(message)
            case AbortRequest():
                self._abort(message.rid, None if message.quiet else RequestAbortedError(message.message))
            case FlushCacheRequest():
                self._outbox.reply(FlushCacheReply(call_id=message.call_id, num_pages_freed=self._cache.flush()))
            case StateRequest():
                self._outbox.reply(StateReply(call_id=message.call_id, state=self.state()))
            case KVIndexRequest():
                self._outbox.reply(KVIndexReply(call_id=message.call_id, snapshot=self._kv_events.snapshot()))
            case RoleRequest():
                self._switch_role(message)

    def _switch_role(self, order: RoleRequest) -> None:
        self.role, reply = self._role_switch.take(order, self.role, self._clock.now())
        if reply is not None:
            self._outbox.reply(reply)

    def _answer_role_orders(self, *, is_resting: bool = False) -> None:
        if not self._role_switch.is_under_way:
            return
        for reply in self._role_switch.poll(self.role, self._clock.now(), is_resting=is_resting):
            self._outbox.reply(reply)

    def _accept(self, message: GenerateRequest) -> None:
        now = self._clock.now()
        timeout = self._limits.default_timeout if message.timeout is None else message.timeout
        self._num_accepted += 1
        request = Request(
            rid=message.rid,
            prompt_ids=message.prompt_ids,
            params=message.params,
            eos_token_ids=self._limits.eos_token_ids,
            bootstrap=message.bootstrap,
            return_logprob=message.return_logprob,
            num_top_logprobs=message.num_top_logprobs,
            logprob_start=message.logprob_start,
            output_ids=list(message.output_ids),
            num_given_tokens=len(message.output_ids),
            number=self._num_accepted,
            priority=message.priority if self._limits.has_priorities else 0,
            deadline=None if timeout is None else now + timeout,
            timeout=timeout,
        )
        request.timeline.enter("received", now)
        if self._outbox.is_open(request.rid):
            logger.error("request id %s is in use already; the second request with it is dropped", request.rid)
            return
        self._has_worked = True
        self._outbox.open(request)
        self._deadlines.watch(request)
        if self._role_switch.is_held:
            self._outbox.fail(request, WorkerUnavailableError("this worker is changing its role: send it to another"))
            return
        if request.params.grammar is None:
            self._enter(request)
            return
        try:
            self.grammars.add(request)
        except SplitserveError as error:
            self._enter(request, error)

    def _enter_compiled(self) -> None:
        ready, failed = self.grammars.pop()
        for request in ready:
            self._enter(request)
        for request, error in failed:
            if isinstance(error, InvalidRequestError):
                # The paired worker rejects the same grammar by itself: there is nothing to pair.
                self._outbox.fail(request, error)
            else:
                self._enter(request, error)

    def _end_failed_grammars(self) -> None:
        for request in list(self.role.running.running):
            if request.grammar is not None and (failure := request.grammar.failure) is not None:
                logger.warning("request %s ended by its grammar: %s", request.rid, failure.message)
                self.role.abort(request.rid, failure)

    def _enter(self, request: Request, error: SplitserveError | None = None) -> None:
        """Pass the request to its role; with `error` only to notify its peer, if it has one."""
        try:
            self.role.accept(request)
        except SplitserveError as refusal:
            self._outbox.fail(request, error or refusal)
            return
        try:
            if error is not None:
                raise error
            self._check_limits(request)
        except SplitserveError as failure:
            self.role.abort(request.rid, failure)

    def _abort(self, rid: str, error: SplitserveError | None) -> None:
        request = self.grammars.remove(rid)
        if request is None:
            self.role.abort(rid, error)
        else:
            self._outbox.fail(request, error)

    def _expire(self, request: Request) -> None:
        error = timed_out(request)
        if self.grammars.remove(request.rid) is None:
            self.role.abort(request.rid, error)
        else:
            self._enter(request, error)

    def _check_limits(self, request: Request) -> None:
        longest = self._limits.max_tokens_per_request
        if not request.prompt_ids:
            raise InvalidRequestError("the prompt is empty")
        if request.num_prefill_tokens >= longest:
            raise PromptTooLongError(
                f"the prompt has {request.num_prefill_tokens} tokens; this worker takes at most {longest - 1} and one "
                "token of output: shorten the prompt, or start the worker with a larger --max-total-tokens"
            )
        if self.role.num_waiting() > self._limits.max_queued_requests:
            raise CapacityError(f"{self._limits.max_queued_requests} requests are waiting already: retry later")
        room = longest - request.num_prompt_tokens
        if request.params.max_new_tokens > room:
            params = dataclasses.replace(
                request.params, max_new_tokens=room, min_new_tokens=min(request.params.min_new_tokens, room)
            )
            request.params = params


# Shortest interval over which a rate is measured, seconds.
_RATE_INTERVAL = 1.0


class GenerationRate:
    """Rate at which a scheduler generates tokens, measured while it is busy."""

    def __init__(self) -> None:
        # Output tokens per second in the last interval. 0: nothing was measured yet.
        self.last = 0.0
        # Clock time at which the interval began. None: the scheduler is idle.
        self._began: float | None = None
        self._num_tokens = 0
        self._is_measured = False

    def add(self, num_tokens: int, now: float) -> None:
        """Count the output tokens of a step that ended at `now`. Those of the first step only open the interval."""
        if self._began is None:
            self._began = now
            return
        self._num_tokens += num_tokens
        if now - self._began >= _RATE_INTERVAL:
            self._close(now)
            self._began = now

    def stop(self, now: float) -> None:
        """End the interval, because the scheduler is idle. A busy time shorter than an interval still gives a rate."""
        if not self._is_measured:
            self._close(now)
        self._began, self._num_tokens, self._is_measured = None, 0, False

    def _close(self, now: float) -> None:
        if self._began is not None and self._num_tokens and now > self._began:
            self.last = self._num_tokens / (now - self._began)
            self._is_measured = True
        self._num_tokens = 0
