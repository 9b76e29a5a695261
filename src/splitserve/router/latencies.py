"""Latencies of streams as this router forwards them: time to the first token, and time between tokens.

An event costs one clock read and one append. If a second has more than `_TARGET` events, only every n-th stream is
measured, so the cost does not grow with the load. Percentiles are computed once per second.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

# Maximum number of values that are sorted for a percentile. If there are more, every n-th is used.
_MAX_SORTED = 2000
# Approximate maximum of measured events per second.
_TARGET = 4000


class StreamLatencies:
    """Latencies of streams since the last `take`, seconds."""

    def __init__(self) -> None:
        self.first_tokens: list[float] = []
        self.gaps: list[float] = []
        # One in this many streams is measured to its end, the others to their first token.
        self._stride = 1
        self._num_streams = 0

    def stream(self, arrived: float) -> StreamPace:
        """Return the measurement of a new stream. `arrived`: clock time of its request."""
        self._num_streams += 1
        return StreamPace(self, arrived, has_gaps=self._num_streams % self._stride == 0)

    def take(self) -> Latencies:
        """Return what was measured, and begin new lists."""
        taken = Latencies(self.first_tokens, self.gaps)
        self.first_tokens, self.gaps = [], []
        self._stride = max(1, len(taken.gaps) * self._stride // _TARGET)
        return taken


class StreamPace:
    """Times of one stream. Call `observe` for its events while `is_open` is true."""

    __slots__ = ("_arrived", "_has_gaps", "_last", "_latencies", "is_open")

    def __init__(self, latencies: StreamLatencies, arrived: float, *, has_gaps: bool) -> None:
        self._latencies = latencies
        self._arrived = arrived
        self._has_gaps = has_gaps
        self._last: float | None = None
        self.is_open = True

    def observe(self, num_tokens: int) -> None:
        """Count tokens that arrive together now."""
        now, last = time.monotonic(), self._last
        self._last = now
        if last is None:
            self._latencies.first_tokens.append(now - self._arrived)
            self.is_open = self._has_gaps
        else:
            self._latencies.gaps.append((now - last) / num_tokens)


class Latencies(NamedTuple):
    """Times to first tokens, and times between tokens. Seconds."""

    first_tokens: list[float]
    gaps: list[float]

    def figures(self) -> dict[str, float | None]:
        """Return the percentiles by name, milliseconds."""
        ttft_p50, ttft_p99 = percentiles_ms(self.first_tokens, 0.5, 0.99)
        itl_p50, itl_p99 = percentiles_ms(self.gaps, 0.5, 0.99)
        return {"ttft_p50_ms": ttft_p50, "ttft_p99_ms": ttft_p99, "itl_p50_ms": itl_p50, "itl_p99_ms": itl_p99}


def joined(latencies: Iterable[Latencies]) -> Latencies:
    """Return the latencies of several seconds as one."""
    firsts, gaps = zip(*latencies, strict=True)
    return Latencies([*chain.from_iterable(firsts)], [*chain.from_iterable(gaps)])


def percentiles_ms(seconds: Sequence[float], *shares: float) -> list[float | None]:
    """Return the percentile for each share in [0, 1], milliseconds. None: there are no values."""
    if not seconds:
        return [None] * len(shares)
    ordered = sorted(seconds[:: -(-len(seconds) // _MAX_SORTED)])
    return [round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 3) for share in shares]
