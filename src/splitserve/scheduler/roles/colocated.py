"""The null role: prefill and decode in one worker. Also the reference that disaggregated output is compared with.

1. `accept` puts a request into the waiting queue; the plan admits it when the pool has room.
2. After the step that finishes its prompt, its whole pages are shared through the prefix cache.
3. If the pool is full it may be retracted (retraction.py); what was not saved is computed again here.
4. When it finishes, all its computed whole pages go to the prefix cache; the rest is freed.
"""

from __future__ import annotations

from splitserve.cache.kv_cache import PagedKVCache
from splitserve.core.batch import StepResult
from splitserve.core.clock import Clock
from splitserve.core.errors import SplitserveError
from splitserve.core.request import DisaggregationMode, Request
from splitserve.scheduler.outbox import Outbox
from splitserve.scheduler.roles.base import QueueState
from splitserve.scheduler.running import RunningSet, ScheduledBatch, take_result


class ColocatedRole:
    mode = DisaggregationMode.NULL

    def __init__(self, running: RunningSet, cache: PagedKVCache, outbox: Outbox, clock: Clock) -> None:
        self._set = running
        self._cache = cache
        self._outbox = outbox
        self._clock = clock

    def accept(self, request: Request) -> None:
        request.timeline.enter("waiting", self._clock.now())
        self._set.add(request)

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
        request = self._set.remove(rid)
        if request is None:
            return
        if self._cache.holds(request):
            self._cache.release(request, publish=True)
        if error is None:
            self._outbox.forget(request)
        else:
            self._outbox.fail(request, error)

    def holders(self) -> list[Request]:
        return self._set.holders()

    def num_waiting(self) -> int:
        return len(self._set.waiting)

    def is_idle(self) -> bool:
        return self._set.is_empty()

    def hold(self, is_held: bool) -> None:
        """Do nothing: no peer sends requests to this role."""

    def queue_state(self) -> QueueState:
        return {}

    def _release(self, request: Request) -> None:
        self._set.running.remove(request)
        self._cache.release(request, publish=True)
