"""The report of `bench routing`, what it reads of a worker, and what it refuses."""

import asyncio
import datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from splitserve.core.errors import ConfigError
from splitserve.core.messages import SchedulerState
from splitserve.observe.worker_metrics import WorkerMetrics
from splitserve.tools.bench.options import RoutingBenchOptions
from splitserve.tools.bench.report import run_bench
from splitserve.tools.bench.routing import SINGLE, _count, bench_routing, routing_report
from support.router_world import start_worker


def row(name: str, hit_rate: float) -> dict[str, Any]:
    times = {"ttft_p50": 0.1, "ttft_p90": 0.2, "elapsed": 3.0}
    counts = {"policy": name, "requests": 10, "failed": 0}
    return {**counts, "hit_rate": hit_rate, "worker_shares": [0.25, 0.75], **times}


def test_rates_are_set_against_the_single_worker() -> None:
    report = routing_report([row(SINGLE, 0.5), row("random", 0.4)], [0.0, 0.25])
    assert [found["of_one_worker"] for found in report.figures] == [1.0, 0.8]
    text = report.markdown(datetime.date(2026, 1, 2))
    assert "| random | 10 | 0 | 0.400 | 0.80 | 25% + 75% | 0.10 | 0.20 |" in text
    assert "Others kept 0.0, 0.2 cores busy" in text
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
        return web.Response(body=metrics.render().content)

    async with start_worker(handler) as worker:
        assert await asyncio.to_thread(_count, worker.url) == (32.0, 128.0)


def test_a_pool_that_cannot_hold_a_request_is_refused_before_anything_starts(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 32000, "output_length": 320, "hash_ids": [1]}')
    with pytest.raises(ConfigError, match="--pool-tokens 1000: the longest request has 1010 tokens"):
        run_bench(RoutingBenchOptions(trace=trace, pool_tokens=1000), bench_routing)


def test_a_run_without_a_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match="--trace is missing"):
        run_bench(RoutingBenchOptions(), bench_routing)
