"""Limits for the number of series, for label values that come from requests and peers."""

from __future__ import annotations

from collections import OrderedDict

from prometheus_client import Counter

# Value that stands for all values beyond the limit.
OTHER = "other"


class LabelValues:
    """Values of one label. `limit`: maximum number of values. Later values count as OTHER."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def bounded(self, value: str) -> str:
        """Return the value, or OTHER if it exceeds the limit."""
        if value in self._known:
            return value
        if len(self._known) >= self._limit:
            return OTHER
        self._known.add(value)
        return value


class RecentSeries:
    """Series of the `limit` label values that were counted last. Older series are removed."""

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
