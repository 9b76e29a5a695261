from __future__ import annotations

import re

import msgspec
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families

from splitserve.core.messages import STEP_SECONDS, SchedulerState, StepTimeHistogram, TransferStats
from splitserve.core.timeline import Span
from splitserve.observe.worker_metrics import WorkerMetrics

# What people already chart, under our prefix.
NAMES = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "prefix_cache_host_hits",
    "prefix_host_bytes",
    "kv_transfer_latency_seconds",
    "kv_transfer_exposed_seconds",
    "kv_transfer_bytes",
    "kv_transfer_bytes_per_write",
    "kv_transfer_speed_gb_s",
    "num_prefill_bootstrap_queue_reqs",
    "num_prefill_inflight_queue_reqs",
    "num_decode_prealloc_queue_reqs",
    "num_decode_transfer_queue_reqs",
    "num_grammar_queue_reqs",
    "num_transfer_failed_reqs_total",
    "num_retracted_resumed_whole_total",
    "num_retracted_recomputed_tokens_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
)
STATE = SchedulerState(
    num_running_reqs=3,
    page_size=16,
    pages_total=100,
    pages_free=50,
    pages_cached=20,
    pages_leased=5,
    rows_total=8,
    rows_free=5,
    prefix_cache_queries=40,
    num_transfer_failed_reqs_total=2,
    num_tokens_pre_allocated=64,
)


def sample(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"splitserve:{name}", {"model_name": "m"} | labels)


def test_every_name_that_people_chart_is_there() -> None:
    metrics = WorkerMetrics("m")
    metrics.states = [STATE]
    text = metrics.render().content.decode()
    for name in NAMES:
        assert f"# HELP splitserve:{name}" in text


def test_nothing_of_the_scheduler_is_shown_before_its_first_snapshot() -> None:
    assert "num_requests_running" not in WorkerMetrics("m").render().content.decode()


def test_the_schedulers_numbers_are_those_of_the_last_snapshot() -> None:
    metrics = WorkerMetrics("m")
    metrics.states = [STATE]
    assert sample(metrics, "num_requests_running", dp_rank="0") == 3
    assert sample(metrics, "kv_cache_usage_perc", dp_rank="0") == 0.3
    assert sample(metrics, "prefix_cache_queries_total", dp_rank="0") == 40
    assert sample(metrics, "num_transfer_failed_reqs_total", dp_rank="0") == 2
    assert sample(metrics, "num_tokens_pre_allocated", dp_rank="0") == 64
    assert sample(metrics, "num_tokens_in_transfer", dp_rank="0") == 64


def test_each_rank_has_its_own_numbers() -> None:
    metrics = WorkerMetrics("m")
    metrics.states = [STATE, msgspec.structs.replace(STATE, num_running_reqs=7, prefix_cache_queries=50)]
    assert [sample(metrics, "num_requests_running", dp_rank=rank) for rank in "01"] == [3, 7]
    assert [sample(metrics, "prefix_cache_queries_total", dp_rank=rank) for rank in "01"] == [40, 50]


def test_tokens_that_come_together_share_their_gap() -> None:
    metrics = WorkerMetrics("m")
    metrics.observe_tokens(1, None)
    metrics.observe_tokens(4, 0.2)
    assert sample(metrics, "inter_token_latency_seconds_count") == 4
    assert abs((sample(metrics, "inter_token_latency_seconds_sum") or 0) - 0.2) < 1e-9
    assert sample(metrics, "generation_tokens_total") == 5


def test_the_queue_time_ends_at_the_first_scheduling() -> None:
    metrics = WorkerMetrics("m")
    metrics.observe_finish("stop", 2.0, {"received": 0.0, "waiting": 0.1, "running": 0.5, "decoding": 0.9}, None)
    assert sample(metrics, "request_queue_time_seconds_sum") == 0.5
    assert sample(metrics, "e2e_request_latency_seconds_sum") == 2.0
    assert sample(metrics, "request_finished_total", finished_reason="stop") == 1


def test_a_hand_over_shows_in_bytes_seconds_and_speed_and_what_compute_did_not_hide() -> None:
    metrics = WorkerMetrics("m")
    stats = TransferStats(
        num_bytes=3 * 10**9, num_writes=3000, num_pages_exchanged=5, seconds=1.5, exposed_seconds=0.25
    )
    metrics.observe_finish("length", 1.0, None, stats)
    assert sample(metrics, "kv_transfer_bytes_sum") == 3 * 10**9
    assert sample(metrics, "kv_transfer_bytes_per_write_sum") == 10**6
    assert sample(metrics, "kv_pages_exchanged_total") == 5
    assert sample(metrics, "kv_transfer_latency_seconds_sum") == 1.5
    assert sample(metrics, "kv_transfer_exposed_seconds_sum") == 0.25
    assert sample(metrics, "kv_transfer_speed_gb_s_sum") == 2.0


def test_two_apps_in_one_process_count_apart() -> None:
    first, second = WorkerMetrics("m"), WorkerMetrics("m")
    first.observe_first_token(0.1, 5)
    assert sample(second, "prompt_tokens_total") == 0


def test_a_stage_counts_once_per_sample_with_the_sum_of_its_spans() -> None:
    metrics = WorkerMetrics("m")
    spans = [Span("prefill_chunk", 1.0, 1.5), Span("waiting", 0.5, 1.0), Span("prefill_chunk", 2.0, 2.25)]
    metrics.observe_finish("stop", 2.0, None, None, spans)
    assert sample(metrics, "request_stage_seconds_count", stage="prefill_chunk") == 1
    assert sample(metrics, "request_stage_seconds_sum", stage="prefill_chunk") == 0.75
    assert sample(metrics, "request_stage_seconds_bucket", stage="waiting", le="0.5") == 1


def test_prefix_hits_of_the_pool_and_of_host_memory_are_apart() -> None:
    metrics = WorkerMetrics("m")
    metrics.states = [msgspec.structs.replace(STATE, prefix_cache_hits=30, prefix_cache_host_hits=10)]
    assert sample(metrics, "prefix_cache_tier_hits_total", dp_rank="0", tier="device") == 20
    assert sample(metrics, "prefix_cache_tier_hits_total", dp_rank="0", tier="host") == 10


def test_the_bucket_counts_of_steps_become_a_histogram() -> None:
    metrics = WorkerMetrics("m")
    counts = [0] * (len(STEP_SECONDS) + 1)
    counts[0], counts[-1] = 2, 1
    metrics.states = [msgspec.structs.replace(STATE, step_times={"decode": StepTimeHistogram(tuple(counts), 11.5)})]
    labels = {"dp_rank": "0", "kind": "decode"}
    assert sample(metrics, "step_seconds_bucket", le=str(STEP_SECONDS[-1]), **labels) == 2
    assert sample(metrics, "step_seconds_count", **labels) == 3
    assert sample(metrics, "step_seconds_sum", **labels) == 11.5


def test_the_age_of_each_queue_is_exported() -> None:
    metrics = WorkerMetrics("m")
    metrics.states = [msgspec.structs.replace(STATE, queue_ages={"waiting": 1.5, "grammar": 0.0})]
    assert sample(metrics, "queue_oldest_seconds", dp_rank="0", queue="waiting") == 1.5


def test_transfers_count_per_peer_and_backend_and_old_peers_are_dropped() -> None:
    metrics = WorkerMetrics("m")
    for number in range(70):
        stats = TransferStats(num_bytes=100, seconds=0.5, exposed_seconds=0.0, peer=f"10.0.0.{number}:1")
        metrics.observe_finish("length", 1.0, None, stats)
    assert sample(metrics, "kv_transfer_peer_bytes_total", peer="10.0.0.69:1", backend="tcp") == 100
    assert sample(metrics, "kv_transfer_peer_seconds_total", peer="10.0.0.69:1", backend="tcp") == 0.5
    assert sample(metrics, "kv_transfer_peer_bytes_total", peer="10.0.0.0:1", backend="tcp") is None
    assert metrics.render().content.count(b"splitserve:kv_transfer_peer_bytes_total{") == 64


def test_reasons_of_rejections_are_bounded() -> None:
    metrics = WorkerMetrics("m")
    for number in range(100):
        metrics.count_rejection(f"reason-{number}")
    assert sample(metrics, "requests_rejected_total", reason="reason-0") == 1
    assert sample(metrics, "requests_rejected_total", reason="other") == 36


def test_an_exemplar_links_a_latency_to_its_trace_in_open_metrics_only() -> None:
    metrics = WorkerMetrics("m")
    trace_id = "ab" * 16
    metrics.observe_first_token(0.02, 5, trace_id)
    metrics.observe_finish("stop", 2.0, None, None, [Span("decode", 0.0, 1.0)], trace_id)
    text = metrics.render("application/openmetrics-text; version=1.0.0")
    assert text.content_type.startswith("application/openmetrics-text; version=1.0.0")
    names = ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_stage_seconds")
    for name in names:
        assert re.search(rf'splitserve:{name}_bucket{{.*}} 1\.0 # {{trace_id="{trace_id}"}}', text.content.decode())
    families = open_metrics_families(text.content.decode())
    assert all(sample.name.startswith("splitserve:") for family in families for sample in family.samples)
    assert trace_id not in metrics.render().content.decode()


def test_prefill_time_is_of_prompts_that_are_computed_here() -> None:
    metrics = WorkerMetrics("m")
    metrics.observe_finish("stop", 2.0, {"received": 0.0, "waiting": 0.1, "running": 0.5, "decoding": 0.75}, None)
    # A decode worker gets the KV of the prompt before the request runs.
    metrics.observe_finish("stop", 2.0, {"received": 0.0, "transfer": 0.1, "decoding": 0.5, "running": 0.75}, None)
    assert sample(metrics, "request_prefill_time_seconds_sum") == 0.25
    assert sample(metrics, "request_prefill_time_seconds_count") == 1
