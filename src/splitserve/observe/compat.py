"""Our metrics under the names of vLLM and SGLang, so that dashboards for these servers show a Splitserve worker.

Most metrics are copied under another name. A prefill worker has no metrics of what clients see, because the decode
worker of the pair measures it. A sum over both workers would count each request twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from splitserve.core.config import METRICS_SYSTEMS
from splitserve.core.messages import SchedulerState
from splitserve.observe.scheduler_metrics import PREFIX

# Our metrics of what clients see -> names in vLLM and SGLang, counters without `_total`. Empty: no such metric.
_ANSWERS = {
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds", "e2e_request_latency_seconds"),
    "time_to_first_token_seconds": ("time_to_first_token_seconds", "time_to_first_token_seconds"),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "inter_token_latency_seconds"),
    "prompt_tokens": ("prompt_tokens", "prompt_tokens"),
    "generation_tokens": ("generation_tokens", "generation_tokens"),
    "request_finished": ("request_success", "num_requests"),
    "request_prompt_tokens": ("request_prompt_tokens", "prompt_tokens_histogram"),
    "request_generation_tokens": ("request_generation_tokens", "generation_tokens_histogram"),
    "request_max_num_generation_tokens": ("request_max_num_generation_tokens", ""),
    "request_decode_time_seconds": ("request_decode_time_seconds", ""),
}
# Metrics of all workers, in the same format.
_WORKERS = {
    "request_queue_time_seconds": ("request_queue_time_seconds", "queue_time_seconds"),
    "request_prefill_time_seconds": ("request_prefill_time_seconds", ""),
    "num_requests_running": ("num_requests_running", "num_running_reqs"),
    "num_requests_waiting": ("num_requests_waiting", "num_queue_reqs"),
    "kv_cache_usage_perc": ("kv_cache_usage_perc", "token_usage"),
    "prefix_cache_queries": ("prefix_cache_queries", ""),
    "prefix_cache_hits": ("prefix_cache_hits", "cached_tokens"),
    "num_retracted_requests": ("num_preemptions", ""),
    "num_retracted_reqs": ("", "num_retracted_reqs"),
    "num_grammar_queue_reqs": ("", "num_grammar_queue_reqs"),
    "num_prefill_bootstrap_queue_reqs": ("", "num_prefill_prealloc_queue_reqs"),
    "num_prefill_inflight_queue_reqs": ("", "num_prefill_inflight_queue_reqs"),
    "num_decode_prealloc_queue_reqs": ("", "num_decode_prealloc_queue_reqs"),
    "num_decode_transfer_queue_reqs": ("", "num_decode_transfer_queue_reqs"),
    "spec_decode_num_drafts": ("spec_decode_num_drafts", ""),
    "spec_decode_num_draft_tokens": ("spec_decode_num_draft_tokens", ""),
    "spec_decode_num_accepted_tokens": ("spec_decode_num_accepted_tokens", ""),
}


def compat_families(
    systems: Sequence[str],
    families: Mapping[str, Metric],
    states: Sequence[SchedulerState],
    model_name: str,
    *,
    is_prefill: bool,
) -> Iterable[Metric]:
    """Yield the metrics of a worker under the names of `systems`. `families`: our metrics, by name."""
    names = _WORKERS if is_prefill else {**_ANSWERS, **_WORKERS}
    for system in systems:
        for ours, theirs in names.items():
            family, name = families.get(PREFIX + ours), theirs[METRICS_SYSTEMS.index(system)]
            if family is not None and name:
                yield _renamed(family, f"{system}:{name}")
        if system == "sglang":
            yield from _sglang_gauges(states, model_name)


def _renamed(family: Metric, name: str) -> Metric:
    copy = Metric(name, family.documentation, family.type)
    copy.samples = [
        Sample(name + s.name.removeprefix(family.name), s.labels, s.value, s.timestamp, s.exemplar)
        for s in family.samples
    ]
    return copy


def _sglang_gauges(states: Sequence[SchedulerState], model_name: str) -> Iterable[Metric]:
    """Yield gauges of SGLang that are computed from several of our values."""
    gauges = {
        "gen_throughput": "Output tokens per second in the last second in which tokens were generated.",
        "cache_hit_rate": "Share of the prompt tokens since startup that the prefix cache had.",
        "num_used_tokens": "Tokens in the part of the KV pool that requests hold.",
    }
    for name, text in gauges.items():
        gauge = GaugeMetricFamily(f"sglang:{name}", text, labels=("model_name", "dp_rank"))
        for rank, state in enumerate(states):
            gauge.add_metric((model_name, str(rank)), _sglang_value(state, name))
        yield gauge


def _sglang_value(state: SchedulerState, name: str) -> float:
    match name:
        case "gen_throughput":
            return state.last_gen_throughput
        case "cache_hit_rate":
            return state.prefix_cache_hits / max(state.prefix_cache_queries, 1)
    return state.kv_usage * state.pages_total * state.page_size
