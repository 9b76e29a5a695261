"""`splitserve bench serve` as a user starts it: on a server that runs already, and on systems of its own."""

import asyncio
import json
import subprocess
import sys

import pytest

from support.fake_openai import FakeOpenAI

pytestmark = pytest.mark.process


def bench_serve(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "splitserve", "bench", "serve", "smollm2", "--json", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


async def on_fake(api: FakeOpenAI, *args: str) -> subprocess.CompletedProcess[str]:
    async with api.serving() as url:
        return await asyncio.to_thread(bench_serve, "--url", url, "--ttft-runs", "0", *args)


async def test_a_running_server_gets_exactly_the_load_that_was_asked_for():
    api = FakeOpenAI()
    load = ["--concurrency", "3", "--num-prompts", "7", "--input-tokens", "20", "--output-tokens", "5"]
    done = await on_fake(api, "--warmup-requests", "1", *load, "--slo", "ttft=60000")
    assert done.returncode == 0, done.stderr
    assert "one prompt at a time" not in done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["mode"], row["concurrency"], row["input_tokens"], row["output_tokens"]) == ("external", 3, 20, 5)
    assert (row["num_requests"], row["num_failed"]) == (7, 0)
    assert row["goodput"] == row["requests_per_s"] > 0
    assert len(api.bodies) == 8
    assert {(len(b["prompt"]), b["model"]) for b in api.bodies} == {(20, "fake")}
    assert api.max_running <= 3


async def test_failed_requests_are_shown_and_make_the_exit_code_1():
    done = await on_fake(FakeOpenAI(fails_every=2), "--warmup-requests", "0", "--num-prompts", "6")
    assert done.returncode == 1
    assert "3 of 6 requests failed: 3 x " in done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["num_requests"], row["num_failed"]) == (6, 3)


async def test_a_trace_is_replayed_with_its_lengths(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"timestamp": {i}, "input_length": 40, "output_length": 4}}\n' for i in range(3)))
    api = FakeOpenAI(num_together=3)
    done = await on_fake(api, "--warmup-requests", "0", "--trace", str(trace), "--trace-length-scale", "0.5")
    assert done.returncode == 0, done.stderr
    assert [(len(b["prompt"]), b["max_tokens"]) for b in api.bodies] == [(20, 2)] * 3


@pytest.mark.soak
def test_systems_of_its_own_are_set_beside_each_other_with_what_the_hand_over_took():
    load = ["--concurrency", "2", "--num-prompts", "2", "--input-tokens", "24", "--output-tokens", "3"]
    idle = ["--ttft-tokens", "48", "--ttft-runs", "2", "--trace-rounds", "1"]
    done = bench_serve("--transfer-backend", "tcp", "--threads", "1", *load, *idle)
    assert done.returncode == 0, done.stderr
    null, apart = json.loads(done.stdout)
    assert [(row["mode"], row["transfer_backend"]) for row in (null, apart)] == [
        ("null", None),
        ("disaggregated", "tcp"),
    ]
    for row in (null, apart):
        assert (row["num_requests"], row["num_failed"], row["idle_ttft"]["num_runs"]) == (2, 0, 2)
        assert row["ttft_ms_p50"] > 0
        assert row["itl_ms_mean"] > 0
        assert row["trace_cost"]["ratio"] > 0
    assert (null["transfer"], null["idle_ttft_of_null"]) == (None, 1.0)
    # 48 tokens of 30 layers, keys and values of 3 heads of 64, float32; and a metadata row.
    assert apart["transfer"]["num_bytes"] == pytest.approx(48 * 30 * 2 * 3 * 64 * 4, rel=0.01)
    assert 0 <= apart["transfer"]["exposed_seconds"] <= apart["transfer"]["seconds"]
