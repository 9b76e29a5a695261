"""From records to the table: the plan's order, the forms of the report, and options that are refused at once."""

from __future__ import annotations

import datetime
import io
import itertools
import json
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from splitserve.core.errors import ConfigError
from splitserve.tools.bench import machine
from splitserve.tools.bench.machine import OthersWatch, describe_machine
from splitserve.tools.bench.report import ReportOutput
from splitserve.tools.bench.stats import StreamRecord
from splitserve.tools.bench.throughput import main_report, measure, run_main_bench
from splitserve.tools.bench.workload import MeasurementPlan

PLAN = MeasurementPlan(streams={1: 3, 2: 1}, stream_prompt_tokens=8, stream_output_tokens=4, ttft={16: 3})


class FakeSystem:
    """Takes `step` seconds a token, whatever is asked; the first token three times as long."""

    threads = "1"

    def __init__(self, name, step):
        self.name = name
        self.step = step

    def run(self, warm_up, jobs, console):
        assert warm_up
        return [[self._record(job)] * len(job.prompts) for job in jobs]

    def _record(self, job):
        times = tuple(self.step * (3 + i) for i in range(job.max_tokens))
        return StreamRecord(0.0, times, len(job.prompts[0]), len(times))


class Words:
    def encode(self, text, *, add_special_tokens):
        return [len(word) for word in text.split()]


@pytest.fixture
def systems():
    found = [FakeSystem("fast", 0.01), FakeSystem("slow", 0.2)]
    return measure(found, PLAN, Words(), Console(file=io.StringIO()))


@pytest.fixture
def report(systems):
    return main_report("splitserve bench main m", "m", "float32", PLAN, systems)


def test_each_system_is_measured_at_every_point_of_the_plan(systems):
    fast, slow = systems
    assert [f.num_streams for f in fast.streams] == [1, 2]
    assert [f.output_tokens_per_second for f in fast.streams] == pytest.approx([4 / 0.06, 8 / 0.06])
    assert [f.itl_p50 for f in slow.streams] == pytest.approx([0.2, 0.2])
    assert [(f.num_prompt_tokens, f.num_runs) for f in slow.ttft] == [(16, 3)]
    assert slow.ttft[0].ttft_median == pytest.approx(0.6)


def test_the_table_has_a_column_a_system_and_a_row_a_figure(report):
    rows = {row[0]: row[1:] for row in report.tables[0].rows}
    assert rows["1 stream: output tokens/s"] == ["66.7", "3.3"]
    assert rows["2 streams: ITL, ms"] == ["10.0 / 10.0 / 10.0", "200 / 200 / 200"]
    assert rows["16 tokens: TTFT, ms"] == ["30.0 (30.0-30.0)", "600 (600-600)"]
    out = io.StringIO()
    Console(file=out, width=120).print(report)
    assert all(name in out.getvalue() for name in rows)


def test_the_markdown_section_is_dated_and_says_how_to_repeat_it(report):
    section = report.markdown(datetime.date(2031, 2, 3))
    assert section.startswith("\n## 2031-02-03 · ")
    assert "`splitserve bench main m`" in section
    assert "3 at 1 stream(s), 1 at 2 stream(s), 3 for TTFT at 16" in section
    table = [line for line in section.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert len(table) == 2 + len(report.tables[0].rows)


def test_the_json_form_holds_everything(report):
    found = json.loads(json.dumps(report.to_json()))
    assert [s["name"] for s in found["systems"]] == ["fast", "slow"]
    assert found["systems"][0]["ttft"][0]["num_prompt_tokens"] == 16


def test_the_machine_is_named():
    found = describe_machine()
    assert "cores usable of" in found["CPU"]
    assert all(found.values())


BusyTimes = namedtuple("BusyTimes", ["user", "idle"])


def time_of(times):
    return times.user + times.system + times.children_user + times.children_system


@pytest.fixture
def ten_seconds(monkeypatch):
    """A clock that says ten seconds have passed whenever it is looked at."""
    moments = itertools.count(step=10.0)
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: next(moments)))


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


@pytest.mark.parametrize(("option", "value"), [("dtype", "auto"), ("append_to", "/proc/nothing/log.md")])
def test_wrong_options_are_refused_before_anything_is_measured(option, value):
    output = ReportOutput(as_json=False, append_to=Path(value) if option == "append_to" else None)
    dtype = value if option == "dtype" else "float32"
    with pytest.raises(ConfigError, match=option.replace("_", "-")):
        run_main_bench("splitserve bench main", "/no/such/model", dtype, PLAN, output)
