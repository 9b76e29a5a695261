"""Time series of the last hour in bounded memory: one value per series and second."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Mapping

import msgspec

# Seconds of history, and values per series.
CHART_SECONDS = 3600
INTERVAL = 1
# Maximum number of series. Each worker has two.
MAX_SERIES = 2000
# Decimal places of the stored values, which keep the answer short.
_DIGITS = 4


class ChartRings:
    """Rings of values by series. A value is missing if its series did not exist, or had nothing to measure."""

    def __init__(self, size: int = CHART_SECONDS) -> None:
        self._size = size
        # Number of points recorded so far. The latest is at `(count - 1) % size` of every ring.
        self._count = 0
        self._times = array("d", [math.nan]) * size
        self._series: dict[str, array[float]] = {}
        # Number of the point with the last value of a series.
        self._last: dict[str, int] = {}

    def record(self, now: float, point: Mapping[str, float | None]) -> None:
        """Add a point. `now`: seconds since 1970. None: no value."""
        index = self._count % self._size
        self._times[index] = now
        for name in point.keys() - self._series.keys():
            if point[name] is not None and len(self._series) < MAX_SERIES:
                self._series[name] = array("d", [math.nan]) * self._size
        for name, ring in self._series.items():
            value = point.get(name)
            ring[index] = math.nan if value is None else round(value, _DIGITS)
            if value is not None:
                self._last[name] = self._count
        self._count += 1
        for name in [name for name, last in self._last.items() if last <= self._count - 1 - self._size]:
            # Series of a removed worker.
            del self._series[name], self._last[name]

    async def render(self, since: float = -math.inf, rename: Callable[[str], str] | None = None) -> bytes:
        """Return the JSON of all points after `since`, seconds since 1970.

        `rename` maps the URL of a worker to the name that is shown for it. Other tasks of the event loop run between
        two series.
        """
        end, size = self._count, self._size
        start = max(0, end - size)
        times = self._slice(self._times, start, end)
        skipped = sum(at <= since for at in times)
        series = {}
        for name in list(self._series):
            if (ring := self._series.get(name)) is not None:
                # A point that is recorded meanwhile overwrites the oldest value.
                values = self._slice(ring, start, end)[skipped:]
                figure, colon, url = name.partition(":")
                shown = f"{figure}:{rename(url)}" if colon and rename is not None else name
                series[shown] = msgspec.Raw(msgspec.json.encode([None if v != v else v for v in values]))
            await asyncio.sleep(0)
        return msgspec.json.encode({"interval_s": INTERVAL, "time": times[skipped:], "series": series})

    def _slice(self, ring: array[float], start: int, end: int) -> list[float]:
        """Return the values of the points [start, end)."""
        first, last = start % self._size, end % self._size
        if start == end:
            return []
        return list(ring[first:last] if first < last else ring[first:] + ring[:last])
