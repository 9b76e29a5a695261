"""Whether a worker's path is proven: that it generates, and that it hands over or is handed over to. Pure.

1. A worker that joins, or comes back after it was lost, is in doubt.
2. It is probed (`prober.py`) until a probe succeeds, with pauses that grow. A request that ends well proves as much.
3. Meanwhile it is held back: it gets no requests while there are others of its mode. Not so one that joined when nobody
   was proven yet, and whose probe has not failed: behind a router that has just started, the first that is proven would
   get what all of them are there for.
"""

from __future__ import annotations

from dataclasses import dataclass

# Seconds from a failed probe to the next: from the first to the last, doubling.
_PAUSES = (1.0, 30.0)

JOINED = "it has joined and is still to be probed"
LOST = "it was lost and is still to be probed again"


@dataclass(slots=True)
class Proof:
    # Nobody probes it where this is not wanted.
    is_wanted: bool = False
    # Why its path is not proven; None: it is.
    doubt: str | None = None
    # Requests go to others while there are any.
    is_held: bool = False
    # It has generated a token by itself since it is in doubt.
    generates: bool = False
    # Clock time of the next probe, and probes that failed one after the other.
    next_at: float = 0.0
    num_failures: int = 0

    @classmethod
    def wanted(cls, *, is_held: bool) -> Proof:
        return cls(True, JOINED, is_held)

    def is_due(self, now: float) -> bool:
        return self.doubt is not None and now >= self.next_at

    def begin_anew(self) -> None:
        """It was lost."""
        if self.is_wanted:
            self.doubt, self.is_held = LOST, True
            self.generates, self.next_at, self.num_failures = False, 0.0, 0

    def wait_for_partner(self, reason: str) -> None:
        """It can do no more by itself. That is not its failure."""
        self.doubt = reason

    def fail(self, reason: str, now: float) -> None:
        first, longest = _PAUSES
        self.doubt, self.is_held = reason, True
        self.next_at = now + min(longest, first * 2**self.num_failures)
        self.num_failures += 1

    def succeed(self) -> None:
        self.doubt, self.is_held, self.generates, self.num_failures = None, False, True, 0
