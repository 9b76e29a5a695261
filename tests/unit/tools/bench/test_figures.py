"""From records to the table: the plan's order, the forms of the report, and options that are refused at once."""

from __future__ import annotations

import datetime
import io
import itertools
import json
import os
import subprocess
import sys
import zlib
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from splitserve.core.errors import ConfigError
from splitserve.tools.bench import report as reports
from splitserve.tools.bench import systems as bench_systems
from splitserve.tools.bench.load import Endpoint
from splitserve.tools.bench.main import FULL, QUICK, bench_main, main_report
from splitserve.tools.bench.options import MainBenchOptions
from splitserve.tools.bench.report import OthersWatch, describe_machine, run_bench
from splitserve.tools.bench.scenarios import PromptBatch, measure_server
from splitserve.tools.bench.stats import StreamRecord, streams_figures, ttft_figures
from splitserve.tools.bench.systems import Running, Server, our_server, running_server, target_itl_args

PLAN = [
    PromptBatch("1 stream", 1, 8, 4, 3, streams_figures),
    PromptBatch("2 streams", 2, 8, 4, 1, streams_figures),
    PromptBatch("16 tokens", 1, 16, 1, 3, ttft_figures),
]


class FakeEndpoint(Endpoint):
    """Takes `step` seconds per token, and three times as long for the first one."""

    def __init__(self, step):
        super().__init__("", "m")
        object.__setattr__(self, "step", step)
        object.__setattr__(self, "prompts", [])

    def ask(self, prompts, max_tokens, timeout, concurrency=None):
        self.prompts.extend(prompts)
        times = [self.step * (3 + i) for i in range(max_tokens)]
        return [StreamRecord(0.0, times, len(prompt.ids), len(times)) for prompt in prompts]


def words(text):
    return [zlib.crc32(word.encode()) % 50_000 for word in text.split()]


def measured(name, endpoint, plan=PLAN):
    return measure_server(running_server(name, endpoint, "1"), plan, words, 1.0, Console(file=io.StringIO()))


@pytest.fixture
def systems():
    return [measured("fast", FakeEndpoint(0.01)), measured("slow", FakeEndpoint(0.2))]


@pytest.fixture
def report(systems):
    return main_report(MainBenchOptions(model="m"), PLAN, systems)


def test_all_pages_of_our_pools_are_used_before_the_first_scenario():
    endpoint = FakeEndpoint(0.01)
    server = Server("ours", "1", lambda console: nullcontext(Running(endpoint, pool_tokens=1200)))
    measure_server(server, PLAN, words, 1.0, Console(file=io.StringIO()))
    before = endpoint.prompts[: -sum(batch.num_prompts * batch.num_runs for batch in PLAN)]
    assert sum(len(prompt.ids) for prompt in before) >= 1200
    assert len({tuple(prompt.ids[:16]) for prompt in before}) == len(before)


def test_workers_of_a_pair_get_a_target_only_if_one_is_given():
    assert [list(target_itl_args(ms)) for ms in (None, 0.0, 36.5)] == [
        [],
        ["--target-itl-ms", "0"],
        ["--target-itl-ms", "36.5"],
    ]


def test_a_server_of_ours_names_the_size_of_its_pools(monkeypatch):
    cluster = SimpleNamespace(router_url="http://router", urls=lambda role: [], children_of=lambda role: [])
    monkeypatch.setattr(bench_systems, "our_cluster", lambda *args, **how: nullcontext(cluster))
    with our_server("ours", MainBenchOptions(model="m"), 1, 4096, is_pair=False).running(Console()) as running:
        assert running.pool_tokens == 4096


def test_each_system_is_measured_at_every_point_of_the_plan(systems):
    fast, slow = ([s.outcomes[batch.name] for batch in PLAN] for s in systems)
    assert [f["num_streams"] for f in fast[:2]] == [1, 2]
    assert [f["output_tokens_per_second"] for f in fast[:2]] == pytest.approx([4 / 0.06, 8 / 0.06])
    assert [f["itl_p50"] for f in slow[:2]] == pytest.approx([0.2, 0.2])
    assert (slow[2]["num_prompt_tokens"], slow[2]["num_runs"]) == (16, 3)
    assert slow[2]["ttft_median"] == pytest.approx(0.6)


@pytest.mark.parametrize("plan", [FULL, QUICK])
def test_every_system_gets_the_same_prompts_and_no_two_share_their_first_page(plan):
    one, other = FakeEndpoint(0.01), FakeEndpoint(0.01)
    measured("one", one, plan)
    measured("other", other, plan)
    assert one.prompts == other.prompts
    assert len({tuple(prompt.ids[:16]) for prompt in one.prompts}) == len(one.prompts)


def test_the_plans_measure_what_is_promised():
    for plan in (FULL, QUICK):
        assert [b.num_prompts for b in plan] == [1, 8, 32, 1, 1]
        assert [b.input_tokens for b in plan] == [128, 128, 128, 1024, 2048]
    assert FULL[0].output_tokens == 128


def test_the_table_has_a_column_a_system_and_a_row_a_figure(report):
    rows = {row[0]: row[1:] for row in report.tables[0].rows}
    assert rows["1 stream: output tokens/s"] == ["66.7", "3.3"]
    assert rows["2 streams: ITL, ms"] == ["10.0 / 10.0 / 10.0", "200 / 200 / 200"]
    assert rows["16 tokens: TTFT, ms"] == ["30.0 (30.0-30.0)", "600 (600-600)"]
    out = io.StringIO()
    Console(file=out, width=120).print(report)
    assert all(name in out.getvalue() for name in rows)


def test_tokens_that_arrive_together_are_a_remark_but_no_failure(systems):
    late = measured("late", FakeEndpoint(1e-5))
    found = main_report(MainBenchOptions(model="m"), PLAN, [*systems, late])
    texts = [remark.partition(" of the")[0] for remark in found.remarks]
    assert (texts, found.failed) == (["late, 1 stream: 100%", "late, 2 streams: 100%"], False)


def test_the_markdown_section_is_dated_and_names_the_runs(report):
    section = report.markdown(datetime.date(2031, 2, 3))
    assert section.startswith("\n## 2031-02-03 · ")
    assert "3 at 1 stream(s), 1 at 2 stream(s), 3 for TTFT at 16" in section
    table = [line for line in section.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert len(table) == 2 + len(report.tables[0].rows)


def test_the_json_form_holds_everything(report):
    found = json.loads(json.dumps(report.to_json()))
    assert [s["name"] for s in found["systems"]] == ["fast", "slow"]
    assert found["systems"][0]["ttft"][0]["num_prompt_tokens"] == 16
    assert [f["num_streams"] for f in found["systems"][0]["streams"]] == [1, 2]
    assert not report.failed


def test_the_machine_is_named():
    found = describe_machine()
    assert "cores usable of" in found["CPU"]
    assert all(found.values())


BusyTimes = namedtuple("BusyTimes", ["user", "idle"])


def time_of(times):
    return times.user + times.system + times.children_user + times.children_system


@pytest.fixture
def ten_seconds(monkeypatch):
    """A clock that advances by ten seconds at each reading."""
    moments = itertools.count(step=10.0)
    monkeypatch.setattr(reports, "time", SimpleNamespace(monotonic=lambda: next(moments)))


def test_the_cpu_time_of_this_process_and_its_ended_children_is_not_that_of_others(monkeypatch, ten_seconds):
    # All work on this machine is ours, as far as the watch can see.
    monkeypatch.setattr(psutil, "cpu_times", lambda: BusyTimes(user=time_of(os.times()), idle=1e6))
    watch = OthersWatch()
    subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True, timeout=60)
    assert watch.cores_taken() == pytest.approx(0.0, abs=0.01)


def test_the_cpu_time_of_others_is_shown(monkeypatch, ten_seconds):
    of_others = itertools.count(step=80.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda: BusyTimes(user=next(of_others) + time_of(os.times()), idle=0.0))
    watch = OthersWatch()
    subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True, timeout=60)
    assert watch.cores_taken() == pytest.approx(8.0, abs=0.01)


@pytest.mark.parametrize(("option", "value"), [("dtype", "auto"), ("append_to", Path("/proc/nothing/log.md"))])
def test_wrong_options_are_refused_before_anything_is_measured(option, value):
    with pytest.raises(ConfigError, match=option.replace("_", "-")):
        run_bench(MainBenchOptions(**{"model": "/no/such/model", option: value}), bench_main)
