"""`splitserve bench router` as a user types it, short, with our own router alone."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process


def test_every_answer_through_our_router_is_right_and_every_figure_is_there(tmp_path):
    log = tmp_path / "log.md"
    options = ["--no-peers", "--rounds", "1", "--seconds", "0.3", "--requests", "20", "--connections", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "splitserve", "bench", "router", *options, "--json", "--append-to", str(log)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert (report["wrong"], report["skipped"], report["connections"]) == ([], {}, 8)
    direct, ours, untraced = report["figures"]
    assert [row["name"] for row in report["figures"]] == ["direct", "splitserve", "splitserve without traces"]
    for figures in (direct, ours, untraced):
        assert min(figures["requests_per_second"], figures["chunks_per_second"], figures["latency_p50"]) > 0
    assert min(ours["cpu_per_request"], ours["cpu_per_chunk"]) > 0
    assert {"added_latency_p50", "added_latency_p99"} < ours.keys()
    assert "| splitserve |" in log.read_text()
