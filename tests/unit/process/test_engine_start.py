"""The head start: which command lines start an engine process early."""

from __future__ import annotations

import subprocess
import sys

import pytest

from splitserve.process import engine_start, forks, template


class Process:
    """Stand-in of a started process."""


def test_every_command_imports_it_without_the_configuration():
    code = "import sys, splitserve.process.engine_start; sys.exit('splitserve.core.config' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.fixture
def started(monkeypatch):
    """Return the commands that were started. `up` starts a template."""
    found = []
    monkeypatch.setattr(engine_start, "spawn", lambda command: found.append(command[-1]) or Process())
    monkeypatch.setattr(template, "start_early_template", lambda: found.append("template"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "set")
    yield found
    forks.take_early()


def test_serve_starts_its_scheduler_once(started):
    engine_start.give_head_start(["serve", "smollm2", "--port", "0"])
    assert started == ["splitserve.worker.scheduler_process"]
    early = forks.take_early()
    assert isinstance(early, Process)
    assert forks.take_early() is None
    # A forked front end has forked its scheduler already.
    forks.set_early(early)
    engine_start.give_head_start(["serve", "smollm2"])
    assert len(started) == 1
    assert forks.take_early() is early


@pytest.mark.skipif(not template.is_supported(), reason="needs Linux")
def test_up_starts_the_template_of_its_workers(started):
    engine_start.give_head_start(["up", "smollm2", "--prefill", "2"])
    assert started == ["template"]
    assert forks.take_early() is None


@pytest.mark.parametrize(
    "line",
    [
        *("", "--version", "router --port 0", "serve --help", "serve m --nnodes 2 --node-rank 1"),
        *("up m --print-config", "up m --device=cuda", "up --device x"),
    ],
)
def test_other_command_lines_start_nothing(started, line):
    engine_start.give_head_start(line.split())
    assert started == []
    assert forks.take_early() is None


@pytest.mark.parametrize("line", ["serve m", "up m"])
def test_without_a_process_the_command_goes_on(monkeypatch, started, line):
    def refuse(*args):
        raise OSError("no more processes")

    monkeypatch.setattr(engine_start, "spawn", refuse)
    monkeypatch.setattr(template, "start_early_template", refuse)
    engine_start.give_head_start(line.split())
    assert forks.take_early() is None
