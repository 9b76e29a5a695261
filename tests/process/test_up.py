"""`splitserve up` as users run it: a process that dies is started again, and every kind of end leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from splitserve.process.child import POLL_INTERVAL
from support.commands import DEADLINE, RunningCommand, running_command
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.process

KEY, OPERATOR, WORKER = "client-key-0123456789", "operator-key-0123456789", "worker-key-0123456789"
# `up` with options of the router.
RUN_UP = """
import json, sys
from splitserve.process.process_end import install, leave
install()
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.up import run_cluster_up
model, options = sys.argv[1], json.loads(sys.argv[2])
worker_args = ["--max-total-tokens", "4096"]
deployment = LocalDeployment(model=model, dtype="float32", threads=1, worker_args=worker_args, router_args=options)
leave(run_cluster_up(deployment.config()))
"""
CERT = Path(__file__).parents[1] / "unit" / "worker" / "tls" / "cert.pem"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model") / "llama")


def up(model: Path, *more: str) -> list[str]:
    return [
        "up",
        str(model),
        "--port",
        "0",
        "--dtype",
        "float32",
        "--threads",
        "1",
        "--max-total-tokens",
        "4096",
        *more,
    ]


def pids(command: RunningCommand) -> dict[str, int]:
    """By name, of the last table."""
    rows = re.findall(r"^(\S+) +\S+ +ready +\d+ +(\d+) ", command.output, re.MULTILINE)
    return {name: int(pid) for name, pid in rows}


def generate(url: str, context: ssl.SSLContext | bool = True) -> httpx.Response:
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    with httpx.Client(verify=context, timeout=DEADLINE, headers={"Authorization": f"Bearer {KEY}"}) as client:
        return client.post(f"{url}/generate", json=body)


def wait_served(url: str, context: ssl.SSLContext | bool = True) -> httpx.Response:
    deadline = time.monotonic() + DEADLINE
    while (answer := generate(url, context)).status_code != 200:
        assert time.monotonic() < deadline, answer.text
        # While a kind of worker is missing, clients learn when to come again.
        assert answer.status_code in (502, 503), answer.text
        time.sleep(POLL_INTERVAL)
    return answer


def url_of(command: RunningCommand) -> str:
    found = re.search(r"^ready at (\S+) ", command.output, re.MULTILINE)
    assert found is not None
    return found[1]


def test_what_is_killed_is_started_again_also_behind_keys_and_tls(model, tmp_path):
    options = ["--policy", "random", "--ssl-certfile", str(CERT), "--ssl-keyfile", str(CERT.with_name("key.pem"))]
    for option, key in (("api", KEY), ("operator", OPERATOR), ("worker", WORKER)):
        path = tmp_path / f"{option}.keys"
        path.write_text(key)
        path.chmod(0o600)
        options += [f"--{option}-key-file", str(path)]
    program = [sys.executable, "-c", RUN_UP]
    with running_command(str(model), json.dumps(options), folder=tmp_path, program=program) as command:
        command.wait_for("Ctrl-C drains and stops")
        before, url = pids(command), url_of(command)
        assert set(before) == {"router", "prefill-0", "decode-0"}
        assert re.search(r"decode-0 +decode .* float32 +cpu +4096 tokens, [\d.]+ MiB", command.output)
        assert url.startswith("https://127.0.0.1:")
        command.children()
        context = ssl.create_default_context(cafile=CERT)
        expected = wait_served(url, context).json()["output_ids"]
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        for name in before:
            command.wait_for(f"{name}: killed by SIGKILL, starting it again in 1 s; the end of its log:")
        assert wait_served(url, context).json()["output_ids"] == expected
        command.children()
        check_drain(command, url, context)
        command.check_nothing_is_left()


@pytest.mark.soak
def test_schedulers_that_hang_are_replaced_and_no_request_fails(model, tmp_path):
    with running_command(*up(model), folder=tmp_path) as command:
        command.wait_for("Ctrl-C drains and stops")
        url, workers = url_of(command), pids(command)
        expected = generate(url).json()["output_ids"]
        for name in ("prefill-0", "decode-0"):
            (scheduler,) = psutil.Process(workers[name]).children()
            scheduler.suspend()
            answer = generate(url)
            assert (answer.status_code, answer.json().get("output_ids")) == (200, expected)
            assert f"{name}: exited with code 1, starting it again" in command.output
            assert not scheduler.is_running()
        command.send(signal.SIGINT)
        assert command.exit_code() == 130
        command.check_nothing_is_left()


def check_drain(command: RunningCommand, url: str, context: ssl.SSLContext) -> None:
    """Ctrl-C while a request runs: it runs to its end, and progress is reported meanwhile."""
    body = {"input_ids": [5, 6, 7], "stream": True, "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
    headers = {"Authorization": f"Bearer {KEY}"}
    with (
        httpx.Client(verify=context, timeout=DEADLINE) as client,
        client.stream("POST", f"{url}/generate", json=body, headers=headers) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        command.send(signal.SIGINT)
        command.wait_for("draining: 1 request running, at most 120 s; Ctrl-C or SIGTERM again stops at once")
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert command.exit_code() == 130
    assert command.output.splitlines()[-1] == "stopped: every process of the cluster has ended"


@pytest.mark.soak
def test_a_worker_that_cannot_start_ends_up_with_the_reason_and_the_end_of_its_log(model, tmp_path):
    broken = make_tiny_model("llama", tmp_path / "broken")
    weights = broken / "model.safetensors"
    # The header fits the file, so `up` starts its workers.
    weights.write_bytes(weights.read_bytes().replace(b'"dtype":"F32"', b'"dtype":"X32"'))
    with running_command(*up(broken), folder=tmp_path) as command:
        assert command.exit_code() == 1
        output = command.output
    found = re.search(r"error: (\S+): exited with code 1; 3 starts in a row have failed; the end of its log", output)
    assert found is not None, output
    assert output.count(f"{found[1]}: exited with code 1, starting it again in") == 2
    assert "error: " in output.rpartition("the end of its log:")[2]
    folder = re.search(r"the logs stay in (\S+)", output)
    assert folder is not None


def test_a_killed_up_takes_its_processes_with_it_and_the_next_command_removes_its_folders(model, tmp_path):
    with running_command(*up(model), folder=tmp_path) as command:
        command.wait_for("Ctrl-C drains and stops")
        before = pids(command)
        name = command.output.partition("--name ")[2].partition(",")[0]
        children = command.children()
        # A worker, too: it cannot remove what its processes left.
        os.kill(before["decode-0"], signal.SIGKILL)
        command.send(signal.SIGKILL)
        assert command.exit_code() == -signal.SIGKILL
        _, alive = psutil.wait_procs(children, timeout=DEADLINE)
        assert alive == []
        assert list(command.temporary.rglob("*.log")) != []
        # Its cluster is not up any more, and no folder hinders the next one of its name.
        status = [sys.executable, "-m", "splitserve", "cluster", "status", "--name", name]
        done = subprocess.run(status, env=command.env, capture_output=True, text=True, timeout=DEADLINE, check=False)
        assert "no cluster" in done.stderr
        command.check_nothing_is_left()


def test_processes_end_with_an_up_that_is_killed_while_they_load(model, tmp_path):
    with running_command(*up(model), folder=tmp_path) as command:
        command.wait_for("decode-0 starting")
        children = command.children()
        command.send(signal.SIGKILL)
        command.exit_code()
        _, alive = psutil.wait_procs(children, timeout=DEADLINE)
        assert alive == []


def test_json_logs_have_an_object_per_event(model, tmp_path):
    options = ("--log-format", "json", "--prefill", "0", "--decode", "0", "--null", "1")
    with running_command(*up(model, *options), folder=tmp_path) as command:
        command.wait_for("Ctrl-C drains and stops")
        os.kill(pids(command)["colocated-0"], signal.SIGKILL)
        command.wait_for("killed by SIGKILL, starting it again")
        event = json.loads(next(line for line in command.output.splitlines() if "killed by SIGKILL" in line))
        assert (event["level"], event["logger"]) == ("info", "splitserve.deploy.up")
        # The end of the worker's own log is part of the message, as text.
        assert "INFO [splitserve.worker.worker] " in event["message"]
        command.children()
        command.send(signal.SIGINT)
        assert command.exit_code() == 130
        assert (
            json.loads(command.output.splitlines()[-1])["message"] == "stopped: every process of the cluster has ended"
        )
        command.check_nothing_is_left()
