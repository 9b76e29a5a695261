"""Connections to a listener that have not authenticated yet. Pure.

Their number is limited, in all and per address. So is the time that each may take to authenticate. When there is no
room, the oldest one is dropped for the newest. A peer that holds the token needs milliseconds for its handshake, so a
flood of silent connections does not keep it out. The log gets one line per minute about dropped connections.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Hashable
from itertools import islice
from typing import Generic, TypeVar

from splitserve.core.clock import Clock

logger = logging.getLogger(__name__)

MAX_PENDING = 256
MAX_PENDING_PER_ADDRESS = 128
# Seconds from the accept to the end of the handshake.
HANDSHAKE_SECONDS = 1.0
# Seconds between two lines in the log.
LOG_INTERVAL = 60.0

T = TypeVar("T", bound=Hashable)


class PendingHandshakes(Generic[T]):
    """Table of the pending connections of one listener.

    The caller closes the connections that a method returns. `listener`: its name in the log.
    """

    def __init__(
        self,
        listener: str,
        clock: Clock,
        *,
        max_pending: int = MAX_PENDING,
        max_per_address: int = MAX_PENDING_PER_ADDRESS,
    ) -> None:
        self._listener = listener
        self._clock = clock
        self._max_pending = max_pending
        self._max_per_address = max_per_address
        # Both tables are ordered, oldest first. Connection -> (address, clock time of its deadline).
        self._all: dict[T, tuple[str, float]] = {}
        self._of_address: defaultdict[str, dict[T, None]] = defaultdict(dict)
        self._num_unreported = 0
        # Address and reason of the last connection that was dropped.
        self._last_dropped = "", ""
        self._next_report_at = 0.0

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, connection: T) -> bool:
        return connection in self._all

    def add(self, connection: T, address: str) -> T | None:
        """Add a connection. Return the connection that is dropped for it. None: there was room."""
        dropped = None
        if len(self._of_address[address]) >= self._max_per_address:
            dropped = next(iter(self._of_address[address]))
        elif len(self._all) >= self._max_pending:
            dropped = next(iter(self._all))
        if dropped is not None:
            self.reject(dropped, "a newer connection needed its place")
        self._all[connection] = address, self._clock.now() + HANDSHAKE_SECONDS
        self._of_address[address][connection] = None
        return dropped

    def drop_oldest(self, why: str) -> T | None:
        """Drop and return the oldest connection, for lack of other resources. None: none is pending."""
        oldest = next(iter(self._all), None)
        if oldest is not None:
            self.reject(oldest, why)
        return oldest

    def expire(self) -> list[T]:
        """Drop and return the connections past their deadline."""
        now = self._clock.now()
        late = []
        for connection, (_, deadline) in self._all.items():
            if deadline > now:
                break
            late.append(connection)
        for connection in late:
            self.reject(connection, f"it did not authenticate within {HANDSHAKE_SECONDS:g} s")
        self._report()
        return late

    def seconds_left(self) -> float | None:
        """Return the seconds until `expire` is due. None: nothing is pending or unreported."""
        times = [deadline for _, deadline in islice(self._all.values(), 1)]
        if self._num_unreported:
            times.append(self._next_report_at)
        return max(0.0, min(times) - self._clock.now()) if times else None

    def remove(self, connection: T) -> None:
        """Remove a connection that has authenticated or ended. Idempotent."""
        address, _ = self._all.pop(connection, ("", 0.0))
        if of_address := self._of_address.get(address):
            of_address.pop(connection, None)
            if not of_address:
                del self._of_address[address]

    def reject(self, connection: T, why: str) -> None:
        """Drop a connection and count it for the log. No-op if it has authenticated or ended."""
        if connection in self._all:
            address = self._all[connection][0]
            self.remove(connection)
            self._num_unreported += 1
            self._last_dropped = address, why
            self._report()

    def _report(self) -> None:
        """Log the connections dropped since the last line, if the interval is over."""
        now = self._clock.now()
        if not self._num_unreported or now < self._next_report_at:
            return
        logger.warning(
            "unauthenticated connections rejected listener=%r count=%d last_address=%s last_reason=%r",
            self._listener,
            self._num_unreported,
            *self._last_dropped,
        )
        self._num_unreported, self._next_report_at = 0, now + LOG_INTERVAL
