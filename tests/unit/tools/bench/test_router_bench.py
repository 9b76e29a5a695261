"""`bench router`: what counts as a right answer, what the figures are, how they are shown. No time is judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest

from splitserve.core.clock import ManualClock
from splitserve.core.errors import SplitserveError
from splitserve.tools.bench.router import RouterResults, peer_versions, router_figures
from splitserve.tools.bench.router_load import (
    MockRequest,
    MockWorkers,
    RouterLoad,
    is_right,
    request_body,
    whole_answer,
)
from splitserve.tools.bench.systems import PeerUnavailableError, Running, fill_pools, free_ports
from splitserve.tools.client import RequestFailedError


def made_up(latency_p50: float, latency_p99: float, requests_per_second: float) -> dict[str, float]:
    latencies = {"latency_p50": latency_p50, "latency_p99": latency_p99, "num_latencies": 100}
    rates = {"requests_per_second": requests_per_second, "chunks_per_second": requests_per_second * 10}
    return {**latencies, **rates, "cpu_per_request": 0.0005, "cpu_per_chunk": 0.00002}


@pytest.fixture
def results() -> RouterResults:
    direct = [made_up(0.001, 0.002, 1000.0), made_up(0.003, 0.004, 900.0), made_up(0.001, 0.002, 1100.0)]
    ours = [made_up(0.002, 0.005, 100.0), made_up(0.006, 0.007, 300.0), made_up(0.004, 0.007, 200.0)]
    return RouterResults(
        connections=32,
        num_rounds=3,
        peer_versions={"sglang-router": "1.2"},
        figures=[router_figures("direct", direct, direct), router_figures("splitserve", ours, direct)],
        skipped={"mini_lb": "not installed"},
        wrong=["splitserve: request 7: status 500"],
    )


def test_added_latency_is_taken_in_each_round_and_the_median_of_rounds_counts(results: RouterResults) -> None:
    direct, ours = results.figures
    assert (direct["added_latency_p50"], direct["cpu_per_request"]) == (None, None)
    # Of 1, 3 and 3 ms at p50, of 3, 3 and 5 ms at p99.
    assert ours["added_latency_p50"] == pytest.approx(0.003)
    assert ours["added_latency_p99"] == pytest.approx(0.003)
    assert (ours["requests_per_second"], ours["chunks_per_second"]) == (200.0, 2000.0)


def test_the_report_shows_figures_what_was_wrong_and_what_is_missing(results: RouterResults) -> None:
    report = results.report()
    assert list(report.tables[0].rows[1]) == ["splitserve", "200", "3.000", "3.000", "0.500", "2,000", "0.020"]
    assert report.remarks[:2] == ["mini_lb was not measured: not installed", "WRONG: splitserve: request 7: status 500"]
    found = json.loads(json.dumps(report.to_json()))
    assert list(found) == [
        *("command", "machine", "connections", "num_rounds", "peer_versions"),
        *("figures", "skipped", "wrong"),
    ]
    assert found["figures"][1]["name"] == "splitserve"
    assert report.failed


def test_the_report_says_that_the_p99_of_few_requests_is_their_maximum(results: RouterResults) -> None:
    few = [made_up(0.001, 0.002, 10.0), made_up(0.001, 0.002, 10.0) | {"num_latencies": 99}]
    assert "largest value" not in results.report().legend
    results.figures = [*results.figures, router_figures("few", few, few)]
    assert results.report().legend.endswith("The p99 of fewer than 100 requests is the largest value.")


def test_the_time_to_fill_pools_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, timeouts = ManualClock(), []

    class SlowEndpoint:
        def ask(self, prompts: object, num_tokens: int, *, timeout: float) -> None:
            timeouts.append(timeout)
            clock.advance(40.0)

    monkeypatch.setattr("time.monotonic", clock.now)
    with pytest.raises(RequestFailedError, match="after 100 s"):
        fill_pools(Running(SlowEndpoint(), pool_tokens=1_000_000), lambda length: (0,) * length, 100.0)  # type: ignore[arg-type]
    assert timeouts == [100.0, 60.0, 20.0]


def test_an_answer_may_be_encoded_again_but_has_the_same_values() -> None:
    answer = whole_answer(7)
    assert is_right(answer, 7, 0)
    assert is_right(json.dumps(json.loads(answer), indent=1).encode(), 7, 0)
    assert not is_right(answer, 8, 0)
    assert not is_right(answer[:-1], 7, 0)


def test_a_worker_finds_the_number_of_a_request() -> None:
    whole = msgspec.json.decode(request_body(12, 0), type=MockRequest)
    stream = msgspec.json.decode(request_body(34, 64), type=MockRequest)
    assert (whole.number, whole.stream, stream.number, stream.stream, stream.max_tokens) == (12, False, 34, True, 64)
    paired = msgspec.json.decode(request_body(5, 2)) | {"bootstrap_room": 9, "dispatch": {"journal": True}}
    asked = msgspec.json.decode(msgspec.json.encode(paired), type=MockRequest)
    assert (asked.bootstrap_room, asked.dispatch) == (9, {"journal": True})


def test_a_missing_request_and_one_with_another_room_are_found() -> None:
    mock = MockWorkers()
    for room in (5, 6):
        mock.add_room(room, is_prefill=True)
        mock.add_room(room, is_prefill=False)
    assert mock.all_pairs_match()
    mock.add_room(7, is_prefill=True)
    assert not mock.all_pairs_match(timeout=0.0)
    # The next router is not blamed.
    assert mock.all_pairs_match(timeout=0.0)
    mock.add_room(7, is_prefill=True)
    mock.add_room(8, is_prefill=False)
    assert not mock.all_pairs_match(timeout=0.0)


@pytest.mark.parametrize("num_chunks", [0, 3])
def test_every_answer_of_the_worker_itself_is_right(num_chunks: int) -> None:
    with MockWorkers() as mock:
        load = RouterLoad(mock.decode_port, 2, num_chunks, seconds=60.0, max_requests=7)
        mock.run(load)
    assert (len(load.latencies), load.num_wrong, load.wrong) == (7, 0, [])
    assert 0 < max(load.latencies) <= load.elapsed


def test_a_wrong_answer_is_recorded_and_a_missing_router_is_an_error() -> None:
    with MockWorkers() as mock:
        # The prefill worker does not generate.
        load = RouterLoad(mock.prefill_port, 1, 0, seconds=60.0, max_requests=1)
        mock.run(load)
        assert (load.num_wrong, "request 1: status 200" in load.wrong[0]) == (1, True)
        unused = RouterLoad(free_ports(1)[0], 1, 0, seconds=1.0)
        with pytest.raises(SplitserveError, match="no router accepts connections"):
            mock.run(unused)


def test_an_interpreter_without_other_routers_says_how_to_get_them(tmp_path):
    with pytest.raises(PeerUnavailableError, match="give --peers-python another"):
        peer_versions(tmp_path / "python")
    python = tmp_path / "isolated"
    # No site packages, so nothing is installed there.
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    with pytest.raises(PeerUnavailableError, match="pip install sglang-router"):
        peer_versions(Path(python))
