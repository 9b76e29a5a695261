"""Which requests have run out of the time their clients gave them, wherever they stand."""

from __future__ import annotations

import heapq

from splitserve.core.request import Request

# Entries whose requests have ended are swept out when there are this many, and twice as many as at the last sweep.
_FIRST_SWEEP = 1024


class Deadlines:
    def __init__(self) -> None:
        # (deadline, number, request), soonest first.
        self._heap: list[tuple[float, int, Request]] = []
        self._sweep_at = _FIRST_SWEEP

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, request: Request) -> None:
        """Until it ends. A request without a deadline is none of ours."""
        if request.deadline is None:
            return
        heapq.heappush(self._heap, (request.deadline, request.number, request))
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)
            self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._heap))

    def pop_expired(self, now: float) -> list[Request]:
        """Unfinished requests whose deadline has come; each once."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if not request.is_finished:
                expired.append(request)
        return expired
