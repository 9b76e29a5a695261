"""Live view of the router: current state for the page and `splitserve top`, and charts of the last hour.

1. Every second each worker is sampled (`live_samples.py`), and the figures of the router are measured
   (`latencies.py`). Both go into rings of one hour (`charts.py`).
2. Subscribers get an update per second, and at once if the health of a worker changes. An update has the state of
   router and workers, and the requests and events that changed since the subscriber's previous update. So a slow
   subscriber gets fewer and larger updates, and nothing is stored for it.
3. Subscribers that received the same previous update get the same bytes. Without subscribers no request is listed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import msgspec

from splitserve import __version__
from splitserve.api.responses import event_of
from splitserve.core.errors import CapacityError
from splitserve.core.request import DisaggregationMode
from splitserve.observe.live import LiveLink, LiveRouter, LiveUpdate, LiveWorker
from splitserve.router.charts import ChartRings
from splitserve.router.latencies import Latencies, StreamLatencies, joined
from splitserve.router.live_events import LiveEventLog, WorkerChanges
from splitserve.router.live_requests import Link, LiveRequests
from splitserve.router.live_samples import INTERVAL, WorkerSampler, name_of
from splitserve.router.registry import WorkerRegistry

logger = logging.getLogger(__name__)

MAX_SUBSCRIBERS = 64
# Seconds over which the latencies of the current state are computed. In one second few requests arrive.
LATENCY_SECONDS = 10
# Shortest time between two updates, seconds.
_MIN_INTERVAL = 0.1


@dataclass(frozen=True, slots=True)
class Viewer:
    """Permissions of a subscriber. `caller`: client of the requests it receives. None: all requests."""

    caller: str | None = None
    # Whether it may send orders to workers, and receives their addresses.
    is_operator: bool = True


@dataclass(frozen=True, slots=True)
class _Position:
    """Position of a subscriber: numbers of the last refresh and of the last event that it received."""

    version: int = -1
    num_events: int = 0


_START = _Position()


@dataclass(slots=True)
class LiveView:
    """Live view. Run `run` and, for each worker, `sampler.watch`. `wall`: returns the seconds since 1970."""

    registry: WorkerRegistry
    sampler: WorkerSampler
    requests: LiveRequests
    latencies: StreamLatencies
    events: LiveEventLog
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    charts: ChartRings = field(default_factory=ChartRings)
    # Returns the longest lag of the event loop since the last call, seconds.
    take_loop_lag: Callable[[], float] = lambda: 0.0
    changes: WorkerChanges = field(init=False)
    _num_subscribers: int = 0
    _is_ending: bool = False
    # Set by the next update, which replaces it by a new event.
    _published: asyncio.Event = field(default_factory=asyncio.Event)
    # Set if an update is due before the next second.
    _has_changed: asyncio.Event = field(default_factory=asyncio.Event)
    _router: LiveRouter = field(init=False)
    # Latencies by second. The charts have those of each second, the router's figures those of all.
    _latest: deque[Latencies] = field(default_factory=lambda: deque([Latencies([], [])], maxlen=LATENCY_SECONDS))
    _link_bytes: dict[Link, float] = field(default_factory=dict)
    # Updates since the last `publish` with the position after each, by viewer and previous position.
    _encoded: dict[tuple[Viewer, _Position], tuple[bytes, _Position]] = field(default_factory=dict)
    # URL -> number of the worker in its name for clients.
    _numbers: dict[str, int] = field(default_factory=dict)
    _measured_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.changes = WorkerChanges(self.events, self.wall)
        self._measured_at = self.clock()
        self._router = self._figures([], 1.0, 0)
        self.events.on_event = self.wake

    def wake(self) -> None:
        """Publish an update now."""
        self._has_changed.set()

    async def run(self) -> None:
        """Measure every second until cancelled."""
        due_at = self.clock() + INTERVAL
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due_at - self.clock())):
                    await self._has_changed.wait()
            try:
                if self.clock() >= due_at:
                    due_at = max(due_at + INTERVAL, self.clock())
                    self.measure()
                self.publish()
            except Exception:
                # An error of the view must not stop the router.
                logger.exception("update of the live view failed")
            await asyncio.sleep(_MIN_INTERVAL)

    def measure(self) -> None:
        """Measure the time since the last call, and add a point to the charts."""
        now = self.clock()
        seconds, self._measured_at = max(now - self._measured_at, 1e-3), now
        self._latest.append(self.latencies.take())
        workers = [self.sampler.describe(worker) for worker in self.registry.all()]
        num_finished, finished_on = self.requests.take()
        self._router = self._figures(workers, seconds, num_finished)
        self._link_bytes = self._divide_bytes(self.requests.links() + finished_on)
        self.charts.record(round(self.wall(), 3), self._point(workers))

    def publish(self) -> None:
        """Add events for changes of workers, and send an update to all subscribers."""
        self.changes.compare(self.registry.all())
        self._has_changed.clear()
        if self._num_subscribers:
            self.requests.refresh()
        self._encoded.clear()
        published, self._published = self._published, asyncio.Event()
        published.set()

    async def updates(self, viewer: Viewer) -> AsyncGenerator[bytes]:
        """Yield updates as SSE events: first a complete one, then changes. Raises CapacityError."""
        with self._subscription():
            self.changes.compare(self.registry.all())
            self.requests.refresh()
            position = _START
            while True:
                published = self._published
                data, position = self._update(viewer, position)
                yield event_of(data)
                # Returns at once if an update was published while this one was sent.
                await published.wait()
                if self._is_ending:
                    return

    def end(self) -> None:
        """End all subscriptions, because the router shuts down."""
        self._is_ending = True
        self._published.set()

    @contextmanager
    def _subscription(self) -> Iterator[None]:
        if self._num_subscribers >= MAX_SUBSCRIBERS:
            raise CapacityError(f"this router already has {MAX_SUBSCRIBERS} live views open: close one, then retry")
        self._num_subscribers += 1
        try:
            yield
        finally:
            self._num_subscribers -= 1
            if not self._num_subscribers:
                self.requests.forget()

    def _update(self, viewer: Viewer, since: _Position) -> tuple[bytes, _Position]:
        """Return the update of a subscriber, and its new position."""
        found = self._encoded.get((viewer, since))
        if found is None:
            position = _Position(self.requests.version, self.events.num_events)
            found = self._encoded[viewer, since] = msgspec.json.encode(self.update(viewer, since)), position
        return found

    def update(self, viewer: Viewer, since: _Position = _START) -> LiveUpdate:
        """Return the update for a viewer, with the changes since a position."""
        gone = [
            LiveWorker(url=w.url, name=name_of(w.url), role=w.mode.value, state="gone", reason=w.reason, in_flight=0)
            for w in self.changes.gone.values()
        ]
        update = LiveUpdate(
            now=round(self.wall(), 3),
            version=__version__,
            model=self._model(),
            can_operate=viewer.is_operator,
            router=self._router,
            workers=[*(self.sampler.describe(worker) for worker in self.registry.all()), *gone],
            links=self._links(),
            requests=self.requests.changed(since.version, viewer.caller),
            events=self.events.after(since.num_events),
        )
        return update if viewer.is_operator else without_addresses(update, self.client_name)

    def _model(self) -> str:
        samples = (found.sample for found in self.sampler.workers.values())
        return next((sample.model for sample in samples if sample is not None), "")

    def client_name(self, url: str) -> str:
        """Return the name of a worker for clients."""
        return f"worker-{self._numbers.setdefault(url, len(self._numbers) + 1)}" if url else ""

    def _figures(self, workers: list[LiveWorker], seconds: float, num_finished: int) -> LiveRouter:
        waiting = self.requests.num_at_router
        running = self.requests.num_running - waiting
        # A request waits on its decode worker until it decodes, also while its prefill worker computes the prompt.
        # Workers also count requests of other routers.
        queued = sum(
            -min(w.running, w.in_flight) if w.role == DisaggregationMode.PREFILL else min(w.waiting, w.in_flight)
            for w in workers
        )
        rates = [w.tokens_per_s or 0.0 for w in workers if w.role != DisaggregationMode.PREFILL]
        return LiveRouter(
            running=running,
            waiting=waiting,
            queued=max(0, min(queued, running)),
            requests_per_s=round(num_finished / seconds, 2),
            tokens_per_s=round(sum(rates), 2),
            **joined(self._latest).figures(),
            loop_lag_ms=round(self.take_loop_lag() * 1e3, 3),
        )

    def _divide_bytes(self, weights: Counter[Link]) -> dict[Link, float]:
        """Return bytes per second by link: rates of prefill workers, divided by `weights`, the requests per link."""
        totals: Counter[str] = Counter()
        for (prefill, _), weight in weights.items():
            totals[prefill] += weight
        rates = {url: found.rates.transfer_bytes_per_s or 0.0 for url, found in self.sampler.workers.items()}
        return {link: rates.get(link[0], 0.0) * weight / totals[link[0]] for link, weight in weights.items()}

    def _links(self) -> list[LiveLink]:
        counts = self.requests.links()
        links = {**dict.fromkeys(self._link_bytes, 0), **counts}
        return [
            LiveLink(prefill, decode, num_requests, round(self._link_bytes.get((prefill, decode), 0.0)))
            for (prefill, decode), num_requests in links.items()
        ]

    def _point(self, workers: list[LiveWorker]) -> dict[str, float | None]:
        """Return the values of one second for the charts."""
        point: dict[str, float | None] = msgspec.to_builtins(self._router) | self._latest[-1].figures()
        sampled = self.sampler.workers.values()
        queries = sum(found.rates.prefix_queries for found in sampled)
        transfers = [w.transfer_gb_s for w in workers if w.transfer_gb_s is not None]
        point["prefix_hit_rate"] = sum(found.rates.prefix_hits for found in sampled) / queries if queries else None
        point["transfer_gb_s"] = sum(transfers) if transfers else None
        for worker in workers:
            if worker.kv_usage is not None:
                point[f"kv_usage:{worker.url}"] = worker.kv_usage
                point[f"queue:{worker.url}"] = worker.waiting
        return point


def without_addresses(update: LiveUpdate, name: Callable[[str], str]) -> LiveUpdate:
    """Return the update for a client: workers have names instead of addresses, and no reasons.

    Events about requests of other clients are left out.
    """
    own = {request.rid for request in update.requests}
    return msgspec.structs.replace(
        update,
        workers=[msgspec.structs.replace(w, url=name(w.url), name=name(w.url), reason="") for w in update.workers],
        links=[msgspec.structs.replace(x, prefill=name(x.prefill), decode=name(x.decode)) for x in update.links],
        requests=[msgspec.structs.replace(r, workers=_named(r.workers, name)) for r in update.requests],
        events=[
            msgspec.structs.replace(event, worker=name(event.worker))
            for event in update.events
            if not event.rid or event.rid in own
        ],
    )


def _named(workers: Mapping[str, str], name: Callable[[str], str]) -> dict[str, str]:
    return {role: name(url) for role, url in workers.items()}
