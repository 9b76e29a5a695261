"""Execution of one client request from its arrival to its last byte, with retries on other workers.

1. The request gets the values that are equal in every attempt: an id, seeds, its arrival time.
2. If the policy needs it, the prompt is read. Then a pair is chosen to serve the request, or one worker: a decode
   worker that computes a short prompt itself, or a colocated one.
3. If a worker fails, its fault is counted and another is chosen. Before the first byte the whole request is sent again.
   After it, the next workers get the journal of the stream and continue after the last delta that the client received.
   If a role has no worker, the request waits for one to return, at most `worker_wait_timeout` seconds.
4. Attempts end if the request is invalid, its stream has no journal, `max_retries` retries gave no token, its deadline
   has passed, or no worker has returned. Then the cause is raised, with the attempts.
5. A worker that hangs or dies while it processes the prompt makes the request a suspect. The next attempt is isolated
   from other suspects (`admission.py`). After `max_prefill_retries` such attempts it ends as a poison request.

It counts prompts and tokens, and does not read them.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from dataclasses import dataclass

import msgspec

from splitserve.api.responses import Headers
from splitserve.core.errors import (
    DeadlineExceededError,
    KVTransferError,
    MemoryReleasedError,
    NoWorkerError,
    OtherModelError,
    PeerLostError,
    PoisonRequestError,
    RanksLostError,
    SchedulerLostError,
    WorkerDrainingError,
    WorkerUnavailableError,
)
from splitserve.core.request import DisaggregationMode
from splitserve.router.aborts import check_order
from splitserve.router.access_log import LoggedRequest, one_word, shape_of
from splitserve.router.admission import IsolationTurn
from splitserve.router.args import LBArgs
from splitserve.router.cache_follower import PromptReader
from splitserve.router.client_stream import ClientStream
from splitserve.router.exchange import ForwardedRequest, forward
from splitserve.router.latencies import StreamLatencies
from splitserve.router.live_events import LiveEventLog
from splitserve.router.metrics import RouterMetrics
from splitserve.router.pairing import Body, wants_merge, with_identity, with_rooms, without_rooms
from splitserve.router.policies import routing_query
from splitserve.router.registry import Avoid, WorkerRegistry
from splitserve.router.upstream import FailureCause, Upstream, UpstreamError, error_object, in_log, misfit_in
from splitserve.router.waiting import WorkerWait, wait_reason
from splitserve.router.worker import Worker, WorkerPair

logger = logging.getLogger(__name__)

# Codes of errors that the reporting worker caused. Errors with other codes may report the partner's failure, or no
# worker caused them (503).
_OWN_FAULTS = ("engine_error", "internal_error")
# Codes of failures that may have passed when the same workers are found healthy again.
_PASSING = frozenset(
    error.reason
    for error in (KVTransferError, MemoryReleasedError, RanksLostError, WorkerDrainingError, WorkerUnavailableError)
)
# Longest part of an id that messages contain, characters.
_SHOWN_CHARACTERS = 128
_TIMEOUT_HEADER = "x-request-timeout"
# Least seconds that a worker gets for a request.
_LEAST_TIMEOUT = 0.001


@dataclass(frozen=True, slots=True)
class RouterParts:
    """Parts of one router that every request uses."""

    args: LBArgs
    registry: WorkerRegistry
    upstream: Upstream
    metrics: RouterMetrics
    prompts: PromptReader
    latencies: StreamLatencies
    events: LiveEventLog
    worker_wait: WorkerWait


class RequestAttempts:
    """Attempts of one request. Timeouts and numbers of retries are those of the router's options."""

    def __init__(
        self, parts: RouterParts, record: LoggedRequest, body: Body, headers: Headers, client: ClientStream
    ) -> None:
        self._parts = parts
        self._args = parts.args
        self._record = record
        self._path = record.route
        self._body = with_identity(record.route, body)
        record.rid, record.is_stream = self._body["rid"], self._body.get("stream") is True
        client.request_id = record.answer_id
        # Name of the request for messages.
        self._name = f"request {str(record.rid)[:_SHOWN_CHARACTERS]}"
        self._headers = headers
        self._client = client
        self._pace = parts.latencies.stream(record.arrived)
        self._created = int(time.time())
        # Timeout that the client sent, and the shorter one of it and the router's own, seconds.
        self._timeout = _client_timeout(body.get("timeout"), headers.get(_TIMEOUT_HEADER))
        self._limit = min(self._args.timeout, math.inf if self._timeout is None else self._timeout)
        self._query = routing_query(record.route, body, headers)
        self._avoid = Avoid()
        # Number of failed attempts since the journal last grew, and the journal's length then.
        self._num_failures = 0
        self._num_known_lines = 0
        # Workers that hung or died while they processed the prompt.
        self._num_prefill_losses = 0
        # Why the choice of the next attempt's workers waited for one to return. None: it did not wait.
        self._missing: NoWorkerError | None = None
        # Current attempt, and its isolation turn if the request is a suspect.
        self._call: ForwardedRequest | None = None
        self._turn: IsolationTurn | None = None

    @property
    def seconds_left(self) -> float:
        return self._limit - self._elapsed()

    async def run(self) -> None:
        """Run attempts until one succeeds.

        Raises the UpstreamError that is the cause of a failure, or WorkerUnavailableError if there was no worker to
        try.
        """
        await self._read_prompt()
        target = await self._select()
        while True:
            try:
                target = await self._isolated(target)
                await self._serve(target)
            except UpstreamError as error:
                if self._client.is_done:
                    await self._client.end()
                    return
                if self._turn is not None:
                    # The next attempt may have to wait for a worker.
                    self._turn.end()
                target = await self._next_target(error, target)
            else:
                for worker in _workers(target):
                    worker.forgive()
                return
            finally:
                if self._turn is not None:
                    self._turn.end()

    async def _select(self) -> WorkerPair | Worker:
        try:
            return await self._available()
        except WorkerUnavailableError as missing:
            message = f"{self._name} (stage: dispatch): {missing.message}"
            raise WorkerUnavailableError(message, param=missing.param) from missing

    async def _available(self) -> WorkerPair | Worker:
        """Return the workers that the policies choose. If a role has none, wait until one returns.

        Raises WorkerUnavailableError, or DeadlineExceededError if the request's time passed while it waited.
        """

        def select() -> WorkerPair | Worker:
            try:
                return self._parts.registry.select(self._query, self._avoid)
            except NoWorkerError as missing:
                self._missing = missing
                self._record.trace.wait_reason = wait_reason(missing)
                raise

        try:
            target, waited = await self._parts.worker_wait.until(select, self.seconds_left)
        except WorkerUnavailableError:
            self._check_time()
            raise
        if waited:
            self._record.queued = (self._record.queued or 0.0) + waited
            self._check_time()
        return target

    def _check_time(self) -> None:
        """Raise DeadlineExceededError if no time is left after a wait for a worker."""
        if self.seconds_left <= 0:
            missing = self._missing
            cause = "" if missing is None else f". Cause of the wait: {missing.message}"
            raise DeadlineExceededError(
                f"{self._name} (stage: dispatch): its {self._limit:g} s ended during a wait for a worker: give it a "
                f"longer timeout{cause}",
                param=None if missing is None else missing.param,
            )

    async def _isolated(self, target: WorkerPair | Worker) -> WorkerPair | Worker:
        """Wait until no other suspect is at `target`. Return `target`, or another target if this one fails meanwhile.

        Returns at once unless this request is a suspect.
        """
        while self._num_prefill_losses and not self._client.lines:
            locks = [worker.isolation for worker in _workers(target)]
            # Long enough to detect a hang of the previous suspect.
            wait, limit = 2.0 * self._args.hang_timeout, 1.5 * self._args.hang_timeout
            self._turn = IsolationTurn(locks, wait=min(wait, self.seconds_left), limit=limit)
            await self._turn.begin()
            self._check_time()
            if all(worker.takes_requests for worker in _workers(target)):
                break
            self._turn.end()
            target = await self._select()
        return target

    async def _read_prompt(self) -> None:
        """Add the blocks of the prompts to the routing query, as far as the policies use them."""
        sizes, is_local = self._parts.registry.block_sizes, self._parts.registry.disaggregate_above is not None
        if not sizes and not is_local:
            return
        at_most = None if is_local else 1
        prompts = await self._parts.prompts.read(self._path, self._body, self._record.num_bytes, sizes, at_most)
        if prompts:
            used = prompts if is_local else ()
            self._query = dataclasses.replace(self._query, hashes=prompts[0].hashes, prompts=used)

    async def _serve(self, target: WorkerPair | Worker) -> None:
        record, workers = self._record, _workers(target)
        # Fields that describe this attempt to the workers; `api/samples.py` reads them.
        dispatch = {
            "attempt": record.num_attempts,
            "created": self._created,
            "elapsed": self._elapsed(),
            "journal": record.is_stream,
            "report": self._args.trace_records > 0,
            "trace_id": record.trace.trace_id,
            "told": [msgspec.Raw(line) for line in self._client.lines],
        }
        body = self._body | {"dispatch": self._body["dispatch"] | dispatch}
        if self._timeout is not None and (record.num_attempts or record.queued):
            # A worker refuses 0 as an error of the client. With so little time it ends the request at once.
            body["timeout"] = max(_LEAST_TIMEOUT, self._timeout - self._elapsed())
        record.num_attempts += 1
        record.workers, record.is_at_router, self._missing = workers, False, None
        record.trace.begin_attempt(time.monotonic())
        prompts = self._query.prompts
        if prompts and workers[-1].mode is DisaggregationMode.DECODE:
            record.num_uncached = workers[-1].num_uncached_tokens(prompts) + self._query.num_output_tokens
        record.dispatched_at = record.dispatched_at or time.monotonic()
        merges = isinstance(target, WorkerPair) and wants_merge(self._path, body)
        if isinstance(target, WorkerPair):
            prefill = target.prefill
            body = with_rooms(self._path, body, prefill.host, prefill.bootstrap_port, prefill_rank=target.prefill_rank)
        elif target.mode is DisaggregationMode.DECODE:
            body = without_rooms(body)
            self._parts.metrics.local_prefills.inc()
        self._call = ForwardedRequest(
            self._client,
            self._path,
            msgspec.json.encode(body),
            self._headers,
            self._args.timeout - self._elapsed(),
            record.trace,
            self._pace,
            record.is_stream,
            self._turn,
            merges,
        )
        await forward(self._parts.upstream, target, self._call)

    async def _next_target(self, error: UpstreamError, failed: WorkerPair | Worker) -> WorkerPair | Worker:
        """Return the target of the next attempt after `error`. Raise `error` with an explanation if there is none."""
        if self._num_known_lines < len(self._client.lines):
            # Progress since the last failure resets the count of failures.
            self._num_known_lines, self._num_failures, self._avoid = len(self._client.lines), 0, Avoid()
        self._num_failures += 1
        self._record.is_at_router = True
        reason, is_refusal = error.code or str(error.status), error.cause is FailureCause.REQUEST
        if is_refusal and self._query.leaves_rank and error_object(error.body).get("param") == "data_parallel_rank":
            # The policy chose the rank, and the worker was restarted with fewer ranks.
            error.worker.prefixes, is_refusal, self._num_failures = None, False, self._num_failures - 1
        self._record.trace.fail_attempt(time.monotonic(), error.worker.url, reason, is_refusal=is_refusal)
        self._blame(error, failed)
        if is_refusal or error.is_final:
            raise error
        check_order(self._record)
        self._count_prefill_loss(error)
        if self._client.started and not self._client.lines:
            raise self._explained(error, "the answer had begun and cannot be continued: send the request again")
        if self.seconds_left <= 0:
            outcome = f"its {self._limit:g} s are over: give it a longer timeout"
            raise self._explained(error, outcome, DeadlineExceededError.reason)
        if self._num_failures > self._args.max_retries:
            outcome = f"{self._num_failures} tries failed without a token (--max-retries): look at the workers' logs"
            raise self._explained(error, outcome)
        if self._query.prompts:
            # The next worker computes the KV of the generated tokens with the prompt.
            count = self._client.count_tokens()
            prompts = () if count is None else self._query.prompts
            self._query = dataclasses.replace(self._query, prompts=prompts, num_output_tokens=count or 0)
        try:
            target = await self._unsuspected(error)
        except WorkerUnavailableError as missing:
            if misfit_in(error.body):
                # The difference is for operators only.
                raise WorkerUnavailableError(f"{self._name} (stage: dispatch): {missing.message}") from None
            raise self._explained(error, f"it cannot go on elsewhere, for {missing.message}") from None
        kind = "migration" if self._client.lines else "retry"
        self._record.num_migrations += kind == "migration"
        self._record.num_retries += kind == "retry"
        self._record.trace.attempts[-1].kind = kind
        self._parts.metrics.retries.labels(kind, error.worker.side).inc()
        outcome = "continues" if kind == "migration" else "is sent again"
        text = f"A request {outcome}, because its {error.worker.side} worker failed or drains."
        self._parts.events.add(kind, error.worker.url, text, self._record.name)
        urls = " ".join(f"{worker.mode}={worker.url}" for worker in _workers(target))
        cause = in_log(error.body)
        logger.warning("request moves rid=%s kind=%s to %s cause=%s", one_word(self._record.rid), kind, urls, cause)
        return target

    async def _unsuspected(self, error: UpstreamError) -> WorkerPair | Worker:
        """Return workers that have not failed this request, or were found healthy since. Raises as `_available`.

        Raises `error` with an explanation if there are only others.
        """
        avoid = self._avoid
        while True:
            target = await self._available()
            workers = _workers(target)
            if not avoid.suspects.issuperset(workers):
                return target
            if self._args.worker_wait_timeout <= 0 or not avoid.passing.keys() >= set(workers):
                # The same workers would fail again, and repeated requests would add load to a full worker.
                raise self._explained(error, "all others have been tried: try again in a moment")
            for worker in workers:
                avoid.suspects.discard(worker)
                avoid.add_failed(worker, avoid.passing.pop(worker))

    def _count_prefill_loss(self, error: UpstreamError) -> None:
        """Count a worker lost in prefill. Raises PoisonRequestError if it is one too many."""
        is_prefilled = self._call is not None and self._call.is_prefilled
        if not error.is_worker_loss or is_prefilled or self._client.lines:
            return
        self._num_prefill_losses += 1
        if self._num_prefill_losses <= self._args.max_prefill_retries:
            return
        self._parts.metrics.poison_requests.inc()
        shape = shape_of(self._path, self._body)
        logger.error("poison request rid=%s tries=%d %s", one_word(self._record.rid), self._record.num_attempts, shape)
        raise PoisonRequestError(
            f"{self._name} (stage: prefill, try {self._record.num_attempts}): {self._num_prefill_losses} worker(s) "
            "hung or died while they processed its prompt; do not send it again, and report this id to the operator"
        )

    def _blame(self, error: UpstreamError, target: WorkerPair | Worker) -> None:
        """Reduce trust in the worker at fault, and exclude it for this request until it is found healthy again."""
        if error.cause in (FailureCause.REQUEST, FailureCause.OVERDUE, FailureCause.ABORTED):
            return
        # Not counted: a worker with other weights, or the first refusal by one that drains or changes its role.
        is_first_drain = error.code == WorkerDrainingError.reason and error.worker not in self._avoid.failed
        self._num_failures -= is_first_drain or error.code == OtherModelError.reason
        if isinstance(target, WorkerPair) and (misfit := misfit_in(error.body)):
            self._parts.registry.add_misfit(target, misfit)
            self._num_failures -= 1
            return
        is_partners = error.code == PeerLostError.reason
        is_lost = error.cause is FailureCause.LOST or error.code == SchedulerLostError.reason
        at_fault = next((w for w in _workers(target) if (w is error.worker) is not is_partners), error.worker)
        if is_lost or is_partners:
            self._avoid.add_failed(at_fault, at_fault.clock.now())
        else:
            self._avoid.add_suspects(_workers(target), may_pass=error.code in _PASSING)
        if is_lost or is_partners or error.code in _OWN_FAULTS:
            at_fault.add_fault()

    def _explained(self, error: UpstreamError, outcome: str, code: str | None = None) -> UpstreamError:
        # A scheduler's report names request and stage.
        if error.cause is not FailureCause.LOST:
            code = None
            if self._name.encode() in error.body:
                return error
        stage = "streaming" if self._client.started else "dispatch"
        return error.explained(f"{self._name} (stage: {stage}, try {self._record.num_attempts})", outcome, code)

    def _elapsed(self) -> float:
        return time.monotonic() - self._record.arrived


def _workers(target: WorkerPair | Worker) -> tuple[Worker, ...]:
    return (target,) if isinstance(target, Worker) else (target.prefill, target.decode)


def _client_timeout(field: object, header: str | None) -> float | None:
    """Return the client's timeout in seconds. None: not given, or malformed; workers reject malformed ones."""
    try:
        seconds = float(field if isinstance(field, int | float) else header or "nan")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) else None
