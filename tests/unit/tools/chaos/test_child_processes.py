"""Chaos reports processes that it left, but not those of the program that called it."""

from __future__ import annotations

import subprocess
import sys

from splitserve.tools.chaos.run import child_processes


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
