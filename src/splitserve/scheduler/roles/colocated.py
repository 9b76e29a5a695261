"""The contract between the scheduler and a role, and the null role: prefill and decode in one worker.

The scheduler receives messages, requests a plan, runs it and passes on the result. The role owns the requests from
arrival to end: which queue they wait in, what happens to a computed chunk, and where tokens are sent.

The null role is also the reference that disaggregated output is compared with:
1. `accept` puts a request into the waiting queue; the plan admits it when the pool has room.
2. After the step that finishes its prompt, its whole pages are shared through the prefix cache.
3. If the pool is full it may be retracted (retraction.py); what was not saved is computed again here.
4. When it finishes, all its computed whole pages go to the prefix cache; the rest is freed.
"""

from __future__ import annotations

from typing import Protocol, TypedDict

from splitserve.cache.kv_cache import PagedKVCache
from splitserve.core.batch import StepResult
from splitserve.core.clock import Clock
from splitserve.core.errors import SplitserveError
from splitserve.core.request import DisaggregationMode, Request
from splitserve.scheduler.ports import Outbox
from splitserve.scheduler.running import RunningSet, ScheduledBatch, take_result


class QueueState(TypedDict, total=False):
    """A role's part of SchedulerState."""

    num_prefill_bootstrap_queue_reqs: int
    num_prefill_inflight_queue_reqs: int
    num_decode_prealloc_queue_reqs: int
    num_decode_transfer_queue_reqs: int
    num_tokens_pre_allocated: int
    pages_leased: int
    metadata_slots_total: int
    metadata_slots_free: int
    num_transfer_failed_reqs_total: int
    num_local_prefill_reqs_total: int


class Role(Protocol):
    mode: DisaggregationMode
    # Requests that this worker computes.
    running: RunningSet

    @property
    def first_without_room(self) -> tuple[int, int] | None:
        """Rank of the first request outside `running` that found no room. None: no such request.

        Waiting requests that rank behind it are not admitted.
        """
        ...

    def accept(self, request: Request) -> None:
        """Take a new request. Raises SplitserveError to reject it."""
        ...

    def advance(self) -> None:
        """Advance requests in queues with external progress: handshakes, transfers, leases."""
        ...

    def finish_step(self, batch: ScheduledBatch, result: StepResult) -> None:
        """Enter a step's results."""
        ...

    def abort(self, rid: str, error: SplitserveError | None) -> None:
        """End a request in any queue. Report `error` to the front end, nothing if None. Ignores unknown ids."""
        ...

    def holders(self) -> list[Request]:
        """Return all requests that hold pages, for the conservation check."""
        ...

    def num_waiting(self) -> int:
        """Return the number of accepted requests that are not running yet."""
        ...

    def is_idle(self) -> bool:
        """Return whether there is no request and no lease."""
        ...

    def hold(self, is_held: bool) -> None:
        """While held, accept no requests from peers. The scheduler accepts none either, so an idle role stays idle."""
        ...

    def queue_state(self) -> QueueState: ...


class ColocatedRole:
    mode = DisaggregationMode.NULL

    def __init__(self, running: RunningSet, cache: PagedKVCache, outbox: Outbox, clock: Clock) -> None:
        self.running = running
        self._cache = cache
        self._outbox = outbox
        self._clock = clock

    @property
    def first_without_room(self) -> tuple[int, int] | None:
        return None

    def accept(self, request: Request) -> None:
        request.timeline.enter("waiting", self._clock.now())
        self.running.add(request)

    def advance(self) -> None:
        return None

    def finish_step(self, batch: ScheduledBatch, result: StepResult) -> None:
        for request, step, outcome in zip(batch.requests, batch.plan.requests, result.requests, strict=True):
            take_result(request, step, outcome)
            if outcome.token_id is None:
                self._cache.forget(request)
                continue
            if "decoding" not in request.timeline.entered:
                request.timeline.enter("decoding", self._clock.now())
                self._cache.share(request)
            if request.is_finished:
                self._release(request)
            else:
                self._cache.forget(request)
            self._outbox.tell(request)

    def abort(self, rid: str, error: SplitserveError | None) -> None:
        request = self.running.remove(rid)
        if request is None:
            return
        if self._cache.holds(request):
            self._cache.release(request, publish=True)
        if error is None:
            self._outbox.forget(request)
        else:
            self._outbox.fail(request, error)

    def holders(self) -> list[Request]:
        return self.running.holders()

    def num_waiting(self) -> int:
        return len(self.running.waiting)

    def is_idle(self) -> bool:
        return self.running.is_empty()

    def hold(self, is_held: bool) -> None:
        """Do nothing: no peer sends requests to this role."""

    def queue_state(self) -> QueueState:
        return {}

    def _release(self, request: Request) -> None:
        self.running.running.remove(request)
        self._cache.release(request, publish=True)
