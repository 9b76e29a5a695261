"""Rate at which a scheduler generates tokens, measured while it is busy."""

from __future__ import annotations

# Shortest interval over which a rate is measured, seconds.
INTERVAL = 1.0


class GenerationRate:
    def __init__(self) -> None:
        # Output tokens per second in the last interval. 0: nothing was measured yet.
        self.last = 0.0
        # Clock time at which the interval began. None: the scheduler is idle.
        self._began: float | None = None
        self._num_tokens = 0
        self._is_measured = False

    def add(self, num_tokens: int, now: float) -> None:
        """Count the output tokens of a step that ended at `now`. Those of the first step only open the interval."""
        if self._began is None:
            self._began = now
            return
        self._num_tokens += num_tokens
        if now - self._began >= INTERVAL:
            self._close(now)
            self._began = now

    def stop(self, now: float) -> None:
        """End the interval, because the scheduler is idle. A busy time shorter than an interval still gives a rate."""
        if not self._is_measured:
            self._close(now)
        self._began, self._num_tokens, self._is_measured = None, 0, False

    def _close(self, now: float) -> None:
        if self._began is not None and self._num_tokens and now > self._began:
            self.last = self._num_tokens / (now - self._began)
            self._is_measured = True
        self._num_tokens = 0
