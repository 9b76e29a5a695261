"""What an operator watches at the router. One registry a router, so that several may live in one process."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


@dataclass(frozen=True, slots=True)
class RouteMetrics:
    requests: Counter
    duration: Histogram


class RouterMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "splitserve_router:requests", "Requests received, by route", ["route"], registry=self.registry
        )
        self.errors = Counter(
            "splitserve_router:errors",
            "Requests that failed, by the side at fault (prefill, decode, colocated, router) and status",
            ["route", "side", "status"],
            registry=self.registry,
        )
        self.retries = Counter(
            "splitserve_router:retries",
            "Requests given to other workers, before (retry) or after (migration) the first byte, by the side at fault",
            ["kind", "side"],
            registry=self.registry,
        )
        self.poison_requests = Counter(
            "splitserve_router:poison_requests",
            "Requests that ended because their workers hung or died while they processed the prompt",
            registry=self.registry,
        )
        self.local_prefills = Counter(
            "splitserve_router:local_prefills",
            "Requests given to a decode worker alone, for their prompts were short (--disaggregate-above)",
            registry=self.registry,
        )
        self.disconnects = Counter(
            "splitserve_router:disconnects",
            "Clients that disconnected before the end of the answer",
            registry=self.registry,
        )
        self.running = Gauge(
            "splitserve_router:num_requests_running", "Requests that workers process", registry=self.registry
        )
        self.waiting = Gauge(
            "splitserve_router:num_requests_waiting", "Requests that wait for admission", registry=self.registry
        )
        self.duration = Histogram(
            "splitserve_router:request_duration_seconds",
            "From the request's arrival to its last byte",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.workers = Gauge(
            "splitserve_router:workers",
            "Workers known, by mode and health",
            ["mode", "healthy"],
            registry=self.registry,
        )
        self.ready_workers = Gauge(
            "splitserve_router:workers_ready",
            "Workers whose path is proven and that take requests, by mode",
            ["mode"],
            registry=self.registry,
        )
        self.probes = Counter(
            "splitserve_router:probes",
            "Probes of workers that joined or came back, by outcome (ok, failed)",
            ["outcome"],
            registry=self.registry,
        )

        self._routes: dict[str, RouteMetrics] = {}

    def of_route(self, path: str) -> RouteMetrics:
        """What is counted for each request of it, found once."""
        found = self._routes.get(path)
        if found is None:
            found = self._routes[path] = RouteMetrics(self.requests.labels(path), self.duration.labels(path))
        return found

    def render(self) -> bytes:
        """Prometheus' text form."""
        return generate_latest(self.registry)
