"""The null role: prefill and decode in one worker. Also the parts that it shares with the other roles.

The scheduler receives messages, requests a plan, runs it and passes on the result. The role owns the requests from
arrival to end: which queue they wait in, what happens to a computed chunk, and where tokens are sent.

The null role is also the reference that disaggregated output is compared with:
1. `accept` puts a request into the waiting queue; the plan admits it when the pool has room.
2. After the step that finishes its prompt, its whole pages are shared through the prefix cache.
3. If the pool is full it may be retracted (retraction.py); what was not saved is computed again here.
4. When it finishes, all its computed whole pages go to the prefix cache; the rest is freed.

In the paired roles a request also has an end of a KV transfer. If it fails or is aborted while a peer may still access
its pages, it keeps them, in the lease table, until that end is quiescent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeVar

from splitserve.core.batch import StepPlan, StepResult
from splitserve.core.clock import Clock
from splitserve.core.errors import SplitserveError
from splitserve.core.request import DisaggregationMode, Request
from splitserve.core.steps import WaitReason
from splitserve.scheduler.ports import Outbox
from splitserve.scheduler.running import RunningSet, ScheduledBatch, take_result
from splitserve.transfer.manager import TransferKit
from splitserve.transfer.room import Room
from splitserve.transfer.state import KVPoll


class Role:
    """The null role, and the base of the others. `running`: requests that this worker computes."""

    mode = DisaggregationMode.NULL
    # The first request outside `running` that found no room. None: no such request.
    first_without_room: Request | None = None

    def __init__(self, running: RunningSet, outbox: Outbox, clock: Clock) -> None:
        self.running = running
        self._cache = running.cache
        self._outbox = outbox
        self._clock = clock

    def accept(self, request: Request) -> None:
        """Take a new request. Raises SplitserveError to reject it."""
        request.timeline.enter("waiting", self._clock.now())
        self.running.add(request)

    def advance(self) -> None:
        """Advance requests in queues with external progress: handshakes, transfers, leases."""

    def finish_step(self, batch: ScheduledBatch, result: StepResult) -> None:
        """Enter a step's results, except those of requests that ended before or during the step."""
        for request, step, outcome in zip(batch.requests, batch.plan.requests, result.requests, strict=True):
            if request.is_finished:
                continue
            take_result(request, step, outcome)
            if outcome.token_id is None:
                self._cache.forget(request)
                continue
            if "decoding" not in request.timeline.entered:
                request.timeline.enter("decoding", self._clock.now())
                self._cache.share(request)
            if request.is_finished:
                self.running.running.remove(request)
                self._cache.release(request, publish=True)
            else:
                self._cache.forget(request)
            self._outbox.send(request)

    def around_step(self, plan: StepPlan) -> AbstractContextManager[None]:
        """Return the context in which a step is to be run, in the engine's thread."""
        return nullcontext()

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Take the measured time of a step, in seconds."""
        if self.running.chunks is not None:
            self.running.chunks.observe(plan, seconds)

    def seconds_to_gather(self) -> float:
        """Return how long an idle worker should wait for more requests before the next step. 0: begin it now."""
        return 0.0

    def abort(self, rid: str, error: SplitserveError | None) -> None:
        """End a request in any queue. Report `error` to the front end, nothing if None. Ignores unknown ids."""
        request = self.running.remove(rid)
        if request is None:
            return
        if self._cache.holds(request):
            self._cache.release(request, publish=True)
        self._outbox.fail(request, error)

    def holders(self) -> list[Request]:
        """Return all requests that hold pages, for the conservation check."""
        return self.running.holders()

    def num_waiting(self) -> int:
        return len(self.running.waiting)

    def is_idle(self) -> bool:
        return self.running.is_empty()

    def hold(self, is_held: bool) -> None:
        """While held, accept no requests from peers. The scheduler accepts none either, so an idle role stays idle."""

    def queue_state(self) -> dict[str, int]:
        return {}

    def waiting_reason(self) -> WaitReason:
        return self.running.last_reason

    def queued(self) -> dict[str, Iterable[Request]]:
        """Return the requests in each queue, by its name."""
        running = self.running
        return {
            "waiting": running.waiting.values(),
            "prebuilt": running.prebuilt,
            "retracted": running.retraction.requests(),
        }


End = TypeVar("End", bound=Room)


@dataclass(slots=True, eq=False)
class RoomEntry(Generic[End]):
    """A request and this worker's end of its KV transfer."""

    request: Request
    end: End
    # Metadata row of the transfer on this worker, from the end of the handshake until the entry ends.
    metadata_index: int | None = None
    # Set if the transfer succeeded but its data cannot be used.
    error: SplitserveError | None = None

    def failure(self) -> SplitserveError:
        return self.error or self.end.failure()


Entry = TypeVar("Entry", bound="RoomEntry[Any]")


class RoomQueue(dict[str, Entry]):
    """Requests in one stage of their KV transfer, by rid, in order of arrival."""

    # What requests with a room lacked in the last call that admits them.
    blocked = WaitReason.NONE

    @property
    def requests(self) -> list[Request]:
        return [entry.request for entry in self.values()]

    def pop_finished(self) -> tuple[list[Entry], list[Entry]]:
        """Return (requests with a successful transfer, requests with a failed one)."""
        states = {rid: entry.end.poll() for rid, entry in self.items()}
        done = [self.pop(rid) for rid, state in states.items() if state is KVPoll.SUCCESS]
        failed = [self.pop(rid) for rid, state in states.items() if state is KVPoll.FAILED]
        return done, failed


class LeaseTable(list[Entry]):
    """Owner of ended requests, and so of their pages, while a peer may still access them.

    A lease ends when the request's end of the transfer is quiescent. That is a proof from the writer or a fence that
    keeps the writer out, never a timeout.
    """

    @property
    def num_pages(self) -> int:
        return sum(len(entry.request.pages) for entry in self)

    def reclaim(self) -> list[Entry]:
        """End every lease of a quiescent transfer. Return their entries; the caller owns them again."""
        over = [entry for entry in self if entry.end.quiescent()]
        for entry in over:
            self.remove(entry)
        return over


class PairedRole(Role, Generic[Entry]):
    """Base of the roles with requests that a peer serves, too. `queues`: those of the transfers, set by the role."""

    def __init__(self, running: RunningSet, outbox: Outbox, clock: Clock, kit: TransferKit[Any]) -> None:
        super().__init__(running, outbox, clock)
        self._kit = kit
        self._queues: Sequence[RoomQueue[Entry]] = ()
        self._leases: LeaseTable[Entry] = LeaseTable()
        self._num_failed = 0

    def abort(self, rid: str, error: SplitserveError | None) -> None:
        entry = self._take_out(rid)
        if entry is None:
            super().abort(rid, error)
            return
        self._outbox.fail(entry.request, error)
        entry.end.abort(
            error.message if error else f"the client of the {self.mode} side left",
            status_code=error.http_status if error else 499,
        )
        self._leases.append(entry)

    def holders(self) -> list[Request]:
        entries = [*chain.from_iterable(queue.values() for queue in self._queues), *self._leases]
        return super().holders() + [e.request for e in entries if self._cache.holds(e.request)]

    def is_idle(self) -> bool:
        return super().is_idle() and not (any(self._queues) or self._leases)

    def queue_state(self) -> dict[str, int]:
        return {
            "pages_leased": self._leases.num_pages,
            "metadata_slots_total": self._kit.slots.size,
            "metadata_slots_free": self._kit.slots.available_size(),
            "num_transfer_failed_reqs_total": self._num_failed,
        }

    def waiting_reason(self) -> WaitReason:
        return next((queue.blocked for queue in self._queues if queue.blocked), super().waiting_reason())

    def _take_out(self, rid: str) -> Entry | None:
        """Remove a request from its queue and return its entry. None: it is in none."""
        return next((entry for queue in self._queues if (entry := queue.pop(rid, None)) is not None), None)

    def _fail(self, entry: Entry) -> None:
        self._num_failed += 1
        self._outbox.fail(entry.request, entry.failure())
        self._leases.append(entry)

    def _close_room(self, entry: Entry) -> None:
        if entry.metadata_index is not None:
            self._kit.slots.free(entry.metadata_index)
        entry.end.clear()
