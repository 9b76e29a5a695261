"""The head start: which command lines begin an engine process, and who gets it."""

from __future__ import annotations

import pytest

from splitserve.process import engine_start, forks, template


class Process:
    """Stand-in of a started process."""


@pytest.fixture
def started(monkeypatch):
    """Return the commands that were started. `up` starts a template."""
    found = []
    monkeypatch.setattr(engine_start, "spawn", lambda command: found.append(command[-1]) or Process())
    monkeypatch.setattr(template, "begin", lambda: found.append("template"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "set")
    yield found
    forks.take_early()


def test_serve_begins_its_scheduler_once(started):
    engine_start.begin(["serve", "smollm2", "--port", "0"])
    assert started == ["splitserve.worker.scheduler_process"]
    early = forks.take_early()
    assert isinstance(early, Process)
    assert forks.take_early() is None
    # A forked front end has forked its scheduler already.
    forks.start_early(lambda: early)
    engine_start.begin(["serve", "smollm2"])
    assert len(started) == 1
    assert forks.take_early() is early


@pytest.mark.skipif(not template.is_supported(), reason="needs Linux")
def test_up_begins_the_template_of_its_workers(started):
    engine_start.begin(["up", "smollm2", "--prefill", "2"])
    assert started == ["template"]
    assert forks.take_early() is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--version",
        "router --port 0",
        "serve --help",
        "up m --print-config",
        "up m --device=cuda:1",
        "up --device x",
    ],
)
def test_other_command_lines_begin_nothing(started, line):
    engine_start.begin(line.split())
    assert started == []
    assert forks.take_early() is None
