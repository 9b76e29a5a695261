"""Traces of the requests that this router has served, in bounded memory.

There are three rings: sampled requests, failed requests, and slow requests. A request that is not sampled is still
stored if it failed, or if it is among the slowest 1 % by its time to the first byte or to the last.

Every request adds a trace, so its objects are encoded: thousands of stored objects would make the caches of the CPU
useless for the next requests. A block of traces is sorted into the rings and encoded at once, so that the code for it
enters the caches once per block. Readers are rare, so they search the rings and decode.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Literal

import msgspec

from splitserve.router.request_trace import ClockTable, FinishedTrace, TraceEntry

logger = logging.getLogger(__name__)

SlowestBy = Literal["ttft", "output", "e2e"]

# Share of requests that count as slow, and number of latest times for the comparison.
SLOW_SHARE = 0.01
_NUM_COMPARED = 250
# Number of times after which the bound is computed again.
_NUM_BETWEEN = 50
# One request in so many adds its times to the comparison, because that takes longer than all else in the store.
_COMPARED_EVERY = 8
# Traces that are sorted and encoded together.
_BLOCK = 16

_encoder = msgspec.msgpack.Encoder()
_decode = msgspec.msgpack.Decoder(FinishedTrace).decode
_decode_entry = msgspec.msgpack.Decoder(TraceEntry).decode
_split = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


class SlowestShare:
    """Estimate of the bound of the largest 1 % of the latest values."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_NUM_COMPARED)
        # Bound above which a value is slow.
        self.bound = -math.inf
        # Number of values until it is computed again.
        self._num_left = 1

    def add(self, value: float) -> None:
        self._latest.append(value)
        self._num_left -= 1
        if not self._num_left:
            # The bound of few values is inaccurate, so it is computed often at first.
            self._num_left = min(_NUM_BETWEEN, len(self._latest))
            self.bound = heapq.nlargest(1 + int(SLOW_SHARE * len(self._latest)), self._latest)[-1]


class _Ring:
    """The latest `size` FinishedTraces, in order of their ends. Iterators yield them encoded."""

    def __init__(self, size: int) -> None:
        self._size = size
        # Encoded lists of _BLOCK traces, and the traces after them.
        self._blocks: deque[bytes] = deque(maxlen=-(-size // _BLOCK))
        self._latest: list[FinishedTrace] = []

    def extend(self, traces: list[FinishedTrace]) -> None:
        latest = self._latest + traces
        while len(latest) >= _BLOCK:
            self._blocks.append(_encode(latest[:_BLOCK]))
            latest = latest[_BLOCK:]
        self._latest = latest

    def __iter__(self) -> Iterator[bytes]:
        traces = [*chain.from_iterable(map(_split, chain(self._blocks, [_encode(self._latest)])))]
        return map(bytes, traces[max(0, len(traces) - self._size) :])


def _encode(traces: list[FinishedTrace]) -> bytes:
    """Return the encoded list, without traces that contain half a surrogate pair."""
    try:
        return _encoder.encode(traces)
    except UnicodeEncodeError:
        middle = len(traces) // 2
        halves = [_split(_encode(half)) for half in (traces[:middle], traces[middle:]) if middle]
        return _encoder.encode([*chain(*halves)])


class TraceStore:
    """Rings of finished traces. `size`: number of sampled traces; 0 stores none. `sample`: their share, in [0, 1]."""

    def __init__(self, size: int, sample: float) -> None:
        self.clocks = ClockTable()
        self.size = size
        self._sample = sample
        # The rings of failed and of slow requests have a tenth of the size, at least 100.
        extra = max(100, size // 10) if size else 0
        self._sampled, self._failed, self._slow = _Ring(size), _Ring(extra), _Ring(extra)
        self._slow_first, self._slow_whole = SlowestShare(), SlowestShare()
        # Number of requests until one adds its times to these.
        self._num_skipped = 0
        self._credit = 0.0
        # Requests that ended after the last block.
        self._unsorted: list[FinishedTrace] = []
        # Functions called with every finished request, stored or not. They must be fast.
        self.listeners: list[Callable[[FinishedTrace], None]] = []
        # Function called with every stored request.
        self.on_stored: Callable[[FinishedTrace], None] | None = None

    def add(self, trace: FinishedTrace) -> None:
        """Add a request that has ended, and pass it to the listeners."""
        if self.size:
            self._unsorted.append(trace)
            if self.on_stored is not None or len(self._unsorted) >= _BLOCK:
                self._sort()
        for listener in self.listeners:
            _call(listener, trace)

    def get(self, rid: str) -> FinishedTrace | None:
        """Return the latest trace of a request id, the client's or the one in the header of the answer."""
        self._sort()
        # Most traces do not contain it, and need not be decoded.
        wanted, stored = _encoder.encode(rid), chain(self._sampled, self._failed, self._slow)
        found = [_decode(data) for data in stored if wanted in data]
        named = (trace for trace in found if rid in (trace.summary.rid, trace.request_id))
        return max(named, key=lambda trace: trace.ended_at, default=None)

    def traces(
        self,
        *,
        slowest: int | None = None,
        by: SlowestBy = "ttft",
        errors: bool = False,
        since: float | None = None,
        limit: int = 100,
        caller: str | None = None,
    ) -> list[TraceEntry]:
        """Return up to `limit` traces, the latest first. With `slowest`: that many, the slowest first.

        `by`: the time that makes a request slow: up to the first byte, after it, or both together. `errors`: return
        failed requests only. `since`: earliest start, seconds since 1970. `caller`: client with the traces. None: all
        clients.
        """
        found = (
            trace
            for trace in map(_decode_entry, self._all())
            if (not errors or trace.summary.error)
            and (since is None or trace.summary.started_at >= since)
            and (caller is None or trace.caller == caller)
        )
        if slowest is not None:
            return heapq.nlargest(slowest, found, key=_TIMES[by])
        return heapq.nlargest(limit, found, key=lambda trace: trace.ended_at)

    def _sort(self) -> None:
        """Move the latest traces into the rings."""
        traces, self._unsorted = self._unsorted, []
        for trace in traces[self._num_skipped :: _COMPARED_EVERY]:
            self._slow_whole.add(_seconds_to(trace.ended_at, trace))
            if trace.first_byte_at is not None:
                self._slow_first.add(_seconds_to(trace.first_byte_at, trace))
        self._num_skipped = (self._num_skipped - len(traces)) % _COMPARED_EVERY
        first_bound, whole_bound = self._slow_first.bound, self._slow_whole.bound
        slow = [
            trace
            for trace in traces
            if _seconds_to(trace.ended_at, trace) > whole_bound
            or (trace.first_byte_at is not None and _seconds_to(trace.first_byte_at, trace) > first_bound)
        ]
        failed = [trace for trace in traces if trace.summary.error]
        sampled = traces if self._sample >= 1.0 else [trace for trace in traces if self._takes_sample()]
        for ring, found in ((self._sampled, sampled), (self._failed, failed), (self._slow, slow)):
            if found:
                ring.extend(found)
        if self.on_stored is not None:
            for trace in {id(trace): trace for trace in chain(sampled, failed, slow)}.values():
                _call(self.on_stored, trace)

    def _takes_sample(self) -> bool:
        """Return whether the next request is sampled. At even intervals: with a share of 0.25 every fourth one."""
        self._credit += self._sample
        is_sampled = self._credit >= 1.0
        self._credit -= is_sampled
        return is_sampled

    def _all(self) -> Iterable[bytes]:
        """Return the stored traces once each."""
        self._sort()
        return dict.fromkeys(chain(self._sampled, self._failed, self._slow))


def _call(listener: Callable[[FinishedTrace], None], trace: FinishedTrace) -> None:
    try:
        listener(trace)
    except Exception:
        logger.exception("a listener of finished requests failed")


def _seconds_to(then: float, trace: FinishedTrace) -> float:
    """Return the seconds from the arrival, which is a time of this host: clocks of clients are not trusted."""
    return then - trace.trace.arrived


def _first_byte_ms(trace: TraceEntry) -> float:
    """Return the milliseconds to the first byte, or to the end of a request that sent no byte."""
    summary = trace.summary
    return summary.e2e_ms if summary.ttft_ms is None else summary.ttft_ms


_TIMES: dict[SlowestBy, Callable[[TraceEntry], float]] = {
    "ttft": _first_byte_ms,
    "output": lambda trace: trace.summary.e2e_ms - _first_byte_ms(trace),
    "e2e": lambda trace: trace.summary.e2e_ms,
}
