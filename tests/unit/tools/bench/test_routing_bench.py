"""The report of `bench routing`, what it reads of a worker, and what it refuses."""

import asyncio
import datetime

import pytest
from aiohttp import web

from splitserve.core.errors import ConfigError
from splitserve.core.messages import SchedulerState
from splitserve.observe.worker_metrics import WorkerMetrics
from splitserve.tools.bench.report import ReportOutput
from splitserve.tools.bench.routing import (
    SINGLE,
    PolicyFigures,
    RoutingBenchOptions,
    _count,
    routing_report,
    run_routing_bench,
)
from splitserve.tools.bench.workload import Trace, TraceRow
from support.router_world import start_worker


def figures(name: str, hit_rate: float) -> PolicyFigures:
    return PolicyFigures(name, 10, 0, hit_rate, (0.25, 0.75), 0.1, 0.2, 3.0, 0.0)


def test_rates_are_set_against_the_single_worker() -> None:
    report = routing_report("splitserve bench routing", {"CPU": "fast"}, [figures(SINGLE, 0.5), figures("random", 0.4)])
    assert [row["of_one_worker"] for row in report.figures] == [1.0, 0.8]
    text = report.markdown(datetime.date(2026, 1, 2))
    assert "| random | 10 | 0 | 0.400 | 0.80 | 25% + 75% | 0.10 | 0.20 |" in text
    assert len(report.tables[0].rows) == 2


async def test_hits_and_queries_come_from_the_workers_metrics_over_all_ranks() -> None:
    metrics = WorkerMetrics("m")
    pool = {"page_size": 16, "pages_total": 8, "pages_free": 8, "pages_cached": 0, "rows_total": 2, "rows_free": 2}
    metrics.states = [
        SchedulerState(**pool, prefix_cache_hits=30, prefix_cache_queries=100),
        SchedulerState(**pool, prefix_cache_hits=2, prefix_cache_queries=28),
    ]

    async def handler(request: web.Request, _: object) -> web.Response:
        assert request.path == "/metrics"
        return web.Response(body=metrics.render())

    async with start_worker(handler) as worker:
        assert await asyncio.to_thread(_count, worker.url) == (32.0, 128.0)


def test_a_pool_that_cannot_hold_a_request_is_refused_before_anything_starts() -> None:
    options = RoutingBenchOptions(
        command="",
        model="smollm2",
        dtype="bfloat16",
        trace=Trace([TraceRow(0, 32_000, 320, [1])], 1 / 32, 1.0),
        policies=("random",),
        num_workers=2,
        pool_tokens=1000,
        page_size=16,
        output=ReportOutput(as_json=False),
    )
    with pytest.raises(ConfigError, match="longest request has 1010 tokens"):
        run_routing_bench(options)
