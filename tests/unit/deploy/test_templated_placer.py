"""Workers of this machine that fork from a template: which do, and which start by themselves."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import cast

import psutil
import pytest

from splitserve.deploy.placer import LocalPlacer, Observation, Phase, ProcessSpec
from splitserve.process.child import POLL_INTERVAL, ChildProcess
from splitserve.process.template import (
    ForkRequest,
    TemplateProcess,
    end_early_template,
    is_supported,
    start_early_template,
)

pytestmark = [pytest.mark.process, pytest.mark.skipif(not is_supported(), reason="needs Linux")]

# Ends with an error as soon as its options are parsed.
SPEC = ProcessSpec(name="decode-0", args=("serve", "--nonsense"), env={"OMP_NUM_THREADS": "1"}, is_cpu_worker=True)


@pytest.fixture
def opened():
    """Close these placers, and an early template, at the end of the test."""
    placers = []

    def add(placer: LocalPlacer) -> LocalPlacer:
        placers.append(placer)
        return placer

    yield add
    for placer in placers:
        placer.close()
    end_early_template()


@pytest.fixture
def placer(opened):
    return opened(LocalPlacer(has_template=True))


def ended(placer: LocalPlacer, name: str) -> Observation:
    deadline = time.monotonic() + 120.0
    while (found := placer.observe()[name]).phase is not Phase.ENDED:
        assert time.monotonic() < deadline
        time.sleep(POLL_INTERVAL)
    return found


def command_line(process: psutil.Process) -> list[str]:
    """Return its words, none of an ended process. A process that is being started has none for a moment: wait."""
    deadline = time.monotonic() + 120.0
    try:
        while not (words := process.cmdline()):
            assert time.monotonic() < deadline
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []
    return words


@pytest.fixture
def template():
    """Return the template that was started here, or None."""
    # Tests of real processes may have left theirs in this process.
    others = set(psutil.Process().children())

    def find() -> psutil.Process | None:
        children = set(psutil.Process().children()) - others
        return next((child for child in children if "splitserve.process.template" in command_line(child)), None)

    return find


def test_the_template_has_one_thread_and_workers_end_as_without_it(placer, template):
    placer.start(SPEC)
    found = ended(placer, "decode-0")
    assert (found.detail, found.exit_code) == ("exited with code 2", 2)
    assert "--nonsense: no such option" in found.log_tail
    process = template()
    assert process.num_threads() == 1
    # torch loads no library of a GPU on import.
    assert not any("libcuda.so" in region.path for region in process.memory_maps())
    # A restart needs it no more.
    process.kill()
    placer.remove("decode-0")
    placer.start(SPEC)
    assert ended(placer, "decode-0").exit_code == 2


class _Recorder:
    """Template that forks nothing, and keeps the model of each request."""

    def __init__(self) -> None:
        self.models: list[str | None] = []

    def fork(self, request: ForkRequest, output: int) -> None:
        self.models.append(request.model)


def test_a_fork_names_the_model_of_its_worker(tmp_path):
    recorder = _Recorder()
    program = (sys.executable, "-c", "pass")
    for args in (("serve", "a-model", "--port", "0"), ("serve",), ("router",)):
        ChildProcess("worker", args, tmp_path, program=program, template=cast(TemplateProcess, recorder)).close()
    assert recorder.models == ["a-model", None, None]


def test_a_start_that_fails_is_removed_whatever_its_error(placer, monkeypatch):
    def fail(*args: object, **options: object) -> None:
        raise ValueError("embedded null byte")

    monkeypatch.setattr("splitserve.deploy.placer.NodeProcess", fail)
    placer.start(dataclasses.replace(SPEC, name="decode-0"))
    assert ended(placer, "decode-0").detail == "could not be started: embedded null byte"
    placer.terminate("decode-0")
    placer.remove("decode-0")
    assert placer.observe() == {}


def test_the_first_worker_takes_the_early_template_and_others_may_have_more_threads(template, opened):
    start_early_template()
    placer = opened(LocalPlacer(has_template=True))
    early = template()
    placer.start(SPEC)
    placer.start(dataclasses.replace(SPEC, name="decode-1", env={"OMP_NUM_THREADS": "2"}))
    assert early is not None
    assert template() == early
    assert ended(placer, "decode-0").exit_code == ended(placer, "decode-1").exit_code == 2
    placer.close()
    assert not early.is_running()


@pytest.mark.parametrize("has_template", [False, True])
def test_an_early_template_ends_without_a_worker_that_needs_it(template, opened, has_template):
    start_early_template()
    early = template()
    assert early is not None
    placer = opened(LocalPlacer(has_template=has_template))
    assert early.is_running() == has_template
    # The router does not show what the workers are like.
    placer.start(dataclasses.replace(SPEC, name="router-0", args=("--version",), is_cpu_worker=False, is_near=True))
    assert early.is_running() == has_template
    placer.start(dataclasses.replace(SPEC, name="on-a-gpu", args=("--version",), is_cpu_worker=False))
    assert not early.is_running()
    placer.close()


def test_workers_of_another_environment_or_device_start_by_themselves(placer, template):
    placer.start(dataclasses.replace(SPEC, name="router-0", is_cpu_worker=False))
    assert ended(placer, "router-0").exit_code == 2
    assert template() is None
    placer.start(SPEC)
    # It runs until it is removed, so it has a command line on a slow machine, too.
    args, env = ("router", "--port", "0"), {"OWN": "value"}
    placer.start(dataclasses.replace(SPEC, name="decode-1", args=args, env=env))
    (other,) = [child for child in placer.children if child.name == "decode-1"]
    assert "splitserve" in command_line(psutil.Process(other.pid))
    # The end does not wait for the imports of the template.
    placer.remove("decode-0")
    assert placer.observe()["decode-1"].phase is not Phase.ENDED
    placer.remove("decode-1")
