"""Latest events of workers and requests for the live view, in bounded memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from splitserve.core.request import DisaggregationMode
from splitserve.observe.live import LiveEvent
from splitserve.router.worker import NO_ANSWER, Worker, side_of

MAX_EVENTS = 500
# Seconds for which a removed worker stays in the list.
GONE_SECONDS = 60.0


class LiveEventLog:
    """The latest events, numbered from 1. `on_event` is called after each. `clock`: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._events: deque[tuple[int, LiveEvent]] = deque(maxlen=MAX_EVENTS)
        self.num_events = 0
        self.on_event: Callable[[], None] = lambda: None

    def add(self, kind: str, worker: str, text: str, rid: str = "") -> None:
        self.num_events += 1
        self._events.append((self.num_events, LiveEvent(round(self._clock(), 3), kind, worker, rid, text)))
        self.on_event()

    def after(self, number: int) -> list[LiveEvent]:
        """Return the events with a larger number, in order."""
        return [event for found, event in self._events if found > number]


@dataclass(slots=True)
class _KnownWorker:
    mode: DisaggregationMode
    healthy: bool
    is_draining: bool
    worker: Worker


@dataclass(slots=True)
class GoneWorker:
    url: str
    mode: DisaggregationMode
    # Seconds since 1970.
    at: float
    reason: str


@dataclass(slots=True)
class WorkerChanges:
    """Comparison of the registry with its previous state. Adds an event per change."""

    log: LiveEventLog
    clock: Callable[[], float] = time.time
    _known: dict[str, _KnownWorker] = field(default_factory=dict)
    # Workers removed within GONE_SECONDS, by URL.
    gone: dict[str, GoneWorker] = field(default_factory=dict)

    def compare(self, workers: list[Worker]) -> None:
        """Compare with the workers that are registered now."""
        now = self.clock()
        present = {worker.url: worker for worker in workers}
        for url in self._known.keys() - present.keys():
            known = self._known.pop(url)
            reason = known.worker.departure if known.healthy else NO_ANSWER
            self.gone[url] = GoneWorker(url, known.mode, now, reason)
            self.log.add("worker_removed", url, f"A {side_of(known.mode)} worker was removed: {reason}.")
        for url, gone in list(self.gone.items()):
            if url in present or now - gone.at > GONE_SECONDS:
                del self.gone[url]
        for worker in workers:
            self._compare_one(worker)

    def _compare_one(self, worker: Worker) -> None:
        url, before = worker.url, self._known.get(worker.url)
        # A role switch includes a drain, which gets no event of its own.
        is_draining = worker.drains and worker.switching_to is None
        self._known[url] = _KnownWorker(worker.mode, worker.healthy, is_draining, worker)
        side = side_of(worker.mode)
        if before is None:
            self.log.add("worker_joined", url, f"A {side} worker joined.")
        elif before.mode is not worker.mode:
            self.log.add("role_changed", url, f"A {side_of(before.mode)} worker became a {side} worker.")
        if (before.healthy if before else True) and not worker.healthy:
            self.log.add("worker_lost", url, f"A {side} worker does not answer, or accepts no requests.")
        if before is not None and not before.healthy and worker.healthy:
            self.log.add("worker_back", url, f"A {side} worker accepts requests again.")
        if is_draining and not (before and before.is_draining):
            self.log.add("drain", url, f"A {side} worker drains: it gets no new requests.")
        if before is not None and before.is_draining and not is_draining:
            self.log.add("resume", url, f"A {side} worker gets requests again.")
