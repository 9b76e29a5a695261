"""The template process: what is forked from it, and what happens when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from splitserve.process import template as template_module
from splitserve.process.template import (
    ForkRequest,
    TemplateProcess,
    is_supported,
    reap_orphans,
    worker_environment,
)

pytestmark = [pytest.mark.process, pytest.mark.skipif(not is_supported(), reason="needs Linux")]

MODULE = """
import os, sys
IMPORTED_BY = os.getpid()
KEEPS_LIST = any(type(finder).__module__ == "splitserve.process.import_structure" for finder in sys.meta_path)
def main():
    print(IMPORTED_BY, KEEPS_LIST, os.getsid(0) == os.getpid(), sys.argv[1:], os.environ.get("OWN"), flush=True)
    return len(sys.stdin.read())
"""
EARLY = """
import sys
def main():
    print("early", sys.stdin.readline().strip(), flush=True)
    return 5
"""
PARENT = """
import sys
from splitserve.process.forks import take_early
def main():
    early, none = take_early(), take_early()
    early.stdin.write(b"configuration\\n")
    print(early.wait(60), none, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def template(tmp_path):
    for name, text in {"forked": MODULE, "early": EARLY, "parent": PARENT}.items():
        (tmp_path / f"{name}.py").write_text(text)
    env = {"PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"]))}
    template = TemplateProcess(["forked", "early", "parent"], env)
    yield template
    template.close()


def fork(template: TemplateProcess, folder: Path, module: str = "forked", early: str = "early"):
    """Return a forked process, and its output."""
    env = {**os.environ, "OWN": "value", "PYTHONPATH": str(folder)}
    reader, writer = os.pipe()
    try:
        process = template.fork(ForkRequest(module=module, args=["--an", "option"], env=env, early=early), writer)
    finally:
        os.close(writer)
    return process, open(reader)


def kill(template: TemplateProcess) -> None:
    psutil.Process(template.pid).kill()
    template.close()


def test_a_forked_process_has_the_modules_of_the_template_and_all_else_of_its_own(template, tmp_path):
    process, output = fork(template, tmp_path)
    with output:
        assert psutil.Process(process.pid).ppid() == os.getpid()
        assert output.readline() == f"{template.pid} True True ['--an', 'option'] value\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.0)
        process.stdin.write(b"12345")
        process.stdin.close()
        assert process.wait(60) == process.poll() == process.returncode == 5
        # It has ended: a no-op.
        process.send_signal(signal.SIGTERM)


def test_words_and_variables_need_not_be_utf_8(template, tmp_path):
    name = os.fsdecode(b"caf\xe9")
    env = {**os.environ, "OWN": "value", name: name, "PYTHONPATH": str(tmp_path)}
    reader, writer = os.pipe()
    process = template.fork(ForkRequest(module="forked", args=[name], env=env, early=None), writer)
    os.close(writer)
    with open(reader) as output, process.stdin:
        assert output.readline() == f"{template.pid} True True {[name]!r} value\n"


def test_its_command_line_is_shown_and_a_signal_is_its_exit_code(template, tmp_path):
    process, output = fork(template, tmp_path)
    with output, process.stdin:
        output.readline()
        words = [word for word in psutil.Process(process.pid).cmdline() if word]
        assert words == [sys.executable, "-m", "forked", "--an", "option"]
        process.kill()
        assert process.wait() == -signal.SIGKILL


def test_it_forks_a_process_before_its_main(template, tmp_path):
    process, output = fork(template, tmp_path, "parent")
    with output:
        process.stdin.close()
        assert process.wait(60) == 0
        assert output.read().splitlines() == ["early configuration", "5 None"]


def test_without_the_template_running_processes_go_on_and_no_more_are_forked(template, tmp_path):
    process, output = fork(template, tmp_path)
    with output:
        psutil.Process(template.pid).kill()
        no_process, no_output = fork(template, tmp_path)
        no_output.close()
        assert no_process is None
        assert process.poll() is None
        process.stdin.write(b"123")
        process.stdin.close()
        assert process.wait(60) == 3


def test_a_module_that_cannot_be_imported_ends_the_template_and_is_logged_once(tmp_path, caplog):
    template = TemplateProcess(["no_such_module"], {})
    with caplog.at_level("WARNING"):
        for _ in range(2):
            process, output = fork(template, tmp_path)
            output.close()
            assert process is None
    template.close()
    (record,) = caplog.records
    assert "exit_code=1" in record.getMessage()
    assert "ModuleNotFoundError" in record.getMessage()


BLOCKS = """
import os, threading
open(os.environ["MARK"], "w").close()
threading.Event().wait()
"""


def test_it_ends_with_its_owner_also_while_it_imports(tmp_path):
    (tmp_path / "blocks.py").write_text(BLOCKS)
    mark = tmp_path / "mark"
    os.mkfifo(mark)
    path = os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"]))
    template = TemplateProcess(["blocks"], {"PYTHONPATH": path, "MARK": str(mark)})
    # Opening returns when the module opens it.
    mark.open().close()
    process = psutil.Process(template.pid)
    template._socket.close()
    assert process.wait(60) == 0
    template.close()


@pytest.fixture
def early(monkeypatch):
    monkeypatch.setattr(template_module, "WORKER_MODULES", ["json"])
    template_module.start_early_template()
    yield psutil.Process(template_module._early.pid)
    template_module.end_early_template()


def test_an_early_template_is_used_once(early):
    found = template_module.take_early_template(worker_environment({"OMP_NUM_THREADS": "7"}))
    assert found is not None
    assert found.pid == early.pid
    assert template_module.take_early_template(worker_environment({})) is None
    template_module.end_early_template()
    assert early.is_running()
    found.close()


def test_an_early_template_with_another_environment_ends(early):
    assert template_module.take_early_template(worker_environment({"OWN": "value"})) is None
    assert not early.is_running()


def test_an_early_template_that_is_not_needed_ends(early):
    template_module.end_early_template()
    template_module.end_early_template()
    assert not early.is_running()


def test_settings_of_openmp_are_those_of_the_pool_then_of_the_user_then_ours(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert worker_environment({})["GOMP_SPINCOUNT"] == "1000"
    assert worker_environment({"GOMP_SPINCOUNT": "7"})["GOMP_SPINCOUNT"] == "7"
    monkeypatch.setenv("GOMP_SPINCOUNT", "8")
    assert "GOMP_SPINCOUNT" not in worker_environment({"OMP_NUM_THREADS": "4"})


def test_without_a_process_there_are_no_orphans_to_adopt(monkeypatch):
    def refuse(*args, **options):
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(template_module, "_adopt_orphans", pytest.fail)
    with pytest.raises(OSError, match="no more"):
        TemplateProcess(["json"], {})


def test_orphans_are_reaped_and_other_children_left(template, tmp_path):
    process, output = fork(template, tmp_path)
    with output, process.stdin:
        output.readline()
        (orphan,) = psutil.Process(process.pid).children()
        process.kill()
        assert process.wait() == -signal.SIGKILL
        # It ends with its parent, which held its input.
        os.waitid(os.P_PID, orphan.pid, os.WEXITED | os.WNOWAIT)
    reap_orphans({template.pid, orphan.pid})
    assert psutil.pid_exists(orphan.pid)
    reap_orphans({template.pid})
    assert not psutil.pid_exists(orphan.pid)
