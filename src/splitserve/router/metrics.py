"""Prometheus metrics of the router. One registry per router, so that several routers can share a process."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class RouterMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self.requests = counter("splitserve_router:requests", "Requests received, by route", ["route"])
        self.errors = counter(
            "splitserve_router:errors",
            "Requests that failed, by the side at fault (prefill, decode, colocated, router) and status",
            ["route", "side", "status"],
        )
        self.retries = counter(
            "splitserve_router:retries",
            "Requests given to other workers, before (retry) or after (migration) the first byte, by the side at fault",
            ["kind", "side"],
        )
        self.poison_requests = counter(
            "splitserve_router:poison_requests",
            "Requests that ended because their workers hung or died while they processed the prompt",
        )
        self.local_prefills = counter(
            "splitserve_router:local_prefills",
            "Requests given to a decode worker alone, for their prompts were short (--disaggregate-above)",
        )
        self.disconnects = counter(
            "splitserve_router:disconnects", "Clients that disconnected before the end of the answer"
        )
        self.running = gauge("splitserve_router:num_requests_running", "Requests that workers process")
        self.waiting = gauge("splitserve_router:num_requests_waiting", "Requests that wait for admission")
        self.duration = Histogram(
            "splitserve_router:request_duration_seconds",
            "From the request's arrival to its last byte",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.workers = gauge("splitserve_router:workers", "Workers known, by mode and health", ["mode", "healthy"])
        self.ready_workers = gauge(
            "splitserve_router:workers_ready", "Workers with a proven path that accept requests, by mode", ["mode"]
        )
        self.probes = counter(
            "splitserve_router:probes",
            "Probes of workers that joined or came back, by outcome (ok, failed)",
            ["outcome"],
        )

        self.dropped_traces = counter(
            "splitserve_router:otlp_dropped_requests",
            "Requests with dropped spans, because the collector was slow or did not answer",
        )

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)
