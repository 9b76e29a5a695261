"""Bucket counts of a scheduler's step times by kind, which the front end exports as a histogram."""

from __future__ import annotations

from bisect import bisect_left

from splitserve.core.messages import STEP_SECONDS, StepTimeHistogram
from splitserve.core.steps import DECODE, MIXED, PREFILL, StepRecord


class StepTimeCounts:
    """Counts of step times, since startup."""

    def __init__(self) -> None:
        self._counts = {kind: [0] * (len(STEP_SECONDS) + 1) for kind in (DECODE, PREFILL, MIXED)}
        self._totals = dict.fromkeys(self._counts, 0.0)

    def observe(self, step: StepRecord) -> None:
        """Count a step, unless it computed nothing."""
        if not step.num_requests:
            return
        seconds = step.end - step.start
        self._counts[step.kind][bisect_left(STEP_SECONDS, seconds)] += 1
        self._totals[step.kind] += seconds

    def snapshot(self) -> dict[str, StepTimeHistogram]:
        return {kind: StepTimeHistogram(tuple(counts), self._totals[kind]) for kind, counts in self._counts.items()}
