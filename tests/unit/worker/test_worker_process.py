"""A worker process from start to end, around a scheduler without a model: its output, and that nothing is left."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import tokenizers
from safetensors.numpy import save_file

from splitserve.api.http_server import bind, port_of
from splitserve.process.child import ChildProcess
from splitserve.transfer.directory import ClusterAuth
from splitserve.transfer.wire import PROTOCOL_VERSION
from support import fake_worker
from support.commands import RunningCommand, running_command
from support.fake_scheduler import (
    CRASH,
    DEATH_CODE,
    DIE_TOKEN,
    HANG_TOKEN,
    LOAD_FOREVER,
    READY,
    REFUSE,
    REFUSE_ALWAYS,
    SIGNAL,
    SPLIT,
    STUCK,
)
from support.processes import running, wait_ready

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("workers_fork")]

DEADLINE = 60.0


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a front end reads of a model: its config and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {f"w{i}": i for i in range(16)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"eos_token_id": 15}')
    save_file({}, folder / "model.safetensors")
    return folder


@contextmanager
def worker(
    scenario: str, model: Path, folder: Path, *options: str, temp: Path | None = None, forks: bool = True
) -> Iterator[ChildProcess]:
    """`forks`: the process forks from the template of the tests, which saves its imports."""
    args = ["serve", str(model), "--port", "0", *options]
    env = {"TMPDIR": str(temp or tempfile.gettempdir())}
    if not forks:
        # A process with another environment starts by itself.
        env["SPLITSERVE_TESTS_OWN_PROCESS"] = "1"
    with running(args, folder, env=env, program=(*fake_worker.PROGRAM, scenario)) as child:
        yield child


def post(url: str, body: dict[str, Any]) -> tuple[int, bytes]:
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def generate(token: int, **extra: Any) -> dict[str, Any]:
    return {"input_ids": [token], "sampling_params": {"max_new_tokens": 3}, **extra}


def test_it_serves_and_tells_who_it_is_and_leaves_nothing(model_folder: Path, tmp_path: Path) -> None:
    temp = tmp_path / "temp"
    temp.mkdir()
    options = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "0")
    with worker(READY, model_folder, tmp_path, *options, temp=temp, forks=False) as child:
        ready = wait_ready(child)
        assert ready.pid == child.pid
        assert ready.disaggregation_mode == "prefill"
        assert ready.url == f"http://127.0.0.1:{ready.port}"
        with urllib.request.urlopen(f"http://127.0.0.1:{ready.bootstrap_port}/health", timeout=DEADLINE) as response:
            assert response.status == 200
        with urllib.request.urlopen(f"{ready.url}/health", timeout=DEADLINE) as response:
            assert response.status == 200
        scheduler = psutil.Process(ready.scheduler_pids[0])
        child.send_signal(signal.SIGTERM)
        assert child.wait(DEADLINE)
        assert child.exit_code == 0
        assert not scheduler.is_running()
        assert list(temp.iterdir()) == []


def served_alone(model: Path, folder: Path, *options: str) -> AbstractContextManager[RunningCommand]:
    """Return a worker that a user starts."""
    program = (*fake_worker.PROGRAM, READY)
    return running_command("serve", str(model), "--port", "0", *options, folder=folder, program=program)


def test_a_colocated_worker_prints_a_request_that_it_answers(model_folder: Path, tmp_path: Path) -> None:
    with served_alone(model_folder, tmp_path, "--served-model-name", "tiny") as command:
        command.wait_for("Ctrl-C drains and stops")
        line = next(line for line in command.output.splitlines() if line.startswith("curl "))
        url, *headers, _, body = shlex.split(line)[1:]
        assert headers == ["-H", "Content-Type: application/json"]
        answer = httpx.post(url, content=body, headers={"Content-Type": "application/json"}, trust_env=False)
        # The request reached the route and the model; this one has no chat template.
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        command.send(signal.SIGINT)
        assert command.exit_code() == 130
        assert command.output.splitlines()[-1].endswith(" stopped: every process of the worker has ended")
        assert f"ready at {url.removesuffix('/v1/chat/completions')} (OpenAI API at " in command.output


def test_a_worker_without_a_standard_output_serves(model_folder: Path, tmp_path: Path) -> None:
    program = ("sh", "-c", 'exec "$@" >&-', "sh", *fake_worker.PROGRAM, READY)
    with running_command("serve", str(model_folder), "--port", "0", folder=tmp_path, program=program) as command:
        command.wait_for("worker ready")
        command.send(signal.SIGINT)
        assert command.exit_code() == 130, command.output


@pytest.mark.parametrize(
    "options",
    [("--log-format", "json"), ("--disaggregation-mode", "decode"), ("--exit-with-parent",), ("--ready-file", "FILE")],
)
def test_no_request_is_printed_for_programs_or_by_a_worker_of_a_pair(
    model_folder: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    words = [str(tmp_path / "ready") if word == "FILE" else word for word in options]
    with served_alone(model_folder, tmp_path, *words) as command:
        command.wait_for("worker ready url=")
        command.send(signal.SIGINT)
        assert command.exit_code() == 130
        assert "curl " not in command.output


def test_the_cluster_token_shows_neither_in_the_process_list_nor_in_the_log(model_folder: Path, tmp_path: Path) -> None:
    secret, token_file = "5ecret" * 5, tmp_path / "token"
    token_file.write_text(secret + "\n")
    token_file.chmod(0o600)
    options = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "0", "--log-level", "debug")
    options += ("--cluster-token-file", str(token_file))
    with worker(READY, model_folder, tmp_path, *options, forks=False) as child:
        ready = wait_ready(child)
        for pid in (ready.pid, *ready.scheduler_pids):
            for kind in ("cmdline", "environ"):
                assert secret.encode() not in Path(f"/proc/{pid}/{kind}").read_bytes()
        # It is in force all the same.
        url = f"http://127.0.0.1:{ready.bootstrap_port}/route?version={PROTOCOL_VERSION}&dp_rank=0"
        for token, status in ((b"", 403), (secret.encode(), 503)):
            assert httpx.get(url, auth=ClusterAuth(token), trust_env=False).status_code == status
        with urllib.request.urlopen(f"{ready.url}/server_info", timeout=DEADLINE) as response:
            assert secret.encode() not in response.read()
        child.send_signal(signal.SIGTERM)
        assert child.wait(DEADLINE)
        log = child.log_path.read_text()
    assert re.search("worker ready .* model=.* dtype=float32 .* kv_pool_tokens=128 .* transfer_backend=tcp", log)
    assert secret not in log


def test_a_token_file_may_be_named_in_the_environment(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITSERVE_CLUSTER_TOKEN_FILE", str(tmp_path / "none"))
    with worker(READY, model_folder, tmp_path, "--disaggregation-mode", "decode") as child:
        assert child.wait(DEADLINE)
        assert child.exit_code == 2
        assert f"--cluster-token-file {tmp_path / 'none'}: No such file" in child.log_tail()
    with worker(READY, model_folder, tmp_path) as colocated:
        wait_ready(colocated)


def test_it_does_not_listen_where_others_reach_it_without_a_token(model_folder: Path, tmp_path: Path) -> None:
    options = ("--disaggregation-mode", "decode", "--disaggregation-host", "192.0.2.1")
    with worker(READY, model_folder, tmp_path, *options) as child:
        assert child.wait(DEADLINE)
        assert child.exit_code == 2
        assert child.log_tail().startswith("error: a decode worker would listen on 192.0.2.1")


def test_it_answers(model_folder: Path, tmp_path: Path) -> None:
    with worker(READY, model_folder, tmp_path) as child:
        status, body = post(wait_ready(child).url, generate(5))
        assert (status, json.loads(body)["output_ids"]) == (200, [5, 5, 5])


def test_the_schedulers_death_ends_every_stream_with_an_error_and_the_worker(
    model_folder: Path, tmp_path: Path
) -> None:
    with worker(READY, model_folder, tmp_path) as child:
        url = wait_ready(child).url
        body = json.dumps(generate(HANG_TOKEN, stream=True)).encode()
        with urllib.request.urlopen(urllib.request.Request(url + "/generate", body), timeout=DEADLINE) as stream:
            assert b"output_ids" in stream.readline()
            status, answer = post(url, generate(DIE_TOKEN))
            rest = stream.read()
        assert status == 503
        assert f"ended with code {DEATH_CODE}" in json.loads(answer)["error"]["message"]
        assert b"the scheduler process ended" in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert child.wait(DEADLINE)
        assert child.exit_code == 1


@pytest.mark.parametrize(
    ("scenario", "reason", "exit_code"),
    [
        (REFUSE, "error: the model does not fit", 1),
        (REFUSE_ALWAYS, "error: the model does not fit", 2),
        (CRASH, f"ended with code {DEATH_CODE}", 1),
    ],
)
def test_a_scheduler_that_cannot_start_ends_the_worker_and_says_why(
    model_folder: Path, tmp_path: Path, scenario: str, reason: str, exit_code: int
) -> None:
    with worker(scenario, model_folder, tmp_path) as child:
        assert child.wait(DEADLINE)
        assert child.exit_code == exit_code
        assert reason in child.log_tail().splitlines()[-1]


def test_the_first_signal_drains_and_the_second_stops(model_folder: Path, tmp_path: Path) -> None:
    with worker(READY, model_folder, tmp_path) as child:
        url = wait_ready(child).url
        body = json.dumps(generate(HANG_TOKEN, stream=True)).encode()
        with urllib.request.urlopen(urllib.request.Request(url + "/generate", body), timeout=DEADLINE) as stream:
            stream.readline()
            child.send_signal(signal.SIGTERM)
            while post(url, generate(5))[0] == 200:
                pass
            status, answer = post(url, generate(5))
            assert status == 503
            assert "draining" in json.loads(answer)["error"]["message"]
            assert child.exit_code is None
            child.send_signal(signal.SIGTERM)
            assert child.wait(DEADLINE)
            assert child.exit_code == 0


def test_a_drain_waits_for_running_requests_up_to_its_deadline(model_folder: Path, tmp_path: Path) -> None:
    with worker(READY, model_folder, tmp_path, "--drain-timeout", "0.2") as child:
        url = wait_ready(child).url
        body = json.dumps(generate(HANG_TOKEN, stream=True)).encode()
        with urllib.request.urlopen(urllib.request.Request(url + "/generate", body), timeout=DEADLINE) as stream:
            stream.readline()
            child.send_signal(signal.SIGINT)
            rest = stream.read()
            assert child.wait(DEADLINE)
        assert child.exit_code == 128 + signal.SIGINT
        assert b"shutting down" in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert "draining: 1 request running, at most 0.2 s" in child.log_tail()
        assert "were still running after 0.2 s" in child.log_tail()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_loads_ends_it(model_folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    with worker(LOAD_FOREVER, model_folder, tmp_path, "--log-level", "debug") as child:
        scheduler = wait_for_child(child)
        child.send_signal(number)
        assert child.wait(DEADLINE)
        assert child.exit_code == 128 + number
        reason = "interrupted" if number == signal.SIGINT else "terminated"
        assert re.search(f"{reason}: .* has ended$", child.log_tail())
        # A worker that owns nothing yet does not wait for it: its standard input ends with the worker.
        assert scheduler.wait(DEADLINE) is None


def test_a_signal_in_a_callback_of_the_interpreter_is_not_lost(model_folder: Path, tmp_path: Path) -> None:
    # Modules are imported in the same state. Their locks are freed in such callbacks.
    with worker(SIGNAL, model_folder, tmp_path) as child:
        assert child.wait(DEADLINE)
        assert child.exit_code == 128 + signal.SIGINT
        assert child.log_tail() == "interrupted: this process has ended"


def test_it_ends_with_its_parent(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine it may take longer than its parent waits before it kills it.
    monkeypatch.setattr("splitserve.process.child._STOP_TIMEOUT", DEADLINE)
    with worker(READY, model_folder, tmp_path, forks=False) as child:
        scheduler = psutil.Process(wait_ready(child).scheduler_pids[0])
        child.close()
        assert child.exit_code == 0
        assert not scheduler.is_running()


def test_a_worker_that_is_killed_takes_its_scheduler_with_it(model_folder: Path, tmp_path: Path) -> None:
    with worker(READY, model_folder, tmp_path) as child:
        scheduler = psutil.Process(wait_ready(child).scheduler_pids[0])
        os.kill(child.pid, signal.SIGKILL)
        assert scheduler.wait(DEADLINE) is None


def test_a_taken_port_is_one_line_and_may_be_tried_again(model_folder: Path, tmp_path: Path) -> None:
    with worker(READY, model_folder, tmp_path) as first:
        port = str(wait_ready(first).port)
        with running(["serve", str(model_folder), "--port", port], tmp_path, name="second") as second:
            assert second.wait(DEADLINE)
            assert second.exit_code == 1
            assert second.log_tail().startswith(f"error: cannot listen on 127.0.0.1:{port}")


def test_it_announces_itself_to_the_router_and_leaves_it_when_it_drains(model_folder: Path, tmp_path: Path) -> None:
    with running(["router", "--port", "0"], tmp_path, name="router") as router:
        url = wait_ready(router).url
        with worker(READY, model_folder, tmp_path, "--router", url) as child:
            ready = wait_ready(child)
            while workers(url) != [ready.url]:
                assert child.exit_code is None
            assert post(url, generate(5))[0] == 200
            child.send_signal(signal.SIGTERM)
            assert child.wait(DEADLINE)
            assert workers(url) == []
        router.send_signal(signal.SIGTERM)
        assert router.wait(DEADLINE)
        assert router.exit_code == 0


def workers(router_url: str) -> list[str]:
    with urllib.request.urlopen(router_url + "/workers", timeout=DEADLINE) as response:
        return [w["url"] for w in json.load(response)["workers"]]


def test_a_scheduler_that_is_killed_while_it_loads_is_no_request_to_repeat(model_folder: Path, tmp_path: Path) -> None:
    with worker(LOAD_FOREVER, model_folder, tmp_path) as child:
        wait_for_child(child).kill()
        assert child.wait(DEADLINE)
        line = child.log_tail().splitlines()[-1]
        assert "was killed by signal 9 while it loaded the model: see the log above, and whether memory ran" in line


def wait_for_child(child: ChildProcess) -> psutil.Process:
    """The scheduler of a worker that is not ready yet."""
    timer = threading.Timer(DEADLINE, child.send_signal, [signal.SIGKILL])
    timer.start()
    try:
        while child.exit_code is None:
            children = psutil.Process(child.pid).children()
            if children and "fake_scheduler" in " ".join(children[0].cmdline()):
                return children[0]
    finally:
        timer.cancel()
    raise AssertionError(f"the worker ended:\n{child.log_tail()}")


def test_two_ranks_are_one_worker_until_one_of_them_is_killed(model_folder: Path, tmp_path: Path) -> None:
    with worker(READY, model_folder, tmp_path, "--dp-size", "2") as child:
        ready = wait_ready(child)
        first, second = (psutil.Process(pid) for pid in ready.scheduler_pids)
        assert post(ready.url, generate(5))[0] == 200
        info = httpx.get(ready.url + "/server_info", timeout=DEADLINE, trust_env=False).json()
        assert (info["dp_size"], len(info["internal_states"])) == (2, 2)
        # One request on each.
        body = generate(HANG_TOKEN, stream=True)
        with (
            httpx.stream("POST", ready.url + "/generate", json=body, timeout=DEADLINE, trust_env=False) as one,
            httpx.stream("POST", ready.url + "/generate", json=body, timeout=DEADLINE, trust_env=False) as other,
        ):
            second.kill()
            for stream in (one, other):
                assert b"of data parallel rank 1 was killed by signal 9" in stream.read()
        assert child.wait(DEADLINE)
        assert child.exit_code == 1
        assert not first.is_running()


def test_a_killed_follower_ends_its_worker_though_the_others_hear_nothing(model_folder: Path, tmp_path: Path) -> None:
    with worker(STUCK, model_folder, tmp_path, "--tp-size", "2", "--pp-size", "2") as child:
        ready = wait_ready(child)
        ranks = [psutil.Process(pid) for pid in (*ready.scheduler_pids, *ready.follower_pids)]
        assert len(ranks) == 4
        info = httpx.get(ready.url + "/server_info", timeout=DEADLINE, trust_env=False).json()
        assert (info["tp_size"], info["pp_size"], info["dp_size"]) == (2, 2, 1)
        # Its model is cut over ranks: they would all have to change.
        status, answer = ask_role(ready.url, "decode")
        assert (status, answer["error"]["param"]) == (400, "role")
        assert "--tp-size 2 --pp-size 2" in answer["error"]["message"]
        body = generate(HANG_TOKEN, stream=True)
        with httpx.stream("POST", ready.url + "/generate", json=body, timeout=DEADLINE, trust_env=False) as stream:
            # The followers are in the order of their numbers; the third of the four has the scheduler.
            ranks[2].kill()
            assert b"tensor parallel rank 1 of pipeline stage 0 was killed by signal 9" in stream.read()
        assert child.wait(DEADLINE)
        assert child.exit_code == 1
        assert not any(rank.is_running() for rank in ranks)


def ask_role(url: str, role: str, **more: Any) -> tuple[int, Any]:
    response = httpx.post(url + "/role", json={"role": role, **more}, timeout=DEADLINE, trust_env=False)
    return response.status_code, response.json()


def listed(router_url: str) -> list[tuple[str, int | None]]:
    answer = httpx.get(router_url + "/workers", timeout=DEADLINE, trust_env=False)
    return [(w["mode"], w["bootstrap_port"]) for w in answer.json()["workers"]]


def test_it_changes_its_role_and_its_router_learns_of_it(model_folder: Path, tmp_path: Path) -> None:
    with running(["router", "--port", "0"], tmp_path, name="router") as router:
        router_url = wait_ready(router).url
        with worker(READY, model_folder, tmp_path, "--router", router_url) as child:
            url = wait_ready(child).url
            # The port is in use, and no process reports it.
            with bind("127.0.0.1", 0) as taken:
                status, answer = ask_role(url, "prefill", bootstrap_port=port_of(taken))
            assert (status, answer["error"]["param"]) == (400, "bootstrap_port")
            assert post(url, generate(5))[0] == 200
            body = generate(HANG_TOKEN, stream=True)
            with httpx.stream("POST", url + "/generate", json=body, timeout=DEADLINE, trust_env=False) as stream:
                lines = stream.iter_lines()
                next(lines)
                # It does not end: the role stays, and so does the request. Then it is broken off.
                assert ask_role(url, "prefill", timeout=0.2)[0] == 504
                assert post(url, generate(5))[0] == 200
                status, answer = ask_role(url, "prefill", drain="migrate")
                assert status == 200
                assert "changing its role" in "".join(lines)
            port = answer["bootstrap_port"]
            health = httpx.get(f"http://127.0.0.1:{port}/health", timeout=DEADLINE, trust_env=False)
            assert health.status_code == 200
            while listed(router_url) != [("prefill", port)]:
                assert child.exit_code is None
            # Through the router, and at the same address as before. It is the only one there is.
            order = {"url": url, "role": "null"}
            assert httpx.post(router_url + "/role", json=order, timeout=DEADLINE, trust_env=False).status_code == 200
            assert listed(router_url) == [("null", None)]
            assert post(router_url, generate(5))[0] == 200
            assert ask_role(url, "prefill")[1]["bootstrap_port"] == port
            child.send_signal(signal.SIGTERM)
            assert child.wait(DEADLINE)
            assert child.exit_code == 0


def test_a_worker_whose_schedulers_have_different_roles_ends(model_folder: Path, tmp_path: Path) -> None:
    with worker(SPLIT, model_folder, tmp_path, "--dp-size", "2") as child:
        url = wait_ready(child).url
        status, answer = ask_role(url, "decode")
        assert status == 503
        assert "not all decode now: no memory" in answer["error"]["message"]
        assert child.wait(DEADLINE)
        assert child.exit_code == 1
