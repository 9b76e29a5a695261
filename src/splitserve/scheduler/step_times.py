"""Bucket counts of a scheduler's step times by kind, which the front end exports as a histogram."""

from __future__ import annotations

from bisect import bisect_left

from splitserve.core.messages import STEP_SECONDS, StepTimeHistogram
from splitserve.scheduler.running import ScheduledBatch

DECODE, PREFILL, MIXED = "decode", "prefill", "mixed"


def kind_of(batch: ScheduledBatch) -> str:
    """Return whether a step computes prompts, decodes, or both."""
    steps = zip(batch.requests, batch.plan.requests, strict=True)
    has_prompt = {step.start < request.num_prefill_tokens for request, step in steps}
    return MIXED if len(has_prompt) > 1 else PREFILL if True in has_prompt else DECODE


class StepTimeCounts:
    """Counts of step times, since startup."""

    def __init__(self) -> None:
        self._counts = {kind: [0] * (len(STEP_SECONDS) + 1) for kind in (DECODE, PREFILL, MIXED)}
        self._totals = dict.fromkeys(self._counts, 0.0)

    def observe(self, batch: ScheduledBatch, seconds: float) -> None:
        """Count a step, unless it computed nothing."""
        if not batch.requests:
            return
        kind = kind_of(batch)
        self._counts[kind][bisect_left(STEP_SECONDS, seconds)] += 1
        self._totals[kind] += seconds

    def snapshot(self) -> dict[str, StepTimeHistogram]:
        return {kind: StepTimeHistogram(tuple(counts), self._totals[kind]) for kind, counts in self._counts.items()}
