"""The contract between the scheduler and a role.

The scheduler receives messages, requests a plan, runs it and passes on the result. The role owns the requests from
arrival to end: which queue they wait in, what happens to a computed chunk, and where tokens are sent.
"""

from __future__ import annotations

from typing import Protocol, TypedDict

from splitserve.core.batch import StepResult
from splitserve.core.errors import SplitserveError
from splitserve.core.request import DisaggregationMode, Request
from splitserve.scheduler.running import ScheduledBatch


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
