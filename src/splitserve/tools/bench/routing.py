"""`splitserve bench routing`: prefix cache hits of each routing policy over several prefill workers.

Each policy sends the same trace to the same prefill workers. The reference is a single prefill worker with a pool as
large as theirs together: no policy can have more hits.

hit rate   Share of all prompt tokens that a prefill worker found in its prefix cache.
TTFT       At the client of streamed completions, as in `splitserve bench serve`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from splitserve.api.tokenizer import Tokenizer
from splitserve.core.errors import ClusterError, ConfigError
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.engine.sources import resolve_model
from splitserve.observe.worker_metrics import PREFIX
from splitserve.process.child import POLL_INTERVAL
from splitserve.tools.bench.load import Endpoint, run_load
from splitserve.tools.bench.machine import OthersWatch, describe_machine
from splitserve.tools.bench.report import Cells, Report, ReportOutput, ReportTable
from splitserve.tools.bench.stats import percentile
from splitserve.tools.bench.systems import READY_TIMEOUT
from splitserve.tools.bench.workload import BLOCK_TOKENS, LoadRequest, PromptMaker, Trace
from splitserve.tools.client import call
from splitserve.tools.metrics import sum_samples

SINGLE = "one worker"
_EVENTS = '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}'
_HITS, _QUERIES = PREFIX + "prefix_cache_hits_total", PREFIX + "prefix_cache_queries_total"


@dataclass(frozen=True, slots=True)
class RoutingBenchOptions:
    # Command line that repeats this benchmark.
    command: str
    model: str
    dtype: str
    trace: Trace
    # Policies from `splitserve.router.policies`.
    policies: tuple[str, ...]
    num_workers: int
    # Tokens of each prefill worker's KV pool.
    pool_tokens: int
    page_size: int
    output: ReportOutput


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """Figures of one routing policy, or of the single worker."""

    name: str
    num_requests: int
    num_failed: int
    # Prefix hit rate, from 0 to 1.
    hit_rate: float
    # Prompt tokens of each prefill worker, as shares of all.
    shares: tuple[float, ...]
    ttft_p50: float
    ttft_p90: float
    elapsed: float
    cores_taken_by_others: float


def routing_report(command: str, machine: Mapping[str, str], figures: Sequence[PolicyFigures]) -> Report:
    """Return the report. JSON has times in seconds, and shares from 0 to 1. `figures`: the single worker first."""
    single = figures[0].hit_rate
    ratios = [f.hit_rate / single if single else float("nan") for f in figures]
    taken = ", ".join(f"{f.cores_taken_by_others:.1f}" for f in figures)
    return Report(
        title="Prefix caches by policy",
        command=command,
        machine=machine,
        figures=[
            {
                "policy": f.name,
                "requests": f.num_requests,
                "failed": f.num_failed,
                "hit_rate": f.hit_rate,
                "of_one_worker": ratio,
                "worker_shares": list(f.shares),
                "ttft_p50": f.ttft_p50,
                "ttft_p90": f.ttft_p90,
                "elapsed": f.elapsed,
            }
            for f, ratio in zip(figures, ratios, strict=True)
        ],
        tables=[ReportTable.by_row(_COLUMNS, list(zip(figures, ratios, strict=True)))],
        setting=f"Others kept {taken} cores busy meanwhile",
    )


_COLUMNS: Cells[tuple[PolicyFigures, float]] = (
    ("policy", lambda row: row[0].name),
    ("requests", lambda row: str(row[0].num_requests)),
    ("failed", lambda row: str(row[0].num_failed)),
    ("hit rate", lambda row: f"{row[0].hit_rate:.3f}"),
    ("of one worker's", lambda row: f"{row[1]:.2f}"),
    ("tokens, by worker", lambda row: " + ".join(f"{share:.0%}" for share in row[0].shares)),
    ("TTFT p50, s", lambda row: f"{row[0].ttft_p50:.2f}"),
    ("TTFT p90, s", lambda row: f"{row[0].ttft_p90:.2f}"),
)


def run_routing_bench(options: RoutingBenchOptions) -> int:
    """Run the benchmark and return the exit code: 1 if requests failed. Raises ConfigError, ClusterError."""
    console = Console(stderr=True)
    options.output.check()
    if options.trace.longest > options.pool_tokens:
        raise ConfigError(
            f"--pool-tokens {options.pool_tokens}: the longest request has {options.trace.longest} tokens: "
            "give more, or a smaller --trace-length-scale"
        )
    tokenizer = Tokenizer.load(resolve_model(options.model))
    maker = PromptMaker(lambda text: tokenizer.encode(text, add_special_tokens=False))
    block = round(BLOCK_TOKENS * options.trace.length_scale)
    if block % options.page_size:
        console.print(f"a block of the trace is {block} tokens, which is no whole number of pages", highlight=False)
    requests = list(options.trace.requests(maker))
    figures = [
        _measure(name, num_workers, options, requests, console)
        for name, num_workers in ((SINGLE, 1), *((policy, options.num_workers) for policy in options.policies))
    ]
    options.output.publish(routing_report(options.command, describe_machine(), figures), console)
    return 1 if any(f.num_failed for f in figures) else 0


def _measure(
    name: str, num_workers: int, options: RoutingBenchOptions, requests: Sequence[LoadRequest], console: Console
) -> PolicyFigures:
    others = OthersWatch()
    pool_tokens = options.pool_tokens * options.num_workers // num_workers
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
    return PolicyFigures(
        name=name,
        num_requests=len(requests),
        num_failed=result.num_failed,
        hit_rate=all_hits / max(all_queries, 1.0),
        shares=tuple(queries / max(all_queries, 1.0) for _, queries in counts),
        ttft_p50=percentile(ttfts, 50) if ttfts else float("nan"),
        ttft_p90=percentile(ttfts, 90) if ttfts else float("nan"),
        elapsed=result.elapsed,
        cores_taken_by_others=others.cores_taken(),
    )


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
