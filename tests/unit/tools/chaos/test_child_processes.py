"""Chaos reports processes that it left, but not those of the program that called it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

from splitserve.tools.chaos.run import child_processes, ended_children


def start() -> subprocess.Popen[bytes]:
    """Start a process that ends when its input is closed."""
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)


def test_only_later_processes_that_run_are_left() -> None:
    with start() as first:
        earlier = child_processes()
        with start() as second:
            assert [process.pid for process in child_processes() - earlier] == [second.pid]
            assert first.pid in {process.pid for process in earlier}
        assert not child_processes() - earlier


def test_a_worker_that_ended_without_a_fault_is_named_though_others_took_its_requests() -> None:
    """The cluster has only children that run, and a fault's worker is started again under its name."""
    cluster = SimpleNamespace(children=[SimpleNamespace(name=name) for name in ("router", "decode-1", "prefill-0")])
    assert ended_children({"router", "prefill-0", "decode-0", "decode-1"}, cluster) == [
        "decode-0 ended, and no fault ended it"
    ]
