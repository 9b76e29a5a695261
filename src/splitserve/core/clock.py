"""Time as a dependency: production uses the system's clock, tests a manual one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time in seconds. Only differences mean anything."""

    def now(self) -> float: ...


class SystemClock:
    # The function itself: the clock is read several times per request and step.
    now = staticmethod(time.monotonic)


class ManualClock:
    """A clock that changes only by `advance`."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time cannot go back: {seconds}")
        self._now += seconds
