"""Route GET /metrics of the router: its own metrics, and with --metrics-include-workers those of the workers."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request, Response

from splitserve.api.openapi import TEXT, operation
from splitserve.api.responses import Headers
from splitserve.core.request import DisaggregationMode
from splitserve.observe.exposition import MetricsText, merged
from splitserve.router.balancer import MiniLoadBalancer
from splitserve.router.upstream import UpstreamError
from splitserve.router.worker import Worker

# Seconds in which a worker must return its metrics. Prometheus waits for 10 s by default.
_SCRAPE_SECONDS = 5.0


def add_metrics_route(app: FastAPI, balancer: MiniLoadBalancer) -> None:
    """Add GET /metrics."""

    @app.get("/metrics", **operation("Return metrics (Prometheus)", answer=TEXT, media_type="text/plain"))
    async def metrics(request: Request) -> Response:
        _count_workers(balancer)
        accept = request.headers.get("accept", "")
        workers = await _scrape(balancer, {"accept": accept}) if balancer.args.metrics_include_workers else {}
        text = balancer.metrics.render(accept)
        if workers:
            text = await asyncio.to_thread(merged, text, _of_type(workers, text.content_type))
        return Response(text.content, headers={"content-type": text.content_type})


def _count_workers(balancer: MiniLoadBalancer) -> None:
    metrics, registry = balancer.metrics, balancer.registry
    for mode in DisaggregationMode:
        for healthy in (True, False):
            count = sum(w.healthy is healthy for w in registry.pool(mode))
            metrics.workers.labels(mode.value, str(healthy).lower()).set(count)
        num_ready = sum(w.unready_reason is None for w in registry.pool(mode))
        metrics.ready_workers.labels(mode.value).set(num_ready)


async def _scrape(balancer: MiniLoadBalancer, headers: Headers) -> dict[str, MetricsText]:
    """Return the metrics of the workers that answer, by URL. Count the others as failed scrapes."""

    async def scrape(worker: Worker) -> tuple[str, MetricsText | None]:
        try:
            status, content, found = await balancer.upstream.ask(
                worker, "GET", "/metrics", seconds=_SCRAPE_SECONDS, headers=headers
            )
        except UpstreamError:
            status, content, found = 0, b"", {}
        if status != 200:
            balancer.metrics.failed_scrapes.inc()
            return worker.url, None
        return worker.url, MetricsText(content, found.get("content-type", ""))

    answers = await asyncio.gather(*(scrape(worker) for worker in balancer.registry.all()))
    return {url: text for url, text in answers if text is not None}


def _of_type(workers: dict[str, MetricsText], content_type: str) -> dict[str, bytes]:
    """Return the texts that have the router's format. A worker of another release may use another one."""
    media_type = content_type.partition(";")[0]
    return {url: text.content for url, text in workers.items() if text.content_type.startswith(media_type)}
