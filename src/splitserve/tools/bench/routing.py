"""`splitserve bench routing`: prefix cache hits of each routing policy over several prefill workers.

Each policy sends the same trace to the same prefill workers. The reference is a single prefill worker with a pool as
large as theirs together: no policy can have more hits. docs/benchmarks.md defines the figures.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from splitserve.core.errors import ClusterError, OptionError
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.engine.sources import resolve_model
from splitserve.observe.scheduler_metrics import PREFIX
from splitserve.process.child import POLL_INTERVAL
from splitserve.tools.bench.load import Endpoint, run_load
from splitserve.tools.bench.options import RoutingBenchOptions
from splitserve.tools.bench.report import Cells, OthersWatch, Report, ReportTable
from splitserve.tools.bench.stats import percentile
from splitserve.tools.bench.systems import READY_TIMEOUT, encoder_of
from splitserve.tools.bench.workload import BLOCK_TOKENS, LoadRequest, PromptMaker, Trace
from splitserve.tools.client import call, sum_samples

SINGLE = "one worker"
_EVENTS = '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}'
_HITS, _QUERIES = PREFIX + "prefix_cache_hits_total", PREFIX + "prefix_cache_queries_total"


# JSON object of one routing policy, or of the single worker. Times in seconds, rates and shares from 0 to 1.
PolicyRow = dict[str, Any]


def routing_report(rows: Sequence[PolicyRow], cores_taken: Sequence[float]) -> Report:
    """Return the report. `rows`: the single worker first. `cores_taken`: average by other processes, for each row."""
    single = rows[0]["hit_rate"]
    figures = [row | {"of_one_worker": row["hit_rate"] / single if single else math.nan} for row in rows]
    return Report(
        title="Prefix caches by policy",
        figures=figures,
        has_others=True,
        tables=[ReportTable.by_row(_COLUMNS, figures)],
        setting=f"Others kept {', '.join(f'{cores:.1f}' for cores in cores_taken)} cores busy meanwhile",
        failed=any(row["failed"] for row in rows),
    )


_COLUMNS: Cells[PolicyRow] = (
    ("policy", "{policy}"),
    ("requests", "{requests}"),
    ("failed", "{failed}"),
    ("hit rate", "{hit_rate:.3f}"),
    ("of one worker's", "{of_one_worker:.2f}"),
    ("tokens, by worker", lambda row: " + ".join(f"{share:.0%}" for share in row["worker_shares"])),
    ("TTFT p50, s", "{ttft_p50:.2f}"),
    ("TTFT p90, s", "{ttft_p90:.2f}"),
)


def bench_routing(options: RoutingBenchOptions, console: Console) -> Report:
    """Measure all policies and return the report, which has failed if requests failed.

    Raises ConfigError, ClusterError.
    """
    if options.trace is None:
        raise OptionError("--trace", "is missing: give a trace in Mooncake's JSON Lines")
    trace = Trace.read(options.trace, options.num_prompts, options.trace_length_scale, options.trace_speed)
    if trace.longest > options.pool_tokens:
        raise OptionError(
            "--pool-tokens",
            f"{options.pool_tokens}: the longest request has {trace.longest} tokens: "
            "give more, or a smaller --trace-length-scale",
        )
    block = round(BLOCK_TOKENS * trace.length_scale)
    if block % options.page_size:
        console.print(f"a block of the trace is {block} tokens, which is no whole number of pages", highlight=False)
    requests = list(trace.requests(PromptMaker(encoder_of(resolve_model(options.model)))))
    rows, cores_taken = [], []
    policies = options.policy or ("cache_aware", "random")
    for name, num_workers in ((SINGLE, 1), *((policy, options.prefill) for policy in policies)):
        others = OthersWatch()
        rows.append(_measure(name, num_workers, options, requests, console))
        cores_taken.append(others.cores_taken())
    return routing_report(rows, cores_taken)


def _measure(
    name: str, num_workers: int, options: RoutingBenchOptions, requests: Sequence[LoadRequest], console: Console
) -> PolicyRow:
    pool_tokens = options.pool_tokens * options.prefill // num_workers
    with LocalCluster(
        LocalDeployment(
            model=options.model,
            prefill=num_workers,
            decode=1,
            dtype=options.dtype,
            threads=1,
            worker_args=["--page-size", str(options.page_size), "--max-total-tokens", str(pool_tokens)],
            pair_args=["--kv-events-config", _EVENTS],
            router_args=["--prefill-policy", "round_robin" if name == SINGLE else name, "--health-interval", "0.5"],
        )
    ) as cluster:
        cluster.wait_ready(READY_TIMEOUT, console)
        if name == "cache_aware":
            _await_events(cluster.router_url)
        endpoint = Endpoint(cluster.router_url, options.model)
        with console.status(f"{name}: {len(requests)} requests"):
            result = asyncio.run(run_load(endpoint, requests))
        counts = [_count(url) for url in cluster.urls(DisaggregationMode.PREFILL)]
    all_hits, all_queries = (sum(column) for column in zip(*counts, strict=True))
    ttfts = [record.ttft for record in result.records]
    for error, count in result.errors.most_common(3):
        console.print(f"{name}: {count} requests failed: {error}", markup=False, highlight=False)
    return {
        "policy": name,
        "requests": len(requests),
        "failed": result.num_failed,
        "hit_rate": all_hits / max(all_queries, 1.0),
        "worker_shares": [queries / max(all_queries, 1.0) for _, queries in counts],
        "ttft_p50": percentile(ttfts, 50) if ttfts else math.nan,
        "ttft_p90": percentile(ttfts, 90) if ttfts else math.nan,
        "elapsed": result.elapsed,
    }


def _await_events(router_url: str) -> None:
    """Wait until the router follows the cache of every prefill worker. Raises ClusterError."""
    deadline = time.monotonic() + READY_TIMEOUT
    while True:
        workers = call(f"{router_url}/workers")["workers"]
        if all(w["num_cached_blocks"] is not None for w in workers if w["mode"] == "prefill"):
            return
        if time.monotonic() > deadline:
            raise ClusterError("the router does not follow the KV events of all prefill workers: look at its log")
        time.sleep(POLL_INTERVAL)


def _count(worker_url: str) -> tuple[float, float]:
    """Return the prompt tokens found, and looked up, in the worker's prefix cache."""
    sums = sum_samples(worker_url)
    return sums.get(_HITS, 0.0), sums.get(_QUERIES, 0.0)
