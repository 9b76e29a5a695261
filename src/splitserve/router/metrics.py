"""Prometheus metrics of the router. One registry per router, so that several routers can share a process."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from splitserve.observe.exposition import MetricsText, render
from splitserve.observe.histogram import LabelledHistogram
from splitserve.observe.labels import LabelValues
from splitserve.observe.loop_lag import LoopLag
from splitserve.router.request_trace import FinishedTrace

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_STAGE_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)


class RouterMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self.requests = counter("splitserve_router:requests", "Requests received, by route", ["route"])
        self.errors = counter(
            "splitserve_router:errors",
            "Requests that failed, by the side at fault (prefill, decode, colocated, router, client) and status",
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
        self.running = gauge("splitserve_router:num_requests_running", "Requests that were admitted and have not ended")
        self.waiting = gauge(
            "splitserve_router:num_requests_waiting", "Requests that wait for admission or for a worker"
        )
        histogram = partial(LabelledHistogram, self.registry)
        self.duration = histogram(
            "splitserve_router:request_duration_seconds",
            "From the request's arrival to its last byte",
            "route",
            _SECONDS,
        )
        self._first_byte = histogram(
            "splitserve_router:time_to_first_token_seconds",
            "From the request's arrival to the first byte of its answer; of a streamed answer its first token",
            "route",
            _SECONDS,
        )
        self._stages = histogram(
            "splitserve_router:request_stage_seconds",
            "Time of a request in one stage of the router",
            "stage",
            _STAGE_SECONDS,
        )
        self._add_operation()

    def _add_operation(self) -> None:
        """Add the metrics of workers, the queue and the process."""
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self.workers = gauge("splitserve_router:workers", "Workers known, by mode and health", ["mode", "healthy"])
        self.ready_workers = gauge(
            "splitserve_router:workers_ready", "Workers with a proven path that accept requests, by mode", ["mode"]
        )
        self.probes = counter(
            "splitserve_router:probes",
            "Probes of workers that joined or came back, by outcome (ok, failed)",
            ["outcome"],
        )
        self.rejections = counter(
            "splitserve_router:rejections",
            "Requests that the router itself rejected, by the code of the error",
            ["reason"],
        )
        self.oldest = gauge(
            "splitserve_router:queue_oldest_seconds",
            "Seconds that the oldest request in the queue has waited: for admission, or for a worker",
            ["queue"],
        )
        self.failed_scrapes = counter(
            "splitserve_router:worker_scrapes_failed",
            "Workers that were left out of an answer of /metrics with --metrics-include-workers",
        )
        self.dropped_traces = counter(
            "splitserve_router:otlp_dropped_requests",
            "Requests with spans that were dropped, because the collector was slow or did not answer",
        )
        self.loop_lag = LoopLag(self.registry, "splitserve_router:")
        self._reasons = LabelValues()

    def observe_finish(self, trace: FinishedTrace) -> None:
        """Observe a request that has ended: its times since its arrival, with its trace id as exemplar."""
        summary, sent_ago = trace.summary, trace.trace.sent_ago
        self.duration.observe(summary.route, summary.e2e_ms / 1e3 - sent_ago, summary.trace_id)
        if summary.ttft_ms is not None:
            self._first_byte.observe(summary.route, summary.ttft_ms / 1e3 - sent_ago, summary.trace_id)
        for stage, seconds in trace.router_stages():
            self._stages.observe(stage, seconds)

    def count_rejection(self, reason: str) -> None:
        self.rejections.labels(self._reasons.bounded(reason)).inc()

    def render(self, accept: str | None = None) -> MetricsText:
        """Return the metrics in the format that the header `accept` requests."""
        return render(self.registry, accept)
