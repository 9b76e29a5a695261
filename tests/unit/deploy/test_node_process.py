"""One process on a node: its secrets, its end, its folder."""

from __future__ import annotations

import time

import pytest

from splitserve.deploy.placer import (
    NODE_ADDRESS,
    LocalPlacer,
    NodeProcess,
    Observation,
    Phase,
    ProcessSpec,
    _signal_name,
)
from splitserve.process.child import POLL_INTERVAL

pytestmark = pytest.mark.process

# Ends with an error as soon as its options are parsed.
SPEC = ProcessSpec(
    name="router-0",
    args=("router", "--policy", f"tcp://{NODE_ADDRESS}:0"),
    secrets={"--api-key-file": b"key-of-a-client-0123"},
)


def ended(observe) -> Observation:
    deadline = time.monotonic() + 60.0
    while (found := observe()).phase is not Phase.ENDED:
        assert time.monotonic() < deadline
        time.sleep(POLL_INTERVAL)
    return found


def test_it_gets_its_secrets_as_files_and_is_observed_also_when_it_is_gone(tmp_path):
    process = NodeProcess(SPEC, "127.0.0.1", "here", tmp_path)
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    secret = folder / "api-key-file"
    assert secret.read_bytes() == b"key-of-a-client-0123"
    assert secret.stat().st_mode & 0o777 == 0o600
    found = ended(process.observe)
    assert found.detail == "exited with code 2"
    assert "--policy tcp://127.0.0.1:0" in found.log_tail
    process.close()
    process.close()
    assert [path.name for path in tmp_path.iterdir()] == ["router-0.log"]
    # Also from another thread, after the end.
    assert process.observe() == found


def test_a_process_is_observed_without_a_readable_log(tmp_path, monkeypatch):
    process = NodeProcess(SPEC, "127.0.0.1", "here", tmp_path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", fail)
        process.child.log_path.write_text("x")
        process.child.bound_log(max_bytes=0)
    process.child.log_path.unlink()
    process.child.bound_log()
    found = ended(process.observe)
    assert (found.detail, found.log_tail) == ("exited with code 2", "")
    process.close()


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (40, "signal 40")])
def test_the_signal_of_an_end_has_a_name_or_a_number(number, name):
    assert _signal_name(number) == name


@pytest.mark.parametrize("keeps_logs", [False, True])
def test_on_this_machine_logs_stay_if_they_are_to_be_kept_and_all_else_goes(keeps_logs):
    placer = LocalPlacer()
    log = placer.log_folder / "router-0.log"
    for _ in range(2):
        placer.start(SPEC)
        found = ended(lambda: placer.observe()["router-0"])
        placer.remove("router-0")
        assert not placer.observe()
    # One word, for programs that count the columns of a status.
    assert found.node == "localhost"
    # One log for all processes of a name; the end of it is that of the last process.
    assert found.log_tail.count("--policy tcp://127.0.0.1:0") == 1
    assert log.read_text().count("--policy tcp://127.0.0.1:0") == 2
    placer.start(SPEC)
    if keeps_logs:
        placer.keep_logs()
    placer.close()
    placer.close()
    assert placer.log_folder.exists() == keeps_logs
    if keeps_logs:
        assert list(placer.log_folder.iterdir()) == [log]
        log.unlink()
        placer.log_folder.rmdir()


def test_a_process_that_cannot_be_started_is_observed_as_ended(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError("Cannot allocate memory")

    placer = LocalPlacer()
    monkeypatch.setattr("splitserve.deploy.placer.NodeProcess", fail)
    placer.start(SPEC)
    found = placer.observe()["router-0"]
    assert (found.phase, found.detail) == (Phase.ENDED, "could not be started: Cannot allocate memory")
    placer.remove("router-0")
    assert not placer.observe()
    placer.close()
