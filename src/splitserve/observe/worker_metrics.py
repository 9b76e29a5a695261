"""Metrics of a worker: latencies measured by its front end, queues and counters reported by its schedulers.

Latencies are observed as they happen. When Prometheus scrapes, the schedulers' numbers are read from `states`, their
last snapshots; the label `dp_rank` distinguishes them. Each app has its own registry. This module knows neither HTTP
nor how a snapshot is fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from splitserve.core.messages import SchedulerState, TransferStats

PREFIX = "splitserve:"

# Seconds.
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_BYTES = tuple(float(4**i) for i in range(5, 18))
_GB_S = (0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)

# Stages of the scheduler's timeline that begin when a request leaves the queue: the first that it entered counts.
_FIRST_SCHEDULED = ("running", "decoding")

# SchedulerState field, or a name of `_gauge`'s -> what it counts.
_GAUGES = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests that wait to be scheduled.",
    "kv_cache_usage_perc": "Share of the KV pool that requests hold; 1 is all of it.",
    "num_prefill_bootstrap_queue_reqs": "Requests of a prefill worker that wait for the decode side's pages.",
    "num_prefill_inflight_queue_reqs": "Requests of a prefill worker with a KV transfer in progress.",
    "num_decode_prealloc_queue_reqs": "Requests of a decode worker that wait for the handshake or for pages.",
    "num_decode_transfer_queue_reqs": "Requests of a decode worker with a KV transfer in progress.",
    "num_grammar_queue_reqs": "Requests that wait for their grammar to be compiled.",
    "num_retracted_reqs": "Requests that gave their pages back to others and wait to go on.",
    "retraction_host_bytes": "Host memory that holds the KV cache of retracted requests, bytes.",
    "prefix_host_bytes": "Host memory that holds prefixes which the KV pool had no room for, bytes.",
    "num_tokens_held": "Prompt and output tokens of all requests in the worker.",
    "pages_free": "Pages of the KV pool that hold nothing.",
    "pages_cached": "Pages of the KV pool that hold cached prefixes.",
    "pages_leased": "Pages of the KV pool that a peer may still write to or read from.",
    "prefill_chunk_tokens": "Limit of prompt tokens in the last step with prompts.",
    "target_step_seconds": "Target time of a step with decodes and prompts, seconds.",
    "mixed_step_seconds": "Time of the last step with decodes and prompts, seconds.",
    "mixed_step_predicted_seconds": "Predicted time of the last step with decodes and prompts, seconds.",
    "window_pages_free": "Pages of the sliding-window layers' own KV pool that no request's window is in.",
}
_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "prefix_cache_host_hits": "Of the prompt tokens found, those copied back from host memory.",
    "num_transfer_failed_reqs_total": "Requests with a failed KV transfer.",
    "num_local_prefill_reqs_total": "Requests that came to a decode worker without a prefill worker, on purpose.",
    "num_retracted_requests_total": "Times that a running request gave its pages back because the pool ran dry.",
    "num_steps_total": "Forward passes.",
    "num_computed_tokens_total": "Tokens with KV computed by forward passes.",
    "spec_decode_num_drafts_total": "Times that a request's proposed tokens were verified.",
    "spec_decode_num_draft_tokens_total": "Tokens that speculation proposed.",
    "spec_decode_num_accepted_tokens_total": "Proposed tokens that were accepted.",
    "num_finished_reqs_total": "Samples the scheduler has ended, whatever way.",
    "num_invariant_violations_total": "Conservation checks that failed; anything but 0 is a bug.",
}


@dataclass(slots=True)
class WorkerTotals:
    """Totals since the start of a worker, for readers that compute rates."""

    output_tokens: int = 0
    transfer_bytes: int = 0


class WorkerMetrics(Collector):
    """Metrics of one worker. `states`: the schedulers' last snapshots, by data parallel rank, set by their fetcher."""

    def __init__(self, model_name: str) -> None:
        self.states: Sequence[SchedulerState] = ()
        self.totals = WorkerTotals()
        self.registry = CollectorRegistry()
        self._label = model_name
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token, seconds.", _SLOW)
        self._itl = self._histogram("inter_token_latency_seconds", "Gap between two tokens, seconds.", _FAST)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token, seconds.", _SLOW)
        self._queue = self._histogram(
            "request_queue_time_seconds", "Scheduler's receipt to first scheduling, seconds.", _SLOW
        )
        self._kv_bytes = self._histogram(
            "kv_transfer_bytes", "Bytes copied by one hand-over; pages that change owner are not copied.", _BYTES
        )
        self._kv_writes = self._histogram(
            "kv_transfer_bytes_per_write", "Mean length of the pieces a hand-over went in, bytes.", _BYTES
        )
        self._kv_seconds = self._histogram(
            "kv_transfer_latency_seconds", "First write to proof of the last in a hand-over, seconds.", _FAST
        )
        self._kv_exposed = self._histogram(
            "kv_transfer_exposed_seconds", "Of a hand-over, after the prompt's last forward pass, seconds.", _FAST
        )
        self._kv_speed = self._histogram("kv_transfer_speed_gb_s", "Speed of a hand-over, 10^9 bytes a second.", _GB_S)
        self._kv_pages_exchanged = self._counter(
            "kv_pages_exchanged", "KV pages that changed owner instead of being copied."
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of samples that got a token.")
        self._output_tokens = self._counter("generation_tokens", "Output tokens.")
        self._finished = Counter(
            f"{PREFIX}request_finished",
            "Samples by the way they ended.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.registry.register(self)

    def observe_first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        self._ttft.observe(seconds)
        self._prompt_tokens.inc(num_prompt_tokens)

    def observe_tokens(self, count: int, seconds: float | None) -> None:
        """Observe `count` tokens that arrived together, `seconds` after the previous ones. None: they are the first."""
        self._output_tokens.inc(count)
        self.totals.output_tokens += count
        if seconds is not None:
            for _ in range(count):
                self._itl.observe(seconds / count)

    def observe_finish(
        self, reason: str, seconds: float, timeline: Mapping[str, float] | None, transfer: TransferStats | None
    ) -> None:
        """Observe the end of a request, `seconds` after its arrival.

        `timeline`: stage -> seconds since the scheduler received the request.
        """
        self._finished.labels(self._label, reason).inc()
        self._e2e.observe(seconds)
        scheduled = [timeline[stage] for stage in _FIRST_SCHEDULED if stage in timeline] if timeline else []
        if scheduled:
            self._queue.observe(min(scheduled))
        if transfer is not None:
            self.totals.transfer_bytes += transfer.num_bytes
            self._kv_bytes.observe(transfer.num_bytes)
            self._kv_pages_exchanged.inc(transfer.num_pages_exchanged)
            if transfer.num_writes:
                self._kv_writes.observe(transfer.num_bytes / transfer.num_writes)
            self._kv_seconds.observe(transfer.seconds)
            self._kv_exposed.observe(transfer.exposed_seconds)
            self._kv_speed.observe(gb_per_s(transfer))

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """Yield the schedulers' metrics; nothing before their first snapshots."""
        if not self.states:
            return
        labels = ["model_name", "dp_rank"]
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=labels)
            for rank, state in enumerate(self.states):
                gauge.add_metric([self._label, str(rank)], _gauge(state, name))
            yield gauge
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
            for rank, state in enumerate(self.states):
                counter.add_metric([self._label, str(rank)], getattr(state, name))
            yield counter

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(PREFIX + name, text, ["model_name"], registry=self.registry, buckets=buckets)
        return histogram.labels(self._label)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, ["model_name"], registry=self.registry).labels(self._label)


def _gauge(state: SchedulerState, name: str) -> float:
    match name:
        case "num_requests_running":
            return state.num_running_reqs
        case "num_requests_waiting":
            return state.num_waiting_reqs
        case "kv_cache_usage_perc":
            return state.kv_usage
    return float(getattr(state, name))


def gb_per_s(transfer: TransferStats) -> float:
    """Return a rate in 10^9 bytes per second."""
    return transfer.num_bytes / transfer.seconds / 1e9 if transfer.seconds > 0 else 0.0


def held(state: Mapping[str, Any]) -> str:
    """Return the `/server_info` state of a scheduler as text if it holds more than its prefix cache, else ""."""
    balanced = (
        state["num_running_reqs"] == state["num_waiting_reqs"] == state["pages_leased"] == 0
        and state["pages_free"] + state["pages_cached"] == state["pages_total"]
        and state.get("window_pages_free") == state.get("window_pages_total")
        and state["rows_free"] == state["rows_total"]
        and state["num_retracted_reqs"] == state["retraction_host_bytes"] == 0
        and state["metadata_slots_free"] == state["metadata_slots_total"]
        and state["num_invariant_violations_total"] == 0
    )
    return "" if balanced else str(dict(state))
