"""Bounds of the number of series: label values that come from requests and peers are limited."""

from __future__ import annotations

from collections import OrderedDict

from prometheus_client import Counter

# Value that stands for all values beyond the limit.
OTHER = "other"


class LabelValues:
    """Values of one label. `limit`: number of values; later ones count as OTHER."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def bounded(self, value: str) -> str:
        """Return the value, or OTHER."""
        if value in self._known:
            return value
        if len(self._known) >= self._limit:
            return OTHER
        self._known.add(value)
        return value


class RecentSeries:
    """Series of the label values that were counted last, at most `limit`. The series of the oldest ones are removed."""

    def __init__(self, counters: tuple[Counter, ...], limit: int = 64) -> None:
        self._counters = counters
        self._limit = limit
        # Least recently counted first.
        self._known: OrderedDict[tuple[str, ...], None] = OrderedDict()

    def count(self, labels: tuple[str, ...], *amounts: float) -> None:
        """Increase each counter by its amount."""
        self._known[labels] = None
        self._known.move_to_end(labels)
        for counter, amount in zip(self._counters, amounts, strict=True):
            counter.labels(*labels).inc(amount)
        if len(self._known) > self._limit:
            oldest, _ = self._known.popitem(last=False)
            for counter in self._counters:
                counter.remove(*oldest)
