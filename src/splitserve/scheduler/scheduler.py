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
import heapq
import logging
import time
from collections.abc import Iterable, Sequence

import msgspec

from splitserve.cache.kv_cache import InvariantViolation
from splitserve.core import messages
from splitserve.core.batch import StepPlan, StepResult
from splitserve.core.errors import (
    CapacityError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    PromptTooLongError,
    RequestAbortedError,
    SplitserveError,
    WorkerDrainingError,
)
from splitserve.core.request import PROBE_PRIORITY, Request
from splitserve.core.timeline import Span, Stage
from splitserve.observe.events.schema import IndexSnapshot
from splitserve.scheduler.activity_log import ActivityLog
from splitserve.scheduler.grammar_queue import GrammarQueue
from splitserve.scheduler.memory import SchedulerMemory
from splitserve.scheduler.parts import SchedulerParts
from splitserve.scheduler.ports import GenerationRate
from splitserve.scheduler.role_switch import SchedulerRoleSwitch
from splitserve.scheduler.roles.role import Role
from splitserve.scheduler.running import ScheduledBatch, StepPeriod, add_step_spans
from splitserve.scheduler.step_log import StepLog
from splitserve.scheduler.step_times import StepTimeCounts

logger = logging.getLogger(__name__)

# Maximum seconds an idle scheduler waits if nothing wakes it.
IDLE_WAIT = 1.0
# Maximum seconds of a wait while KV transfers or leases are in flight, in case a wake-up is lost.
BUSY_WAIT = 0.02


class Scheduler:
    def __init__(
        self,
        parts: SchedulerParts,
        role: Role,
        grammars: GrammarQueue,
        role_switch: SchedulerRoleSwitch,
        memory: SchedulerMemory,
    ) -> None:
        self.parts = parts
        self._ports = parts.ports
        self.role = role
        self.grammars = grammars
        self._role_switch = role_switch
        self._memory = memory
        self._cache = parts.cache
        self._outbox = parts.outbox
        self._clock = parts.ports.clock
        self._settings = parts.config.scheduler
        self._deadlines = Deadlines()
        self._num_accepted = 0
        self._num_steps = 0
        self._step_seconds = 0.0
        self._num_computed_tokens = 0
        self._num_violations = 0
        self._has_worked = False
        # How long the last plan waits for more requests. 0: it does not.
        self._seconds_to_gather = 0.0
        self._rate = GenerationRate()
        self._step_times = StepTimeCounts()
        self._steps = StepLog()
        self._activity = ActivityLog(self._clock.now())

    def receive(self) -> None:
        for message in self._ports.inbox.drain():
            self._handle(message)
        self._advance_grammars()
        now = self._clock.now()
        for request in self._deadlines.pop_expired(now):
            self._expire(request)
        self.role.advance()
        self._outbox.flush()
        self._role_switch.poll(self.role)
        self.role = self._memory.poll(self.role)
        self.publish_kv_events()
        self._activity.poll(now, self.role.mode, lambda: (self.state(), self._outbox.num_output_tokens))

    def plan(self, in_flight: Sequence[ScheduledBatch] = ()) -> ScheduledBatch | None:
        role = self.role
        group = self._ports.member
        is_called = group is not None and group.is_called
        # The other ranks of a group wait for this one.
        self._seconds_to_gather = 0.0 if in_flight or is_called else role.seconds_to_gather()
        batch = None
        if not self._seconds_to_gather:
            batch = role.running.plan(self._clock.now(), in_flight, role.first_without_room)
        if batch is None and not in_flight and is_called:
            return ScheduledBatch(StepPlan(()), ())
        return batch

    def commit(self, batch: ScheduledBatch, result: StepResult, times: StepPeriod | None = None) -> None:
        """Record a step's result. `times`: period in which the engine computed it. None: not measured."""
        self._num_steps += 1
        if times is not None:
            self._step_seconds += times.end - times.start
            if not times.is_shared:
                self.role.observe(batch.plan, times.end - times.start)
            add_step_spans(batch, self._num_steps, times)
            num_running, num_waiting = len(self.role.running.running), self.role.num_waiting()
            self._step_times.observe(self._steps.add(batch, self._num_steps, times, num_running, num_waiting))
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
        self.role.finish_step(batch, result)
        self._rate.add(self._outbox.num_output_tokens - num_output_tokens, self._clock.now())
        self._outbox.flush()

    def fail_step(self, batch: ScheduledBatch, error: EngineError) -> None:
        """End the requests of a step that the engine could not run with `error`; the worker continues."""
        logger.error("step failed: %s", error.message)
        for request in batch.requests:
            if not request.is_finished:
                self.role.abort(request.rid, error)
        self._outbox.flush()

    def rest(self) -> None:
        """Wait, because there is nothing to compute. Check first that an idle role holds nothing."""
        is_idle = self.role.is_idle()
        if self._has_worked and is_idle:
            self._has_worked = False
            self._rate.stop(self._clock.now())
            try:
                self.check_invariants()
            except AssertionError as violation:
                # A leak must not end the worker's streams. It is reported in the log and on /metrics.
                self._num_violations += 1
                logger.error("the KV pool does not add up: %s", violation)
        # No step runs here, so an idle role holds nothing at all.
        self._role_switch.poll(self.role, is_resting=is_idle and not self.grammars)
        # An announcement may arrive without a wake-up.
        self._ports.inbox.wait(min(self._seconds_to_gather, BUSY_WAIT) or (IDLE_WAIT if is_idle else BUSY_WAIT))

    def publish_kv_events(self) -> None:
        """Publish what has changed in the caches since the last call, in one batch; called once a turn. Never waits."""
        if self.parts.record is not None:
            self._ports.publisher.publish(self.parts.record.take_news())

    def state(self) -> messages.SchedulerState:
        prefix, queues, running = self._cache.prefix, self.role.queue_state(), self.role.running
        retraction, speculation, windows = running.retraction, running.speculation, self._cache.windows
        return messages.SchedulerState(
            num_running_reqs=len(running.running),
            num_waiting_reqs=self.role.num_waiting() + len(self.grammars),
            waiting_reason=self.role.waiting_reason(),
            num_grammar_queue_reqs=len(self.grammars),
            num_retracted_reqs=len(retraction),
            queue_ages=self._queue_ages(),
            step_times=self._step_times.snapshot(),
            retraction_host_bytes=retraction.memory.num_bytes,
            num_retracted_requests_total=retraction.num_retracted_total,
            num_retracted_resumed_whole_total=retraction.num_resumed_whole_total,
            num_retracted_recomputed_tokens_total=retraction.num_recomputed_tokens_total,
            page_size=self._cache.page_size,
            pages_total=self._cache.pages.num_pages,
            pages_free=self._cache.pages.available(),
            pages_cached=prefix.num_pages,
            window_pages_total=windows.num_pages if windows else 0,
            window_pages_free=windows.num_available if windows else 0,
            rows_total=len(self._cache.rows.table),
            rows_free=self._cache.rows.available_size(),
            prefix_cache_queries=self._cache.prefix_queries,
            prefix_cache_hits=self._cache.prefix_hits,
            prefix_cache_host_hits=self._cache.prefix_host_hits,
            prefix_host_bytes=self._cache.host.num_bytes if self._cache.host else 0,
            num_steps_total=self._num_steps,
            step_seconds_total=self._step_seconds,
            num_computed_tokens_total=self._num_computed_tokens,
            num_finished_reqs_total=self._outbox.num_finished,
            last_gen_throughput=self._rate.last,
            spec_decode_num_drafts_total=speculation.num_drafts if speculation else 0,
            spec_decode_num_draft_tokens_total=speculation.num_draft_tokens if speculation else 0,
            spec_decode_num_accepted_tokens_total=speculation.num_accepted_tokens if speculation else 0,
            num_tokens_held=sum(r.num_tokens for r in running.requests()),
            num_invariant_violations_total=self._num_violations,
            **(running.chunks.state() if running.chunks else {}),
            **queues,
        )

    def check_invariants(self) -> None:
        """Raise InvariantViolation unless every page, row and slot is accounted for."""
        self._cache.check(self.role.holders())
        self.role.running.retraction.check()
        queues = self.role.queue_state()
        if self.role.is_idle() and queues.get("metadata_slots_free") != queues.get("metadata_slots_total"):
            raise InvariantViolation(f"idle, but metadata slots are taken: {queues}")

    def _handle(self, message: messages.ToScheduler) -> None:
        match message:
            case messages.GenerateRequest():
                self._accept(message)
            case messages.AbortRequest():
                self._abort(message.rid, None if message.quiet else RequestAbortedError(message.message))
            case messages.FlushCacheRequest():
                self._outbox.reply(
                    messages.FlushCacheReply(call_id=message.call_id, num_pages_freed=self._cache.flush())
                )
            case messages.StateRequest():
                self._outbox.reply(messages.StateReply(call_id=message.call_id, state=self.state()))
            case messages.KVIndexRequest():
                self._outbox.reply(messages.KVIndexReply(call_id=message.call_id, snapshot=self._kv_index()))
            case messages.StepsRequest(call_id=call_id):
                page = self._steps.page(message.since, message.limit, self._clock.now())
                self._outbox.reply(messages.StepsReply(call_id=call_id, page=page))
            case messages.RoleRequest():
                self.role = self._role_switch.take(message, self.role)
            case messages.MemoryRequest():
                self.role = self._memory.take(message, self.role)

    def _kv_index(self) -> bytes:
        """Return the whole index as JSON of an IndexSnapshot. An index that loads it continues with the next batch."""
        self.publish_kv_events()
        record, publisher = self.parts.record, self._ports.publisher
        events = record.whole() if record is not None else []
        return msgspec.json.encode(IndexSnapshot(publisher.next_sequence, time.time(), events))

    def _accept(self, message: messages.GenerateRequest) -> None:
        now = self._clock.now()
        timeout = self._settings.request_timeout if message.timeout is None else message.timeout
        self._num_accepted += 1
        request = Request(
            rid=message.rid,
            prompt_ids=message.prompt_ids,
            params=message.params,
            eos_token_ids=self.parts.engine.eos_token_ids,
            bootstrap=message.bootstrap,
            return_logprob=message.return_logprob,
            num_top_logprobs=message.num_top_logprobs,
            return_hidden_states=message.return_hidden_states,
            logprob_start=message.logprob_start,
            output_ids=list(message.output_ids),
            num_given_tokens=len(message.output_ids),
            number=self._num_accepted,
            submission=message.submission,
            priority=message.priority if self._settings.enable_priority or message.priority == PROBE_PRIORITY else 0,
            deadline=None if timeout is None else now + timeout,
            timeout=timeout,
        )
        request.timeline.enter("received", now)
        if message.sent_at:
            request.timeline.add(Span(Stage.TO_SCHEDULER, message.sent_at, now))
        if self._outbox.is_open(request.rid):
            logger.error("request id %s is in use already; the second request with it is dropped", request.rid)
            return
        self._has_worked = True
        self._outbox.open(request)
        self._deadlines.watch(request)
        if self._role_switch.is_held:
            self._outbox.fail(
                request, WorkerDrainingError("this worker is changing its role or its memory: send it to another")
            )
            return
        if request.params.grammar is None:
            self._enter(request)
            return
        try:
            self.grammars.add(request)
        except SplitserveError as error:
            self._enter(request, error)

    def _queue_ages(self) -> dict[str, float]:
        now = self._clock.now()
        queues: dict[str, Iterable[Request]] = {"grammar": self.grammars.requests(), **self.role.queued()}
        return {name: max((now - r.timeline.since for r in queue), default=0.0) for name, queue in queues.items()}

    def _advance_grammars(self) -> None:
        """Pass requests with a compiled grammar to the role, and end those with a failed one."""
        for request, error in self.grammars.pop():
            if isinstance(error, InvalidRequestError):
                # The paired worker rejects the same grammar by itself: there is nothing to pair.
                self._outbox.fail(request, error)
            else:
                self._enter(request, error)
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
        error = DeadlineExceededError(
            f"it was not finished within its timeout of {request.timeout:g} s, with {len(request.output_ids)} tokens "
            "of output: ask for fewer tokens, give it a longer timeout, or retry when the worker is less busy"
        )
        if self.grammars.remove(request.rid) is None:
            self.role.abort(request.rid, error)
        else:
            self._enter(request, error)

    def _check_limits(self, request: Request) -> None:
        longest = self.parts.engine.max_tokens_per_request
        if not request.prompt_ids:
            raise InvalidRequestError("the prompt is empty")
        if request.num_prefill_tokens >= longest:
            raise PromptTooLongError(
                f"the prompt has {request.num_prefill_tokens} tokens; this worker takes at most {longest - 1} and one "
                "token of output: shorten the prompt, or start the worker with a larger --max-total-tokens"
            )
        if self.role.num_waiting() > self._settings.max_queued_requests and not request.is_probe:
            raise CapacityError(f"{self._settings.max_queued_requests} requests are waiting already: retry later")
        room = longest - request.num_prompt_tokens
        if request.params.max_new_tokens > room:
            params = dataclasses.replace(
                request.params, max_new_tokens=room, min_new_tokens=min(request.params.min_new_tokens, room)
            )
            request.params = params


# Entries of finished requests are removed when there are this many entries, and twice as many as after the last time.
_FIRST_SWEEP = 1024


class Deadlines:
    """Deadlines of requests, in all queues."""

    def __init__(self) -> None:
        # (deadline, number, request), soonest first.
        self._heap: list[tuple[float, int, Request]] = []
        self._sweep_at = _FIRST_SWEEP

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, request: Request) -> None:
        """Watch a request until it ends. A request without a deadline is ignored."""
        if request.deadline is None:
            return
        heapq.heappush(self._heap, (request.deadline, request.number, request))
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)
            self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._heap))

    def pop_expired(self, now: float) -> list[Request]:
        """Return unfinished requests with an expired deadline; each once."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if not request.is_finished:
                expired.append(request)
        return expired
