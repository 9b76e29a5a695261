from __future__ import annotations

import asyncio
import io
import shlex
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from splitserve import cli
from splitserve.core.errors import ConfigError, WorkerUnavailableError
from splitserve.deploy import control
from splitserve.deploy.control import (
    ClusterStatus,
    ControlClient,
    ProcessStatus,
    control_server,
    describe,
    find_cluster,
    socket_path,
    start_line,
)
from splitserve.process.owned_folder import RUN_FOLDER_VARIABLE, run_folder
from splitserve.tools.client import router_or_default
from splitserve.tools.options import DEFAULT_ROUTER_URL


class Controlled:
    """A supervisor that only remembers."""

    def __init__(self) -> None:
        self.orders: list[object] = []
        self.router_url: str | None = None

    async def status(self) -> ClusterStatus:
        process = ProcessStatus(
            name="decode-0",
            pool="decode",
            state="ready",
            node="10.0.0.1",
            url="http://10.0.0.1:1",
            pid=7,
            num_restarts=2,
            detail="",
            model="m",
            dtype="bfloat16",
            quantization="int8",
            device="cuda:0",
            kv_pool_tokens=2048,
            kv_pool_bytes=94_371_840,
        )
        return ClusterStatus(
            name="c",
            pid=1,
            router_url=self.router_url,
            is_ready=False,
            is_ending=False,
            replicas={"decode": 1},
            processes=[process],
            log_folder="/tmp/logs",
        )

    async def scale(self, replicas: dict[str, int]) -> None:
        if "decode" not in replicas:
            raise ConfigError("there is no such pool")
        self.orders.append(replicas)

    def down(self, *, now: bool) -> None:
        self.orders.append(now)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path / "run"))
    return tmp_path / "run"


async def test_orders_arrive_and_are_answered_with_how_things_are():
    controlled = Controlled()
    async with control_server("c", controlled):
        client = ControlClient("c")
        assert client.is_up()
        status = await asyncio.to_thread(client.status)
        assert status == await controlled.status()
        await asyncio.to_thread(client.scale, {"decode": 4})
        await asyncio.to_thread(client.down, now=True)
        await asyncio.to_thread(client.down, now=False)
        with pytest.raises(ConfigError, match="there is no such pool"):
            await asyncio.to_thread(client.scale, {"encode": 4})
        with pytest.raises(ConfigError, match="Expected `int`"):
            await asyncio.to_thread(client.scale, {"decode": "four"})
    assert controlled.orders == [{"decode": 4}, True, False]
    assert not client.is_up()


async def test_nobody_else_gets_in(folder):
    async with control_server("c", Controlled()):
        assert folder.stat().st_mode & 0o077 == 0
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="open to others"):
        socket_path("c")


async def test_two_clusters_of_one_name_are_refused():
    async with control_server("c", Controlled()):
        with pytest.raises(ConfigError, match="a cluster 'c' is up"):
            async with control_server("c", Controlled()):
                pass
        async with control_server("d", Controlled()):
            pass
        assert (await asyncio.to_thread(ControlClient("c").status)).name == "c"


async def test_a_socket_that_a_killed_supervisor_left_is_replaced():
    socket_path("c").parent.mkdir(parents=True)
    run_folder().chmod(0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(socket_path("c")))
    with pytest.raises(WorkerUnavailableError, match="Connection refused"):
        ControlClient("c").status()
    async with control_server("c", Controlled()):
        assert (await asyncio.to_thread(ControlClient("c").status)).name == "c"


def test_an_error_names_the_socket_and_how_to_select_another_folder(folder):
    with pytest.raises(
        WorkerUnavailableError, match=f"no cluster 'c' answers at {folder}/c/.* start one.* SPLITSERVE_RUN"
    ):
        ControlClient("c").status()


async def test_an_error_names_the_clusters_that_run():
    async with control_server("up-8000", Controlled()), control_server("b", Controlled()):
        with pytest.raises(WorkerUnavailableError, match="--name selects another of this user: b, up-8000;"):
            ControlClient("c").status()


async def run_cluster(*words: str) -> Result:
    """Run a command of `splitserve cluster` while this loop serves it."""
    return await asyncio.to_thread(CliRunner().invoke, cli.app, ["cluster", *words])


async def test_without_a_name_the_default_cluster_or_else_the_only_one_is_used():
    first, default = Controlled(), Controlled()
    async with control_server("up-8000", first):
        with socket.socket(socket.AF_UNIX) as left:
            # A killed supervisor left its socket.
            socket_path("dead").parent.mkdir()
            left.bind(str(socket_path("dead")))
        done = await run_cluster("scale", "decode=2")
        assert (done.exit_code, first.orders) == (0, [{"decode": 2}])
        async with control_server("splitserve", default):
            await run_cluster("scale", "decode=3")
            assert (first.orders, default.orders) == ([{"decode": 2}], [{"decode": 3}])
        done = await run_cluster("status", "--name", "splitserve")
        assert isinstance(done.exception, WorkerUnavailableError)
        done = await run_cluster("status", "--wait", "0")
        assert (done.exit_code, done.stdout.splitlines()[-1][:12]) == (1, "c: not ready")
        async with control_server("b", Controlled()):
            done = await run_cluster("scale", "decode=4")
            assert isinstance(done.exception, WorkerUnavailableError)
            assert "no cluster 'splitserve' answers" in done.exception.message
    assert first.orders == [{"decode": 2}]


def test_a_search_stays_connected_until_the_supervisor_closes_the_connection(folder, monkeypatch):
    monkeypatch.setattr(control, "_CLOSE_SECONDS", 60.0)
    (folder / "splitserve").mkdir(parents=True)
    folder.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as supervisor, ThreadPoolExecutor(1) as pool:
        supervisor.bind(str(socket_path("splitserve")))
        supervisor.listen()
        supervisor.settimeout(60.0)
        searched = pool.submit(find_cluster, None)
        connection, _ = supervisor.accept()
        with connection:
            assert connection.recv(1) == b""
            # Raises BrokenPipeError if the search has left.
            connection.send(b"x")
        assert searched.result().name == "splitserve"


@pytest.mark.parametrize("command", ["trace", "top --once", "chat"])
async def test_commands_without_a_url_use_the_router_of_the_only_cluster(command: str) -> None:
    controlled = Controlled()
    controlled.router_url = "http://127.0.0.1:1"
    async with control_server("up-9", controlled):
        done = await asyncio.to_thread(CliRunner().invoke, cli.app, command.split())
    assert "no server answers at 127.0.0.1:1 " in str(done.exception)


def test_without_a_cluster_the_router_has_the_default_url() -> None:
    assert router_or_default(None) == DEFAULT_ROUTER_URL


async def test_down_names_the_cluster_that_it_ends(monkeypatch):
    monkeypatch.setattr(ControlClient, "is_up", lambda _: False)
    async with control_server("up-8000", Controlled()):
        done = await run_cluster("down")
    assert (done.exit_code, done.stdout) == (0, "up-8000: going down\n")


def test_the_socket_does_not_depend_on_the_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.delenv(RUN_FOLDER_VARIABLE)
    before = run_folder()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert run_folder() == before


async def test_a_status_is_lines_that_nothing_cuts():
    lines = describe(await Controlled().status()).splitlines()
    head = "process role state restarts pid node url model dtype device KV pool detail"
    assert lines[0].split() == head.split()
    shown = "decode-0 decode ready 2 7 10.0.0.1 http://10.0.0.1:1 m bfloat16 int8 cuda:0 2048 tokens, 90 MiB -"
    assert lines[1].split() == shown.split()
    assert lines[2:] == ["logs: /tmp/logs", "c: not ready; wanted: 1 decode; router: not there"]


async def test_columns_of_a_status_can_be_counted_before_a_process_has_started():
    status = await Controlled().status()
    waiting = msgspec.structs.replace(status.processes[0], state="waiting", node="", url=None, pid=None)
    line = describe(msgspec.structs.replace(status, processes=[waiting])).splitlines()[1]
    assert line.split()[:8] == ["decode-0", "decode", "waiting", "2", "-", "-", "-", "m"]


async def test_the_startup_line_has_the_reason_of_a_worker_that_is_not_proven():
    status = await Controlled().status()
    unproven = msgspec.structs.replace(status.processes[0], name="decode-1", detail="it generates\nnothing: 500")
    status = msgspec.structs.replace(status, processes=[*status.processes, unproven])
    line = start_line(Console(file=io.StringIO()), status, 0)
    assert line == "starting: decode-0 ready, decode-1 ready (it generates nothing: 500)"


async def test_a_status_that_waits_waits_for_the_supervisor_too(monkeypatch):
    ready = msgspec.structs.replace(await Controlled().status(), is_ready=True)
    answers: list[ClusterStatus | WorkerUnavailableError] = [WorkerUnavailableError("no cluster 'c' is up"), ready]

    def status(_: ControlClient) -> ClusterStatus:
        answer = answers.pop(0)
        if isinstance(answer, WorkerUnavailableError):
            raise answer
        return answer

    monkeypatch.setattr(ControlClient, "status", status)
    monkeypatch.setattr("splitserve.cli.cluster._POLL_INTERVAL", 0.0)
    done = CliRunner().invoke(cli.app, ["cluster", "status", "--name", "c", "--wait", "60"])
    assert done.exit_code == 0, done.exception
    assert done.stdout.splitlines()[-1].startswith("c: ready")


async def test_nobody_waits_for_a_process_that_is_not_started_any_more(monkeypatch):
    before = await Controlled().status()
    processes = [msgspec.structs.replace(process, state="failed") for process in before.processes]
    failed = msgspec.structs.replace(before, processes=processes)
    monkeypatch.setattr(ControlClient, "status", lambda _: failed)
    monkeypatch.setattr(ControlClient, "scale", lambda *_: failed)
    done = CliRunner().invoke(cli.app, ["cluster", "status", "--name", "c", "--wait", "3600"])
    assert done.exit_code == 1
    done = CliRunner().invoke(cli.app, ["cluster", "scale", "decode=3", "--name", "c", "--wait", "3600"])
    assert isinstance(done.exception, ConfigError)
    assert f"{processes[0].name}" in done.exception.message


@pytest.mark.parametrize(
    ("words", "order", "text"),
    [
        (
            ("drain", "--force"),
            {"migrate": False, "force": True, "timeout": 120.0},
            "is drained: it gets no new requests",
        ),
        (("drain",), {"migrate": False, "force": False, "timeout": 120.0}, "is drained: it gets no new requests"),
        (("resume",), {}, "gets new requests again"),
    ],
)
def test_orders_to_a_worker_print_their_result(monkeypatch, words, order, text):
    orders = []

    async def send(*urls: str, operator_key: str | None, **settings: object) -> None:
        orders.append((urls, settings))

    monkeypatch.setattr(f"splitserve.deploy.router_client.{words[0]}_worker", send)
    done = CliRunner().invoke(cli.app, ["cluster", *words, "http://w:1", "--router", "http://r:2"])
    assert (done.exit_code, orders) == (0, [(("http://r:2", "http://w:1"), order)])
    assert done.stdout.startswith(f"http://w:1 {text}")
    assert done.stdout.count("\n") == 1


def test_a_drain_prints_the_whole_command_that_ends_it(monkeypatch, tmp_path):
    async def send(*urls: str, **settings: object) -> None:
        pass

    key = tmp_path / "a key"
    key.write_text("key-of-an-operator")
    key.chmod(0o600)
    monkeypatch.setattr("splitserve.deploy.router_client.drain_worker", send)
    words = ["http://w:1", "--router", "http://r:2", "--router-key-file", str(key)]
    done = CliRunner().invoke(cli.app, ["cluster", "drain", *words])
    assert shlex.split(done.stdout)[-len(words) - 3 :] == ["splitserve", "cluster", "resume", *words]


def test_scale_rejects_two_numbers_for_one_pool():
    done = CliRunner().invoke(cli.app, ["cluster", "scale", "decode=1", "decode=2", "--name", "none"])
    assert isinstance(done.exception, ConfigError)
    assert done.exception.message == "'decode=2': decode occurs twice; give one number of workers"


def test_scale_says_what_is_wanted_now(monkeypatch):
    def scale(_: ControlClient, replicas: dict[str, int]) -> ClusterStatus:
        status = asyncio.run(Controlled().status())
        return msgspec.structs.replace(status, replicas=replicas)

    monkeypatch.setattr(ControlClient, "scale", scale)
    done = CliRunner().invoke(cli.app, ["cluster", "scale", "decode=3", "--name", "c"])
    assert done.stdout == "c: not ready; wanted: 3 decode; router: not there\n"
