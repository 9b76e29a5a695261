"""Metrics that a worker's schedulers report: queues, pages, counters and step times, from their last snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from splitserve.core.messages import STEP_SECONDS, SchedulerState, StepTimeHistogram

PREFIX = "splitserve:"
# Labels of every family here.
_LABELS = ("model_name", "dp_rank")

# SchedulerState field, or a name that `_gauge` computes -> its help text.
_GAUGES = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests that wait to be scheduled.",
    "kv_cache_usage_perc": "Share of the KV pool that requests hold; 1 is all of it.",
    "num_prefill_bootstrap_queue_reqs": "Requests of a prefill worker that wait for the decode worker's pages.",
    "num_prefill_inflight_queue_reqs": "Requests of a prefill worker with a KV transfer in progress.",
    "num_decode_prealloc_queue_reqs": "Requests of a decode worker that wait for the handshake or for pages.",
    "num_decode_transfer_queue_reqs": "Requests of a decode worker with a KV transfer in progress.",
    "num_tokens_pre_allocated": "Prompt tokens of the requests with a KV transfer in progress.",
    "num_tokens_in_transfer": "Another name of num_tokens_pre_allocated, for existing dashboards.",
    "num_grammar_queue_reqs": "Requests that wait for their grammar to be compiled.",
    "num_retracted_reqs": "Retracted requests that wait to resume.",
    "retraction_host_bytes": "Host memory that holds the KV cache of retracted requests, on all ranks, bytes.",
    "prefix_host_bytes": "Host memory that holds prefixes evicted from the KV pool, bytes.",
    "num_tokens_held": "Prompt and output tokens of all requests in the worker.",
    "pages_free": "Pages of the KV pool that hold nothing.",
    "pages_cached": "Pages of the KV pool that hold cached prefixes.",
    "pages_leased": "Pages of the KV pool that a peer may still write to or read from.",
    "prefill_chunk_tokens": "Limit of prompt tokens in the last step with prompts.",
    "target_step_seconds": "Target time of a step with decodes and prompts, seconds.",
    "mixed_step_seconds": "Time of the last step with decodes and prompts, seconds.",
    "mixed_step_predicted_seconds": "Predicted time of the last step with decodes and prompts, seconds.",
    "window_pages_free": "Pages of the KV pool of sliding-window layers that no request uses.",
}
_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "prefix_cache_host_hits": "Prompt tokens found in the prefix cache and copied back from host memory.",
    "num_transfer_failed_reqs_total": "Requests with a failed KV transfer.",
    "num_local_prefill_reqs_total": "Requests that the router sent to a decode worker alone.",
    "num_retracted_requests_total": "Retractions of running requests, because the KV pool was full.",
    "num_retracted_resumed_whole_total": "Retracted requests that got back all their KV: nothing was computed again.",
    "num_retracted_recomputed_tokens_total": "Tokens of retracted requests that had to be computed again.",
    "num_steps_total": "Forward passes.",
    "num_computed_tokens_total": "Tokens with KV computed by forward passes.",
    "spec_decode_num_drafts_total": "Times that a request's proposed tokens were verified.",
    "spec_decode_num_draft_tokens_total": "Tokens that speculation proposed.",
    "spec_decode_num_accepted_tokens_total": "Proposed tokens that were accepted.",
    "num_finished_reqs_total": "Samples that ended in the scheduler, for any reason.",
    "num_invariant_violations_total": "Conservation checks that failed; anything but 0 is a bug.",
}


def scheduler_families(model_name: str, states: Sequence[SchedulerState]) -> Iterable[Metric]:
    """Yield the metrics of schedulers, by data parallel rank. Yield nothing before their first snapshots."""
    if not states:
        return
    ranks = [((model_name, str(rank)), state) for rank, state in enumerate(states)]
    for name, text in _GAUGES.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=_LABELS)
        for labels, state in ranks:
            gauge.add_metric(labels, _gauge(state, name))
        yield gauge
    for name, text in _COUNTERS.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=_LABELS)
        for labels, state in ranks:
            counter.add_metric(labels, getattr(state, name))
        yield counter
    tiers = CounterMetricFamily(
        f"{PREFIX}prefix_cache_tier_hits",
        "Prompt tokens found in the prefix cache, by tier: device (KV pool) or host (host memory).",
        labels=(*_LABELS, "tier"),
    )
    ages = GaugeMetricFamily(
        f"{PREFIX}queue_oldest_seconds",
        "Seconds since the oldest request of a queue entered it; 0 if the queue is empty.",
        labels=(*_LABELS, "queue"),
    )
    steps = HistogramMetricFamily(
        f"{PREFIX}step_seconds",
        "Time of a forward pass, by kind: decode, prefill or mixed; seconds.",
        labels=(*_LABELS, "kind"),
    )
    for labels, state in ranks:
        tiers.add_metric((*labels, "device"), state.prefix_cache_hits - state.prefix_cache_host_hits)
        tiers.add_metric((*labels, "host"), state.prefix_cache_host_hits)
        for queue, seconds in state.queue_ages.items():
            ages.add_metric((*labels, queue), seconds)
        for kind, times in state.step_times.items():
            steps.add_metric((*labels, kind), _buckets(times), times.total)
    yield from (tiers, ages, steps)


def _buckets(times: StepTimeHistogram) -> list[tuple[str, float]]:
    bounds = [*map(str, STEP_SECONDS), "+Inf"]
    return list(zip(bounds, accumulate(map(float, times.counts)), strict=True))


def _gauge(state: SchedulerState, name: str) -> float:
    match name:
        case "num_requests_running":
            return state.num_running_reqs
        case "num_requests_waiting":
            return state.num_waiting_reqs
        case "kv_cache_usage_perc":
            return state.kv_usage
        case "num_tokens_in_transfer":
            return state.num_tokens_pre_allocated
    return float(getattr(state, name))


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
