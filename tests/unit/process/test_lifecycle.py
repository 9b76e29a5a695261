"""Texts about the life of a serving process."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from splitserve.core.errors import ClusterError, OptionError
from splitserve.process import child as children
from splitserve.process.child import ChildProcess
from splitserve.process.lifecycle import Lifecycle, ReadyInfo, ready_path, request_hint, write_ready_file


@pytest.mark.parametrize(
    ("number", "has_served", "reason"),
    [
        (signal.SIGINT, False, "interrupted"),
        (signal.SIGTERM, False, "terminated"),
        (signal.SIGINT, True, "stopped"),
        # It ended without a signal.
        (None, False, "stopped"),
    ],
)
def test_the_last_line_has_the_reason_and_what_has_ended(
    number: signal.Signals | None, has_served: bool, reason: str
) -> None:
    lifecycle = Lifecycle()
    if number is not None:
        lifecycle.request_end(number)
    assert lifecycle.end_line("the router", has_served=has_served) == f"{reason}: the router has ended"


@pytest.mark.parametrize(("has_keys", "num_headers"), [(False, 1), (True, 2)])
def test_the_hint_is_a_chat_request_for_a_shell(has_keys: bool, num_headers: int) -> None:
    ready, call = request_hint("https://h:1", "it's a model", has_keys=has_keys)
    assert ready == "ready at https://h:1 (OpenAI API at https://h:1/v1)"
    curl, url, *headers, option, body = shlex.split(call)
    assert (curl, url, option) == ("curl", "https://h:1/v1/chat/completions", "-d")
    assert headers.count("-H") == num_headers
    assert ("Authorization: Bearer KEY" in headers) is has_keys
    assert json.loads(body)["model"] == "it's a model"


def test_a_ready_file_that_cannot_be_written_is_rejected_before_the_start(tmp_path: Path) -> None:
    assert ready_path(str(tmp_path / "ready.json"), "--ready-file") == tmp_path / "ready.json"
    for path in (tmp_path, tmp_path / "missing" / "ready.json"):
        with pytest.raises(OptionError, match=f"--ready-file {path}: give the name of a file"):
            ready_path(str(path), "--ready-file")


def test_a_ready_file_on_a_full_disk_is_an_error_that_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    path.with_name(f"ready.json.{os.getpid()}.partial").symlink_to("/dev/full")
    with pytest.raises(ClusterError, match=f"--ready-file {path} cannot be written: No space left on device"):
        write_ready_file(path, ReadyInfo(pid=1, port=1, url="http://h:1"))
    assert list(tmp_path.iterdir()) == []


def test_a_router_without_its_ready_file_ends_with_one_line(tmp_path: Path) -> None:
    # A valid name, and too long with the suffix of a partial file.
    path = tmp_path / ("r" * 250)
    command = [sys.executable, "-m", "splitserve", "router", "--port", "0", "--ready-file", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.endswith(f"\nerror: --ready-file {path} cannot be written: File name too long\n")


def test_a_stopped_process_is_killed_without_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_STOP_TIMEOUT", float(2**20))
    child = ChildProcess("worker", ["-c", "import sys; sys.stdin.read()"], tmp_path, program=[sys.executable])
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    child.close()
    assert child.exit_code == -signal.SIGKILL
