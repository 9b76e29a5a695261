"""The line of a scheduler's load: every 10 s, in the form of its role, and only if there was something to do."""

from __future__ import annotations

import logging

import pytest

from splitserve.core.messages import GenerateRequest, SchedulerState
from splitserve.core.request import DisaggregationMode
from splitserve.core.sampling import ResolvedSampling
from splitserve.scheduler.activity_log import INTERVAL, ActivityLog, Totals, text_of, values_of
from support.sim import ColocatedWorld

NULL, PREFILL, DECODE = DisaggregationMode.NULL, DisaggregationMode.PREFILL, DisaggregationMode.DECODE


def state(**more: int) -> SchedulerState:
    sizes = {"page_size": 16, "pages_total": 100, "pages_free": 30, "pages_cached": 9, "rows_total": 8, "rows_free": 8}
    return SchedulerState(**{**sizes, **more})


def line(mode: DisaggregationMode, before: Totals, after: Totals, **more: int) -> str:
    return text_of(values_of(mode, state(**more), before, after, 10.0))


def test_a_decode_line_has_the_rate_of_output_tokens_and_its_queues():
    queues = {"num_running_reqs": 12, "num_waiting_reqs": 5, "num_decode_transfer_queue_reqs": 2}
    after = Totals(num_steps=9, num_output_tokens=5120)
    text = line(DECODE, Totals(num_output_tokens=1000), after, **queues)
    assert text == "running 12, queue 3, retracted 0, 412 tok/s, KV 61 %, transfer queue 2"


def test_a_prefill_line_has_the_tokens_of_the_interval_and_its_queues():
    queues = {"num_running_reqs": 2, "num_waiting_reqs": 4, "num_prefill_bootstrap_queue_reqs": 3}
    after = Totals(num_computed_tokens=9192, num_cached_tokens=600)
    text = line(PREFILL, Totals(num_computed_tokens=1000, num_cached_tokens=88), after, **queues)
    assert text == (
        "new tokens 8192, cached tokens 512, running 2, queue 1, bootstrap queue 3, inflight queue 0, 819 tok/s"
    )


def test_a_colocated_line_has_both():
    after = Totals(num_computed_tokens=120, num_cached_tokens=16, num_output_tokens=980)
    assert line(NULL, Totals(), after) == (
        "new tokens 120, cached tokens 16, running 0, queue 0, retracted 0, 98 tok/s, KV 61 %"
    )


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "splitserve.scheduler.activity_log"]


def test_a_line_is_written_once_per_interval_and_not_while_idle(caplog):
    caplog.set_level(logging.INFO)
    log = ActivityLog(100.0)
    reads = []

    def read_state(running: int, tokens: int):
        reads.append(tokens)
        return state(num_running_reqs=running), tokens

    log.poll(100.0 + INTERVAL - 0.1, DECODE, lambda: read_state(0, 7))
    assert reads == []
    log.poll(110.0, DECODE, lambda: read_state(0, 20))
    log.poll(111.0, DECODE, lambda: read_state(0, 30))
    # Nothing happened since.
    log.poll(120.0, DECODE, lambda: read_state(0, 20))
    # Nothing is computed, but a request is there.
    log.poll(130.0, DECODE, lambda: read_state(1, 20))
    assert lines_of(caplog) == [
        "decode batch: running 0, queue 0, retracted 0, 2 tok/s, KV 61 %, transfer queue 0",
        "decode batch: running 1, queue 0, retracted 0, 0 tok/s, KV 61 %, transfer queue 0",
    ]


def test_the_values_are_part_of_the_record(caplog):
    caplog.set_level(logging.INFO)
    ActivityLog(0.0).poll(10.0, PREFILL, lambda: (state(num_running_reqs=1), 0))
    assert caplog.records[-1].values["inflight_queue"] == 0


def test_a_scheduler_writes_its_line(caplog):
    caplog.set_level(logging.INFO)
    world = ColocatedWorld()
    params = ResolvedSampling(max_new_tokens=20, temperature=0.0)
    world.submit(GenerateRequest(rid="a", prompt_ids=list(range(40)), params=params))
    world.run_until_idle()
    world.clock.advance(10.0)
    world.turn()
    world.clock.advance(10.0)
    world.turn()
    (text,) = lines_of(caplog)
    assert text.startswith("colocated batch: new tokens 59, cached tokens 0, running 0, queue 0, retracted 0, 2 tok/s")
