"""Names of vLLM and SGLang: what their published dashboards query, and who counts a request."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from splitserve.core.config import DisaggregationConfig, metrics_systems
from splitserve.core.errors import OptionError
from splitserve.core.messages import SchedulerState
from splitserve.core.request import DisaggregationMode
from splitserve.observe.worker_metrics import WorkerMetrics

# Metrics in the queries of vLLM's examples/observability/prometheus_grafana/grafana.json.
VLLM = {
    "e2e_request_latency_seconds_bucket",
    "e2e_request_latency_seconds_sum",
    "e2e_request_latency_seconds_count",
    "prompt_tokens_total",
    "generation_tokens_total",
    "inter_token_latency_seconds_bucket",
    "inter_token_latency_seconds_sum",
    "inter_token_latency_seconds_count",
    "num_requests_running",
    "num_requests_waiting",
    "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_sum",
    "time_to_first_token_seconds_count",
    "kv_cache_usage_perc",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_success_total",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_max_num_generation_tokens_sum",
}
# Metrics in the queries of SGLang's examples/monitoring/grafana/dashboards/json/sglang-dashboard.json.
SGLANG = {
    "e2e_request_latency_seconds_bucket",
    "e2e_request_latency_seconds_sum",
    "e2e_request_latency_seconds_count",
    "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_sum",
    "time_to_first_token_seconds_count",
    "num_running_reqs",
    "gen_throughput",
    "cache_hit_rate",
    "num_queue_reqs",
}
STATE = SchedulerState(
    num_running_reqs=3,
    num_waiting_reqs=2,
    page_size=16,
    pages_total=100,
    pages_free=50,
    pages_cached=20,
    rows_total=8,
    rows_free=5,
    prefix_cache_queries=40,
    prefix_cache_hits=10,
    last_gen_throughput=123.0,
)


def values(mode: DisaggregationMode, compat: tuple[str, ...] = ("vllm", "sglang")) -> dict[str, float]:
    metrics = WorkerMetrics("m", compat)
    metrics.disaggregation = DisaggregationConfig(mode=mode)
    metrics.states = [STATE]
    metrics.observe_first_token(0.1, 5)
    metrics.observe_tokens(3, 0.3)
    metrics.observe_finish("stop", 2.0, {"received": 0.0, "running": 0.5, "decoding": 1.0}, None)
    metrics.observe_sizes(5, 3, 0.9)
    metrics.observe_request(3)
    families = text_string_to_metric_families(metrics.render().content.decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_every_metric_that_their_dashboards_query_has_a_value():
    found = values(DisaggregationMode.NULL)
    assert {f"vllm:{name}" for name in VLLM} <= found.keys()
    assert {f"sglang:{name}" for name in SGLANG} <= found.keys()
    assert found["vllm:request_success_total"] == 1
    assert found["vllm:e2e_request_latency_seconds_sum"] == found["splitserve:e2e_request_latency_seconds_sum"] == 2.0
    assert found["vllm:num_requests_waiting"] == found["sglang:num_queue_reqs"] == 2
    assert (found["sglang:gen_throughput"], found["sglang:cache_hit_rate"]) == (123.0, 0.25)
    assert found["sglang:num_used_tokens"] == 30 * 16


def test_a_prefill_worker_does_not_count_requests_a_second_time():
    found = values(DisaggregationMode.PREFILL)
    assert "vllm:request_prefill_time_seconds_sum" in found
    assert "sglang:num_running_reqs" in found
    assert (
        not {"vllm:request_success_total", "vllm:e2e_request_latency_seconds_sum", "sglang:prompt_tokens_total"}
        & found.keys()
    )


def test_other_names_are_there_on_request_only():
    assert all(name.startswith("splitserve:") for name in values(DisaggregationMode.NULL, ()))
    names = values(DisaggregationMode.NULL, ("vllm",))
    assert not any(name.startswith("sglang:") for name in names)


def test_the_option_takes_names_with_commas():
    assert metrics_systems("sglang,vllm,vllm", "--metrics-compat") == ("sglang", "vllm")
    with pytest.raises(OptionError, match="'tgi': give vllm or sglang"):
        metrics_systems("vllm,tgi", "--metrics-compat")
