from __future__ import annotations

import msgspec

from splitserve.core.messages import SchedulerState, TransferStats
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
)


def sample(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"splitserve:{name}", {"model_name": "m"} | labels)


def test_every_name_that_people_chart_is_there() -> None:
    metrics = WorkerMetrics("m")
    metrics.states = [STATE]
    text = metrics.render().decode()
    for name in NAMES:
        assert f"# HELP splitserve:{name}" in text


def test_nothing_of_the_scheduler_is_shown_before_its_first_snapshot() -> None:
    assert "num_requests_running" not in WorkerMetrics("m").render().decode()


def test_the_schedulers_numbers_are_those_of_the_last_snapshot() -> None:
    metrics = WorkerMetrics("m")
    metrics.states = [STATE]
    assert sample(metrics, "num_requests_running", dp_rank="0") == 3
    assert sample(metrics, "kv_cache_usage_perc", dp_rank="0") == 0.3
    assert sample(metrics, "prefix_cache_queries_total", dp_rank="0") == 40
    assert sample(metrics, "num_transfer_failed_reqs_total", dp_rank="0") == 2


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
