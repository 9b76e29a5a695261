"""What is sent, and when: arrivals, plans, traces."""

from __future__ import annotations

import json
import math
import statistics
import zlib
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.errors import ConfigError
from splitserve.tools.bench.options import ServeBenchOptions
from splitserve.tools.bench.workload import (
    BLOCK_TOKENS,
    WARM_UP_OUTPUT_TOKENS,
    LoadPlan,
    Trace,
    TraceRow,
    arrival_times,
)


def words(text):
    return [zlib.crc32(word.encode()) % 50_000 for word in text.split()]


def plan(trace=None, **changed):
    given = {"concurrency": 2, "input_tokens": 9, "output_tokens": 20, "num_prompts": 5}
    return LoadPlan(ServeBenchOptions(**{**given, **changed}), trace)


def gaps_of(rate, burstiness, count=20_000, seed=0):
    times = list(islice(arrival_times(rate, burstiness, seed), count))
    return [b - a for a, b in zip([0.0, *times], times, strict=False)]


@given(st.floats(0.1, 100.0), st.floats(0.2, 20.0), st.integers(0, 1000))
def test_arrivals_only_go_forward_and_equal_seeds_agree(rate, burstiness, seed):
    first, again = (list(islice(arrival_times(rate, burstiness, seed), 50)) for _ in range(2))
    assert first == again == sorted(first)
    assert first[0] >= 0


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rates_mean_and_the_spread_of_their_burstiness(burstiness):
    gaps = gaps_of(5.0, burstiness)
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    # A gamma distribution's deviation is its mean / sqrt(shape).
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_poisson_gaps_are_exponential():
    gaps = gaps_of(1.0, 1.0)
    for bound in (0.1, 0.7, 2.0):
        assert sum(g <= bound for g in gaps) / len(gaps) == pytest.approx(1 - math.exp(-bound), abs=0.015)


def test_a_plan_gives_every_system_the_same_requests():
    assert list(plan().requests(words)) == list(plan().requests(words))
    assert [(len(r.prompt.ids), r.max_tokens, r.send_at) for r in plan().requests(words)] == [(9, 20, 0.0)] * 5


def test_no_two_prompts_of_load_and_warm_up_begin_alike():
    made = [*plan(num_prompts=200).requests(words), *plan(num_prompts=50, warmup_requests=50).warm_up(words)]
    assert len({tuple(r.prompt.ids[:8]) for r in made}) == len(made)


def test_an_open_loop_draws_a_time_for_each_request():
    requests = list(plan(concurrency=None, request_rate=10.0, num_prompts=50).requests(words))
    times = [r.send_at for r in requests]
    assert times == sorted(times)
    assert times == list(islice(arrival_times(10.0, 1.0, 0), 50))


def test_a_plan_bounded_by_time_never_ends_by_itself():
    endless = plan(num_prompts=None, duration=1.0).requests(words)
    assert len(list(islice(endless, 1000))) == 1000


def test_warm_up_requests_are_as_many_as_asked_with_short_answers():
    made = plan(num_prompts=2, duration=0.5, concurrency=None, request_rate=1.0).warm_up(words)
    assert [(len(r.prompt.ids), r.max_tokens) for r in made] == [(9, WARM_UP_OUTPUT_TOKENS)] * 2


def row(timestamp, input_length, output_length, *hash_ids):
    ids = list(hash_ids)
    return {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, "hash_ids": ids}


@pytest.fixture
def trace_file(tmp_path):
    def write(*rows):
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        return path

    return write


def test_a_trace_keeps_lengths_times_and_shared_blocks(trace_file):
    path = trace_file(row(1000, 1030, 5, 7, 8, 9), row(3000, 1200, 1, 7, 8, 4))
    made = list(plan(concurrency=None, num_prompts=None, trace=Trace.read(path, speed=2.0)).requests(words))
    assert [(len(r.prompt.ids), r.max_tokens, r.send_at) for r in made] == [(1030, 5, 0.0), (1200, 1, 1.0)]
    assert made[0].prompt.ids[: 2 * BLOCK_TOKENS] == made[1].prompt.ids[: 2 * BLOCK_TOKENS]
    assert made[0].prompt.ids[2 * BLOCK_TOKENS :] != made[1].prompt.ids[2 * BLOCK_TOKENS : 1030]


@given(st.floats(0.001, 1.0), st.integers(1, 30_000), st.integers(1, 2000))
def test_a_scaled_trace_keeps_proportions_and_shares_as_much(scale, length, output):
    ids = list(range(-(-length // BLOCK_TOKENS)))
    rows = [TraceRow(0, length, output, ids), TraceRow(5, length, output, ids)]
    trace = Trace(rows, scale, 1.0)
    one, two = plan(trace=trace).requests(words)
    assert len(one.prompt.ids) == max(1, round(length * scale))
    assert one.max_tokens == max(1, round(output * scale))
    assert len(one.prompt.ids) + one.max_tokens == trace.longest
    shared = len(ids) * max(1, round(BLOCK_TOKENS * scale))
    assert one.prompt.ids[:shared] == two.prompt.ids[:shared]


def test_a_trace_is_read_in_the_order_of_its_times_and_only_as_far_as_asked(trace_file):
    path = trace_file(row(5, 1, 1), row(2, 2, 1), row(1, 3, 1))
    assert [r.input_length for r in Trace.read(path).rows] == [3, 2, 1]
    assert [r.input_length for r in Trace.read(path, 2).rows] == [2, 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 4}', "line 2.*at least 1"),
        ('{"timestamp": 1, "input_length": 3}', "line 2.*output_length"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(trace_file, line, message):
    path = trace_file(row(0, 1, 1))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=message):
        Trace.read(path)


def test_a_trace_that_is_not_there_or_empty_is_refused(tmp_path, trace_file):
    with pytest.raises(ConfigError, match="cannot be read"):
        Trace.read(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="no request"):
        Trace.read(trace_file())
