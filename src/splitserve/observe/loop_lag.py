"""Lag of an event loop: the delay of a task that is ready to run. Every request of the process has this delay."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Histogram

from splitserve.core.clock import Clock, SystemClock

# Seconds between two measurements.
INTERVAL = 0.25
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class LoopLag:
    """Meter of one event loop. `prefix`: prefix of the process's metrics. Run `run` as a task."""

    def __init__(self, registry: CollectorRegistry, prefix: str, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        # Longest measurement since the last `take_longest`, seconds.
        self._longest = 0.0
        self._histogram = Histogram(
            f"{prefix}event_loop_lag_seconds",
            "Delay of a task that was ready to run in the event loop of this process, seconds.",
            registry=registry,
            buckets=_SECONDS,
        )

    async def run(self, interval: float = INTERVAL) -> None:
        """Measure until cancelled."""
        while True:
            due = self._clock.now() + interval
            await asyncio.sleep(interval)
            self.observe(max(0.0, self._clock.now() - due))

    def observe(self, seconds: float) -> None:
        self._longest = max(self._longest, seconds)
        self._histogram.observe(seconds)

    def take_longest(self) -> float:
        """Return the longest lag since the last call, seconds."""
        longest, self._longest = self._longest, 0.0
        return longest
