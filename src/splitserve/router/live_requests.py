"""Requests for the live view: the running ones, and the latest that have ended. Readers get changes.

While there are readers, `refresh` compares every running request with its previous state. Without readers, a request
costs one append when it ends.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from splitserve.observe.trace import TraceSummary
from splitserve.router.access_log import LoggedRequest
from splitserve.router.client_stream import ClientStream
from splitserve.router.request_trace import FinishedTrace

# Maximum number of listed requests. If more are running, the oldest are listed.
MAX_FINISHED = 1000
MAX_RUNNING = 1000

# Requests that have not ended, by the identity of their record.
RunningRequests = Mapping[int, tuple[LoggedRequest, ClientStream]]
# URLs of a prefill and a decode worker.
Link = tuple[str, str]


@dataclass(slots=True)
class _Listed:
    """Entry of a running request. `version`: number of the refresh at which it changed."""

    record: LoggedRequest
    signature: tuple[int, int, bool, int | None]
    version: int
    summary: TraceSummary


class LiveRequests:
    def __init__(self, running: RunningRequests, clock: Callable[[], float] = time.monotonic) -> None:
        self._running = running
        self._clock = clock
        # Number of the last refresh.
        self.version = 0
        # Requests that have ended: the refresh that lists them first, their summary, and the name of the client's key.
        # Their traces are not here, so that the next request gets their memory, which is still in the CPU's cache.
        self._finished: deque[tuple[int, TraceSummary, str | None]] = deque(maxlen=MAX_FINISHED)
        self._listed: dict[int, _Listed] = {}
        # Requests that ended since the last `take`, in total and per link.
        self._num_finished = 0
        self._finished_on: Counter[Link] = Counter()

    def finish(self, trace: FinishedTrace) -> None:
        """Add a request that has ended."""
        self._finished.append((self.version + 1, trace.summary, trace.caller))
        self._num_finished += 1
        if (link := _link_of(trace.summary.workers)) is not None:
            self._finished_on[link] += 1

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_at_router(self) -> int:
        """Return how many of them wait for admission or for a worker."""
        return sum(record.is_at_router for record, _ in self._running.values())

    def take(self) -> tuple[int, Counter[Link]]:
        """Return how many requests have ended since the last call, in total and per link."""
        taken = self._num_finished, self._finished_on
        self._num_finished, self._finished_on = 0, Counter()
        return taken

    def links(self) -> Counter[Link]:
        """Return the requests in flight per link. A request that waits for another pair is on none."""
        counts: Counter[Link] = Counter()
        for record, _ in self._running.values():
            if len(record.workers) == 2 and not record.is_at_router:
                counts[record.workers[0].url, record.workers[1].url] += 1
        return counts

    def refresh(self) -> None:
        """Find the running requests that have changed since the last refresh."""
        self.version += 1
        now, listed = self._clock(), self._listed
        self._listed = {}
        for key, (record, client) in self._running.items():
            if len(self._listed) >= MAX_RUNNING:
                break
            if record.rid is None:
                # Its body is not parsed yet.
                continue
            before = listed.get(key)
            signature = (len(client.lines), record.num_attempts, record.is_at_router, client.status)
            if before is None or before.record is not record or before.signature != signature:
                summary = record.summary(client, now, is_done=False)
                before = _Listed(record, signature, self.version, summary)
            self._listed[key] = before

    def forget(self) -> None:
        """Drop the list of running requests, because there are no readers."""
        self._listed = {}

    def changed(self, since: int, caller: str | None = None) -> list[TraceSummary]:
        """Return the requests that changed after a refresh, ended ones first. `caller`: only those of this key."""
        ended = [
            summary
            for version, summary, key in self._finished
            if since < version <= self.version and (caller is None or key == caller)
        ]
        running = [
            found.summary
            for found in self._listed.values()
            if since < found.version and (caller is None or found.record.caller == caller)
        ]
        return ended + running


def _link_of(workers: Mapping[str, str]) -> Link | None:
    prefill, decode = workers.get("prefill"), workers.get("decode")
    return None if prefill is None or decode is None else (prefill, decode)
