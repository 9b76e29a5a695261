"""Traces of the requests that this router has served, in bounded memory.

Three rings: requests that were sampled, failed requests, and the slowest ones. A request that is not sampled is still
kept if it failed, or if it is among the slowest 1 % by its time to the first byte or to the last.
"""

from __future__ import annotations

import bisect
import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from splitserve.router.request_trace import ClockTable, FinishedTrace

logger = logging.getLogger(__name__)

# Share of requests that count as slow, and the number of latest requests that they are compared with.
SLOW_SHARE = 0.01
_NUM_COMPARED = 2000


class SlowestShare:
    """Test whether a value is among the largest 1 % of the latest values."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []

    def is_slow(self, value: float) -> bool:
        """Count the value. Return whether at most 1 % of the latest values are as large."""
        position = bisect.bisect_left(self._sorted, value)
        num_larger = len(self._sorted) - position
        bisect.insort(self._sorted, value)
        self._latest.append(value)
        if len(self._latest) > _NUM_COMPARED:
            del self._sorted[bisect.bisect_left(self._sorted, self._latest.popleft())]
        return num_larger <= SLOW_SHARE * len(self._latest)


@dataclass(slots=True)
class _Ring:
    """The latest `size` traces."""

    size: int
    traces: deque[FinishedTrace] = field(default_factory=deque)

    def add(self, trace: FinishedTrace) -> FinishedTrace | None:
        """Add a trace. Return the one that had to go."""
        self.traces.append(trace)
        return self.traces.popleft() if len(self.traces) > self.size else None


class TraceStore:
    """Rings of finished traces. `size`: number of sampled traces; 0 stores none. `sample`: their share, in [0, 1]."""

    def __init__(self, size: int, sample: float) -> None:
        self.clocks = ClockTable()
        self.size = size
        self._sample = sample
        # A tenth as many failed and slow ones, at least 100.
        extra = max(100, size // 10) if size else 0
        self._sampled, self._failed, self._slow = _Ring(size), _Ring(extra), _Ring(extra)
        self._by_rid: dict[str, FinishedTrace] = {}
        # Number of rings that hold a trace.
        self._num_rings: dict[FinishedTrace, int] = {}
        self._slow_first, self._slow_whole = SlowestShare(), SlowestShare()
        self._credit = 0.0
        # Called with every finished request, sampled or not. They must be fast and must not raise.
        self.listeners: list[Callable[[FinishedTrace], None]] = []

    def add(self, trace: FinishedTrace) -> None:
        """Add a request that has ended, and pass it to the listeners."""
        for ring in self._rings_for(trace) if self.size else ():
            trace.is_kept = True
            self._keep(ring, trace)
        for listener in self.listeners:
            try:
                listener(trace)
            except Exception:
                logger.exception("a listener of finished requests failed")

    def _rings_for(self, trace: FinishedTrace) -> list[_Ring]:
        """Return the rings that store a request."""
        rings, summary = [], trace.summary
        # Both compare the time with those of the latest requests, so both are called.
        is_slow = self._slow_whole.is_slow(summary.e2e_ms)
        if summary.ttft_ms is not None:
            is_slow |= self._slow_first.is_slow(summary.ttft_ms)
        # Spread evenly: with a share of 0.25 every fourth request is sampled.
        self._credit += self._sample
        if self._credit >= 1.0:
            self._credit -= 1.0
            rings.append(self._sampled)
        if summary.error:
            rings.append(self._failed)
        if is_slow:
            rings.append(self._slow)
        return rings

    def get(self, rid: str) -> FinishedTrace | None:
        """Return the latest trace of a request id, the client's or the one in the header of the answer."""
        return self._by_rid.get(rid)

    def traces(
        self,
        *,
        slowest: int | None = None,
        errors: bool = False,
        since: float | None = None,
        limit: int = 100,
        caller: str | None = None,
    ) -> list[FinishedTrace]:
        """Return traces, the latest first; with `slowest` that many, the longest time to the first byte first.

        `errors`: only failed ones. `since`: only those that began at this time or later, seconds since 1970.
        `caller`: only those of this client's key. None: those of all clients.
        """
        found: Iterable[FinishedTrace] = (
            trace
            for trace in reversed(self._num_rings)
            if (not errors or trace.summary.error)
            and (since is None or trace.summary.started_at >= since)
            and (caller is None or trace.caller == caller)
        )
        if slowest is not None:
            return heapq.nlargest(slowest, found, key=_first_byte_ms)
        return list(islice(found, limit))

    def _keep(self, ring: _Ring, trace: FinishedTrace) -> None:
        self._num_rings[trace] = self._num_rings.get(trace, 0) + 1
        for name in _names(trace):
            self._by_rid[name] = trace
        old = ring.add(trace)
        if old is None:
            return
        self._num_rings[old] -= 1
        if not self._num_rings[old]:
            del self._num_rings[old]
            for name in _names(old):
                if self._by_rid.get(name) is old:
                    del self._by_rid[name]


def _first_byte_ms(trace: FinishedTrace) -> float:
    """Return the milliseconds to the first byte; of a request without one those to its end."""
    summary = trace.summary
    return summary.e2e_ms if summary.ttft_ms is None else summary.ttft_ms


def _names(trace: FinishedTrace) -> set[str]:
    return {trace.summary.rid, trace.request_id or trace.summary.rid}
