"""Messages of the live view: one worker's sample, and the router's picture of all workers and requests.

A worker answers a router's `GET /v1/sample` once a second with a `WorkerSample`. The router's `GET /v1/live` sends a
`LiveUpdate` per second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from splitserve.core.messages import SchedulerState
from splitserve.observe.trace import TraceSummary
from splitserve.observe.worker_metrics import WorkerTotals

SAMPLE_PATH = "/v1/sample"
# Names of queues in a sample -> fields of SchedulerState.
_QUEUES = {
    "grammar": "num_grammar_queue_reqs",
    "bootstrap": "num_prefill_bootstrap_queue_reqs",
    "inflight": "num_prefill_inflight_queue_reqs",
    "prealloc": "num_decode_prealloc_queue_reqs",
    "transfer": "num_decode_transfer_queue_reqs",
}


class WorkerSample(msgspec.Struct, frozen=True, kw_only=True):
    """State of a worker, summed over its data parallel ranks. Totals count from its start."""

    role: str
    model: str
    # "ready", "switching", "draining" or "unready".
    status: str
    # Why it accepts no requests. Empty: it accepts them.
    reason: str = ""
    running: int = 0
    waiting: int = 0
    retracted: int = 0
    queues: dict[str, int] = {}
    # What requests wait for in the scheduler: values of WaitReason, with commas. See SchedulerState.
    waiting_reason: str = ""
    # Share of the KV pool that requests hold, in [0, 1], and size of the pool in tokens.
    kv_usage: float = 0.0
    kv_tokens_total: int = 0
    # Totals: steps, seconds in them, tokens computed in them, output tokens, prompt tokens looked up and found in the
    # prefix cache, bytes of KV transfers that have ended.
    num_steps: int = 0
    step_seconds: float = 0.0
    computed_tokens: int = 0
    output_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    transfer_bytes: int = 0


def sample_of(
    states: Sequence[SchedulerState], totals: WorkerTotals, *, role: str, model: str, status: str, reason: str
) -> WorkerSample:
    """Return the sample of a worker. `states`: last snapshots, one per data parallel rank. Empty: none arrived yet."""

    def total(read: Callable[[SchedulerState], float]) -> int:
        return int(sum(map(read, states)))

    num_pages = total(lambda s: s.pages_total)
    return WorkerSample(
        role=role,
        model=model,
        status=status,
        reason=reason,
        running=total(lambda s: s.num_running_reqs),
        waiting=total(lambda s: s.num_waiting_reqs),
        retracted=total(lambda s: s.num_retracted_reqs),
        queues={name: sum(getattr(s, field) for s in states) for name, field in _QUEUES.items()},
        waiting_reason=", ".join(sorted({s.waiting_reason for s in states} - {""})),
        kv_usage=sum(s.kv_usage * s.pages_total for s in states) / max(num_pages, 1),
        kv_tokens_total=total(lambda s: s.pages_total * s.page_size),
        num_steps=total(lambda s: s.num_steps_total),
        step_seconds=sum(s.step_seconds_total for s in states),
        computed_tokens=total(lambda s: s.num_computed_tokens_total),
        output_tokens=totals.output_tokens,
        prefix_queries=total(lambda s: s.prefix_cache_queries),
        prefix_hits=total(lambda s: s.prefix_cache_hits),
        transfer_bytes=totals.transfer_bytes,
    )


class LiveRouter(msgspec.Struct, kw_only=True):
    """Figures of the router: latencies of the last ten seconds, others of the last. None: nothing to measure."""

    # Requests on workers, and requests that wait at the router for admission or for a worker.
    running: int
    waiting: int
    # Requests of `running` that wait in the queues of workers, by the latest samples.
    queued: int = 0
    requests_per_s: float
    # Output tokens of all decode and colocated workers.
    tokens_per_s: float
    # Time from the arrival of a streamed request to its first token, milliseconds.
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    # Time between two tokens of a stream at the router, milliseconds.
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    # Longest delay of a timer in the event loop, milliseconds.
    loop_lag_ms: float


class LiveWorker(msgspec.Struct, kw_only=True):
    """State of one worker. Rates cover the time between its last two samples. None: unknown."""

    # Address. For clients a name replaces it.
    url: str
    name: str
    role: str
    # "ready", "draining", "switching", "unhealthy" or "gone".
    state: str
    # Why the worker gets no requests, or may fail soon. Empty: no problem.
    reason: str
    # Requests of this router in flight on the worker.
    in_flight: int
    running: int = 0
    waiting: int = 0
    retracted: int = 0
    queues: dict[str, int] = {}
    # What requests wait for in its scheduler: values of WaitReason, with commas. See SchedulerState.
    waiting_reason: str = ""
    kv_usage: float | None = None
    kv_tokens_total: int = 0
    # Mean time of a step, milliseconds.
    step_ms: float | None = None
    # Output tokens per second. For a prefill worker: computed prompt tokens.
    tokens_per_s: float | None = None
    prefix_hit_rate: float | None = None
    # Bytes of the KV transfers that ended, 10^9 per second.
    transfer_gb_s: float | None = None


class LiveLink(msgspec.Struct):
    """Pair of workers that serves requests."""

    prefill: str
    decode: str
    # Requests in flight.
    requests: int
    # KV bytes per second. The prefill worker's rate is divided among its links in proportion to their requests.
    bytes_per_s: float


class LiveEvent(msgspec.Struct):
    # Seconds since 1970.
    at: float
    # "worker_joined", "worker_removed", "worker_lost", "worker_back", "role_changed", "drain", "resume", "retry" or
    # "migration".
    kind: str
    # URL of the worker. For a retry or a migration: URL of the worker at fault.
    worker: str
    # Request that moved. Empty: the event is about a worker.
    rid: str
    # Sentence without addresses.
    text: str


class LiveUpdate(msgspec.Struct, kw_only=True):
    """One update. The first one of a subscription lists all stored requests and events, later ones list changes."""

    # Seconds since 1970.
    now: float
    version: str
    model: str
    can_operate: bool
    router: LiveRouter
    workers: list[LiveWorker]
    links: list[LiveLink]
    requests: list[TraceSummary]
    events: list[LiveEvent]
