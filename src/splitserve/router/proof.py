"""Proof state of one worker: whether it generates, and whether it transfers KV with a partner. Pure.

1. A worker that joins, or returns after it was lost, is in doubt.
2. It is probed (`prober.py`) with growing pauses until a probe succeeds. A request that succeeds is a proof too.
3. Meanwhile it is held back: it gets no requests while there are other workers of its mode. Exception: a worker that
   joined when no worker was proven yet, until its probe fails. Without this exception, the first worker proven after a
   start of the router would get all requests.
"""

from __future__ import annotations

from dataclasses import dataclass

# Seconds from a failed probe to the next: first pause, longest pause. Pauses double.
_PAUSES = (1.0, 30.0)

JOINED = "it has joined and is still to be probed"
LOST = "it was lost and is still to be probed again"


@dataclass(slots=True)
class WorkerProof:
    # Whether the worker is probed at all.
    is_wanted: bool = False
    # Why its path is not proven. None: it is proven.
    doubt: str | None = None
    # True: requests go to other workers while there are any.
    is_held: bool = False
    # Whether it has generated a token without a partner since it is in doubt.
    generates: bool = False
    # Clock time of the next probe, and number of consecutive failed probes.
    next_at: float = 0.0
    num_failures: int = 0

    @classmethod
    def wanted(cls, *, is_held: bool) -> WorkerProof:
        return cls(True, JOINED, is_held)

    def is_due(self, now: float) -> bool:
        return self.doubt is not None and now >= self.next_at

    def begin_anew(self) -> None:
        """Mark a worker that was lost as in doubt, and reset its probes."""
        if self.is_wanted:
            self.doubt, self.is_held = LOST, True
            self.generates, self.next_at, self.num_failures = False, 0.0, 0

    def wait_for_partner(self, reason: str) -> None:
        """Store that the worker waits for a partner. This is not a failure of the worker."""
        self.doubt = reason

    def fail(self, reason: str, now: float) -> None:
        first, longest = _PAUSES
        self.doubt, self.is_held = reason, True
        self.next_at = now + min(longest, first * 2**self.num_failures)
        self.num_failures += 1

    def succeed(self) -> None:
        self.doubt, self.is_held, self.generates, self.num_failures = None, False, True, 0
