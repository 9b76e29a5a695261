"""The jobs of a benchmark: exact lengths, equal for every system, and nothing a prefix cache could use."""

from __future__ import annotations

import zlib

from splitserve.tools.bench.workload import FULL, QUICK, MeasurementPlan

PLAN = MeasurementPlan(streams={1: 2, 3: 1}, stream_prompt_tokens=20, stream_output_tokens=5, ttft={40: 2})


def words(text):
    return [zlib.crc32(word.encode()) % 50_000 for word in text.split()]


def test_jobs_come_in_the_order_of_the_plan():
    jobs = PLAN.jobs(words)
    assert [(len(j.prompts), len(j.prompts[0]), j.max_tokens) for j in jobs] == [
        (1, 20, 5),
        (1, 20, 5),
        (3, 20, 5),
        (1, 40, 1),
        (1, 40, 1),
    ]


def test_every_system_gets_the_same_prompts():
    assert PLAN.jobs(words) == PLAN.jobs(words)


def test_no_two_prompts_share_their_first_page():
    for plan in (FULL, QUICK):
        jobs = [*plan.jobs(words), *plan.warm_up(words)]
        starts = [tuple(p[:16]) for job in jobs for p in job.prompts]
        assert len(set(starts)) == len(starts)


def test_the_plans_measure_what_is_asked_of_the_first_figures():
    for plan in (FULL, QUICK):
        assert list(plan.streams) == [1, 8, 32]
        assert list(plan.ttft) == [1024, 2048]
    assert FULL.stream_prompt_tokens == FULL.stream_output_tokens == 128
