"""Limits of requests on one worker: length, queue, and deadlines in all queues."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from splitserve.core.errors import DeadlineExceededError
from splitserve.core.request import Request


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of requests on this worker."""

    # Prompt and output together.
    max_tokens_per_request: int
    max_queued_requests: int
    eos_token_ids: frozenset[int]
    # Whether priorities of requests count.
    has_priorities: bool = False
    # Timeout in seconds of requests that set none; None: no limit.
    default_timeout: float | None = None


# Entries of finished requests are removed when there are this many entries, and twice as many as after the last time.
_FIRST_SWEEP = 1024


class Deadlines:
    """Deadlines of requests, in all queues."""

    def __init__(self) -> None:
        # (deadline, number, request), soonest first.
        self._heap: list[tuple[float, int, Request]] = []
        self._sweep_at = _FIRST_SWEEP

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, request: Request) -> None:
        """Watch a request until it ends. A request without a deadline is ignored."""
        if request.deadline is None:
            return
        heapq.heappush(self._heap, (request.deadline, request.number, request))
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)
            self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._heap))

    def pop_expired(self, now: float) -> list[Request]:
        """Return unfinished requests with an expired deadline; each once."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if not request.is_finished:
                expired.append(request)
        return expired


def timed_out(request: Request) -> DeadlineExceededError:
    """Return the error of a request with an expired deadline."""
    return DeadlineExceededError(
        f"it was not finished within its timeout of {request.timeout:g} s, with {len(request.output_ids)} tokens of "
        "output: ask for fewer tokens, give it a longer timeout, or retry when the worker is less busy"
    )
