"""`splitserve bench transfer`: ratios, its report, absent backends, and one small run of two processes."""

from __future__ import annotations

import datetime
import io
import json
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from splitserve.core.errors import ConfigError
from splitserve.tools.bench import systems, transfer
from splitserve.tools.bench.limits import LIMITS, Limit
from splitserve.tools.bench.options import TransferBenchOptions
from splitserve.tools.bench.report import run_bench
from splitserve.tools.bench.second_process import VARIANTS
from splitserve.tools.bench.transfer import (
    bench_transfer,
    measure_backend,
    measure_case,
    measure_extras,
    run_of_median_ratio,
)
from splitserve.tools.bench.transfer_plan import (
    KIB,
    MIB,
    TransferCase,
    TransferPlan,
    copies_of,
    digest,
    transfer_report,
    transfer_row,
)
from splitserve.transfer.copies import num_bytes
from splitserve.transfer.transports import USER_BACKENDS, missing

KEYS = {
    "backend",
    "page_bytes",
    "total_bytes",
    "scattered",
    "gb_per_s",
    "limit_gb_per_s",
    "ratio",
    "alone_us",
    "p50_us",
    "p99_us",
    "cpu_seconds_per_gb",
    "bytes_per_write",
}


def figures(case, backend="tcp", gb_per_s=1.5, num_writes=4):
    return transfer_row(
        backend,
        case,
        gb_per_s=gb_per_s,
        limit_gb_per_s=2.0,
        alone=[2e-4],
        latencies=[1e-4, 1e-4, 3e-4],
        cpu_seconds_per_gb=0.5,
        num_writes=num_writes,
    )


def run_on(*backends, append_to=None):
    return run_bench(TransferBenchOptions(backend=backends, quick=True, append_to=append_to), bench_transfer)


def test_figures_are_set_against_the_limit():
    found = figures(TransferCase(4 * KIB, MIB, scattered=True))
    assert found["ratio"] == 0.75
    assert (found["alone_us"], found["p50_us"], found["p99_us"]) == pytest.approx((200.0, 100.0, 300.0))
    assert found["bytes_per_write"] == 256 * KIB


def test_ours_and_the_limit_are_of_one_run():
    # The machine slows down between the second run and the third.
    assert run_of_median_ratio([(9.0, 10.0), (8.0, 10.0), (4.0, 5.5), (5.1, 5.0), (4.5, 5.0)]) == (9.0, 10.0)
    assert run_of_median_ratio([(3.0, 2.0)]) == (3.0, 2.0)


def test_the_json_form_is_a_list_of_cases():
    report = transfer_report(5, [figures(TransferCase(4 * KIB, MIB, scattered=s)) for s in (True, False)])
    found = json.loads(json.dumps(report.figures))
    assert [set(entry) for entry in found] == [KEYS, KEYS]
    assert [entry["scattered"] for entry in found] == [True, False]


def test_the_log_gets_the_largest_total_of_each_backend_scattered_and_one_contiguous_case():
    cases = [TransferCase(p, t, s) for t in (MIB, 8 * MIB) for p in (4 * KIB, 64 * KIB) for s in (True, False)]
    found = [figures(c, b) for b in ("tcp", "gloo") for c in cases]
    assert [(f["backend"], f["page_bytes"] // KIB, f["scattered"]) for f in digest(found)] == [
        ("tcp", 4, True),
        ("tcp", 64, True),
        ("tcp", 4, False),
        ("gloo", 4, True),
        ("gloo", 64, True),
        ("gloo", 4, False),
    ]
    assert {f["total_bytes"] for f in digest(found)} == {8 * MIB}
    section = transfer_report(5, found).markdown(datetime.date(2031, 2, 3))
    assert section.startswith("\n## 2031-02-03 · ")
    assert "one piece by calls of 2 MiB through raw sockets for gloo" in section
    lines = [line for line in section.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 6
    assert len({line.count("|") for line in lines}) == 1


def test_every_limit_belongs_to_a_transport():
    assert set(LIMITS) <= {*USER_BACKENDS, *VARIANTS}


@pytest.mark.parametrize("backend", LIMITS)
@pytest.mark.parametrize("scattered", [True, False], ids=["scattered", "contiguous"])
def test_every_limit_takes_the_copies_of_a_case(backend, scattered):
    if problem := missing(VARIANTS.get(backend, (backend,))[0]):
        pytest.skip(problem)
    with LIMITS[backend].opened(copies_of(TransferCase(4 * KIB, MIB, scattered))) as once:
        assert once() > 0
        assert once() > 0


def test_ours_and_the_limit_write_by_turns_and_each_run_has_a_limit_of_its_own(monkeypatch):
    told, cpu_seconds = [], [0.0]
    monkeypatch.setattr(transfer.time, "process_time", lambda: cpu_seconds[0])

    def write_bare(copies):
        told.append(("limit", num_bytes(copies)))
        cpu_seconds[0] += 10.0
        return 1e-3

    class Pair:
        backend = "tcp"

        def write(self, *writes):
            told.append(sum(map(num_bytes, writes)))
            cpu_seconds[0] += 0.25
            return 2e-3

        receiver = SimpleNamespace(ask=lambda what: 0.0)

    @contextmanager
    def opened(copies):
        told.append("open")
        yield partial(write_bare, copies)
        told.append("closed")

    case = TransferCase(MIB, 64 * MIB, scattered=True)
    found = measure_case(Pair(), case, 2, opened)
    of_run = ["open", 64 * MIB, *(16 * [("limit", 64 * MIB), 64 * MIB]), "closed"]
    assert told[: 2 * len(of_run)] == 2 * of_run
    assert found["ratio"] == pytest.approx(0.5)
    assert found["cpu_seconds_per_gb"] == pytest.approx(0.25 / (64 * MIB / 1e9))


def test_a_backend_asked_for_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(systems, "missing", lambda backend: "it needs a library: pip install it")
    with pytest.raises(ConfigError, match=r"--backend nixl: .*pip install it"):
        run_on("nixl")


def test_a_backend_that_cannot_be_measured_is_refused():
    with pytest.raises(ConfigError, match="'pigeon': choose one of tcp"):
        run_on("pigeon")


def test_absent_backends_are_named_with_their_hint_and_left_out(monkeypatch, capsys):
    monkeypatch.setattr(systems, "missing", lambda backend: f"{backend} needs a library: pip install it")
    assert run_on() == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "nixl: absent: nixl needs a library: pip install it" in said


def test_a_log_that_cannot_be_written_is_refused_before_anything_is_measured():
    with pytest.raises(ConfigError, match="--append-to"):
        run_on("tcp", append_to=Path("/proc/nothing/log.md"))


def test_a_total_beyond_the_memory_is_left_out_and_said(monkeypatch):
    monkeypatch.setitem(LIMITS, "tcp", Limit("nothing", LIMITS["shm"].opened))
    out = io.StringIO()
    plan = TransferPlan((4 * KIB,), (1 << 60,), runs=1)
    assert list(measure_backend("tcp", plan, Console(file=out))) == []
    assert "tcp: 1,073,741,824 GiB in all is left out" in " ".join(out.getvalue().split())


@pytest.mark.skipif(missing("shm") is not None, reason=missing("shm") or "")
def test_a_zero_copy_transfer_has_times_but_no_figures_per_byte(monkeypatch):
    monkeypatch.setattr(transfer, "_EXCHANGES", 2)
    rows = list(measure_extras(TransferPlan((64 * KIB,), (MIB,), runs=1)))
    assert [(row["backend"], row["gb_per_s"] is None) for row in rows] == [("hand-over", True), ("checksum", False)]
    [shown, _] = transfer_report(1, rows).tables[0].rows
    assert (shown[4:7], shown[10:]) == (["-"] * 3, ["-"] * 2)
    assert rows[0]["p50_us"] > 0
    assert set(rows[0]) == KEYS


# The command with one run of one size. `--quick` moves gigabytes.
SMALL_RUN = """
from splitserve.cli import main
from splitserve.tools.bench import transfer
transfer.QUICK = transfer.TransferPlan((64 << 10,), (8 << 20,), runs=1)
main()
"""


def test_the_command_measures_tcp_between_two_processes():
    command = [sys.executable, "-c", SMALL_RUN, "bench", "transfer", "--backend", "tcp", "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {(e["backend"], e["scattered"]) for e in found} == {("tcp", True), ("tcp", False)}
    for entry in found:
        assert set(entry) == KEYS
        assert entry["ratio"] == pytest.approx(entry["gb_per_s"] / entry["limit_gb_per_s"])
        assert 0 < entry["p50_us"] <= entry["p99_us"]
        assert entry["cpu_seconds_per_gb"] > 0
        assert entry["bytes_per_write"] >= entry["page_bytes"]
