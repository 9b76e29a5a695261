"""Log of the last steps of a scheduler, for operators and traces."""

from __future__ import annotations

import time
from collections import deque
from itertools import islice

from splitserve.core.steps import DECODE, MAX_RIDS, MAX_STEPS, MIXED, PREFILL, ClockReading, StepPage, StepRecord
from splitserve.scheduler.running import ScheduledBatch, StepPeriod, computes_prompt


class StepLog:
    """Ring of the records of one scheduler."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=MAX_STEPS)

    def add(
        self, batch: ScheduledBatch, number: int, times: StepPeriod, num_running: int, num_waiting: int
    ) -> StepRecord:
        """Record a step, and return its record. Call it before the results are stored in the requests."""
        num_decodes = num_prompt_tokens = 0
        for request, step in zip(batch.requests, batch.plan.requests, strict=True):
            if computes_prompt(request, step):
                num_prompt_tokens += len(step.token_ids)
            else:
                num_decodes += 1
        record = StepRecord(
            number=number,
            start=times.start,
            end=times.end,
            kind=DECODE if not num_prompt_tokens else MIXED if num_decodes else PREFILL,
            num_requests=len(batch.requests),
            num_decodes=num_decodes,
            num_prompt_tokens=num_prompt_tokens,
            chunk_limit=batch.chunk_limit,
            num_running=num_running,
            num_waiting=num_waiting,
            reason=batch.reason,
            rids=[request.rid for request in batch.requests[:MAX_RIDS]],
        )
        self._records.append(record)
        return record

    def page(self, since: int | None, limit: int, now: float) -> StepPage:
        """Return up to `limit` records: the first ones after the number `since`, or the last ones if that is None.

        `now`: time of the monotonic clock, seconds.
        """
        records = self._records
        if since is None:
            skipped = len(records) - limit
        else:
            # Steps without times leave gaps in the numbers, so the position must be searched.
            skipped = next((i for i, record in enumerate(records) if record.number > since), len(records))
        steps = list(islice(records, max(0, skipped), max(0, skipped) + limit))
        return StepPage(ClockReading(now, time.time()), steps)
