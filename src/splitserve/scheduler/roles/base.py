"""The contract between the scheduler and a role.

The scheduler receives messages, asks for a plan, runs it and hands the result back. The role owns the requests between
their arrival and their end: which queue they stand in, what happens to a computed chunk, who is told of a token.
"""

from __future__ import annotations

from typing import Protocol, TypedDict

from splitserve.core.batch import StepResult
from splitserve.core.request import DisaggregationMode, Request
from splitserve.errors import SplitserveError
from splitserve.scheduler.running import Batch


class QueueState(TypedDict, total=False):
    """A role's part of SchedulerState."""

    num_prefill_bootstrap_queue_reqs: int
    num_prefill_inflight_queue_reqs: int
    num_decode_prealloc_queue_reqs: int
    num_decode_transfer_queue_reqs: int
    pages_leased: int
    metadata_slots_total: int
    metadata_slots_free: int
    num_transfer_failed_reqs_total: int
    num_local_prefill_reqs_total: int


class Role(Protocol):
    mode: DisaggregationMode

    def accept(self, request: Request) -> None:
        """Take a new request. Raises SplitserveError to refuse it."""
        ...

    def advance(self) -> None:
        """Move requests along the queues whose progress comes from outside: handshakes, transfers, leases."""
        ...

    def finish_step(self, batch: Batch, result: StepResult) -> None:
        """Enter a step's results."""
        ...

    def abort(self, rid: str, error: SplitserveError | None) -> None:
        """End a request wherever it stands, telling the front end `error`, silently if None. Ignores unknown ids."""
        ...

    def holders(self) -> list[Request]:
        """All requests that hold pages, for the conservation check."""
        ...

    def num_waiting(self) -> int:
        """Requests accepted that are not running yet."""
        ...

    def is_idle(self) -> bool:
        """No request and no lease anywhere."""
        ...

    def hold(self, is_held: bool) -> None:
        """While held, take nothing that peers ask for either: what is idle stays so. The scheduler takes no request."""
        ...

    def queue_state(self) -> QueueState: ...
