"""The supervisor with a placer that keeps its processes in a dict, and a router that records its calls."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Collection, Mapping
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from splitserve.api.http_server import bind, port_of
from splitserve.core.clock import ManualClock
from splitserve.core.errors import AddressTakenError, ClusterError, ConfigError, WorkerUnavailableError
from splitserve.deploy import answer_watch, supervisor
from splitserve.deploy.commands import Credentials
from splitserve.deploy.config import ClusterConfig, parse_config
from splitserve.deploy.control import socket_path
from splitserve.deploy.placer import Observation, Phase, ProcessSpec
from splitserve.deploy.router_client import RouterClient
from splitserve.deploy.supervisor import Supervisor
from splitserve.deploy.up import run_cluster_up
from splitserve.process.lifecycle import ReadyInfo
from splitserve.process.owned_folder import RUN_FOLDER_VARIABLE, OwnedFolder

CONFIG = b"""
pools: {prefill: {}, decode: {replicas: 2}}
router: {port: 0}
supervision: {scale_down: migrate, drain_timeout: 5}
"""


# Fields of a worker in GET /workers, unless a test changes them.
ENTRY = {"mode": "decode", "healthy": True, "draining": False, "switching_to": None, "reason": None}


class DictPlacer:
    """A process serves from its start on, at a port of its own."""

    address = "10.0.0.1"
    num_cores = None

    def __init__(self) -> None:
        self.specs: dict[str, ProcessSpec] = {}
        self.seen: dict[str, Observation] = {}
        self.next_port = 1000
        self.terminated: list[str] = []
        # Name of a process that ends as soon as it is started, and its exit code.
        self.unstartable = ""
        self.exit_code = 2

    def start(self, spec: ProcessSpec) -> None:
        assert spec.name not in self.seen
        if spec.name == self.unstartable:
            tail, code = "loading\nerror: There is no folder x\n", self.exit_code
            ended = Observation(phase=Phase.ENDED, detail=f"exited with code {code}", log_tail=tail, exit_code=code)
            self.seen[spec.name] = ended
            return
        self.specs[spec.name] = spec
        port = int(spec.args[spec.args.index("--port") + 1])
        self.next_port += 1
        port = port or self.next_port
        host = "10.0.0.1" if spec.name == "router" else "10.0.0.2"
        is_prefill = "prefill" in spec.args
        ready = ReadyInfo(pid=port, port=port, url=f"http://{host}:{port}", bootstrap_port=7 if is_prefill else None)
        self.seen[spec.name] = Observation(phase=Phase.READY, node="n", pid=port, ready=ready)

    def observe(self) -> Mapping[str, Observation]:
        return dict(self.seen)

    def terminate(self, name: str) -> None:
        self.terminated.append(name)
        self.seen[name] = Observation(phase=Phase.ENDED, detail="exited with code 0")

    def remove(self, name: str) -> None:
        del self.seen[name]

    def close(self) -> None:
        """Nothing is held."""

    def lose(self, name: str) -> None:
        self.seen[name] = Observation(phase=Phase.LOST, detail="node gone")

    def url(self, name: str) -> str:
        ready = self.seen[name].ready
        assert ready is not None
        return ready.url


class RememberingRouter(RouterClient):
    def __init__(self) -> None:
        super().__init__(None)
        self.drained: list[str] = []
        self.forgotten: list[str] = []
        self.announced: list[tuple[str, str]] = []
        self.refuses = False
        self.ready: set[str] = set()
        # More fields of entries of GET /workers, by URL.
        self.entries: dict[str, dict[str, Any]] = {}
        # By URL of a worker.
        self.loads: dict[str, int] = {}
        # URLs that answer nothing after their first answer.
        self.silent: set[str] = set()

    async def answers(self, url: str, seconds: float) -> bool:
        return url not in self.silent

    async def num_requests(self, worker_url: str, worker_key: str | None) -> int:
        if worker_url not in self.loads:
            raise WorkerUnavailableError(f"{worker_url} does not answer")
        return self.loads[worker_url]

    async def workers(self, router_url: str) -> list[dict[str, Any]]:
        urls = self.ready | set(self.entries)
        return [{**ENTRY, "url": url, "ready": url in self.ready, **self.entries.get(url, {})} for url in urls]

    async def drain(self, router_url: str, worker_url: str, *, migrate: bool) -> None:
        assert migrate
        if self.refuses:
            raise WorkerUnavailableError("no other decode worker takes requests")
        self.drained.append(worker_url)

    async def forget(self, router_url: str, worker_url: str) -> None:
        self.forgotten.append(worker_url)

    async def announce(self, router_url: str, worker_url: str, worker_key: str | None) -> None:
        self.announced.append((router_url, worker_url))


class World:
    def __init__(
        self, config: ClusterConfig, router_socket: socket.socket | None = None, unregistered: Collection[str] = ()
    ) -> None:
        self.clock, self.placer, self.router = ManualClock(), DictPlacer(), RememberingRouter()
        self.events: list[str] = []
        self.supervisor = Supervisor(
            config,
            Credentials(b"t" * 32),
            self.placer,
            router_socket=router_socket,
            unregistered=unregistered,
            on_event=self.events.append,
            clock=self.clock,
            router=self.router,
        )

    async def turns(self, count: int = 8, seconds: float = 1.0) -> None:
        for _ in range(count):
            self.clock.advance(seconds)
            await self.supervisor.turn()
            # What it began ends before the next look.
            await asyncio.gather(*self.supervisor._tasks)

    async def states(self) -> dict[str, str]:
        return {process.name: process.state for process in (await self.supervisor.status()).processes}


@pytest.fixture
async def world() -> World:
    world = World(parse_config(CONFIG))
    await world.turns()
    return world


async def test_workers_are_started_with_the_routers_address(world):
    assert set(await world.states()) == {"router", "prefill-0", "decode-0", "decode-1"}
    for name in ("prefill-0", "decode-0", "decode-1"):
        args = world.placer.specs[name].args
        assert args[args.index("--router") + 1] == world.placer.url("router")


async def test_ready_is_what_the_router_has_proven(world):
    assert not (await world.supervisor.status()).is_ready
    world.router.ready = {world.placer.url(name) for name in ("prefill-0", "decode-0", "decode-1")}
    assert (await world.supervisor.status()).is_ready


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        ({"draining": True, "reason": "it drains"}, ("draining", "it drains")),
        (
            {"draining": True, "switching_to": "prefill", "reason": "it drains"},
            ("switching", "its new role: prefill"),
        ),
        ({"healthy": False, "reason": "it does not answer"}, ("unhealthy", "it does not answer")),
        ({"has_left": True, "reason": "its memory is released"}, ("unregistered", "its memory is released")),
        ({"reason": "it was lost"}, ("ready", "it was lost")),
    ],
)
async def test_a_status_has_the_routers_state_of_a_worker_and_its_reason(world, entry, shown):
    world.router.ready = {world.placer.url(name) for name in ("prefill-0", "decode-1")}
    world.router.entries = {world.placer.url("decode-0"): entry, world.placer.url("prefill-0"): {"mode": "prefill"}}
    status = await world.supervisor.status()
    found = {process.name: (process.state, process.detail) for process in status.processes}
    assert not status.is_ready
    assert found["decode-0"] == shown
    assert found["decode-1"] == ("ready", "")


@pytest.mark.parametrize("entry", [{"mode": "prefill"}, {"switching_to": "prefill"}])
async def test_a_worker_with_another_role_than_its_pool_is_removed_first(world, entry):
    world.router.ready = {world.placer.url(name) for name in ("prefill-0", "decode-0", "decode-1")}
    world.router.entries = {world.placer.url("decode-0"): entry, world.placer.url("prefill-0"): {"mode": "prefill"}}
    await world.supervisor.scale({"decode": 1})
    await world.turns()
    assert set(await world.states()) == {"router", "prefill-0", "decode-1"}


async def test_a_status_has_the_role_of_a_worker_that_differs_from_its_pool(world):
    world.router.ready = {world.placer.url(name) for name in ("prefill-0", "decode-0", "decode-1")}
    world.router.entries = {world.placer.url(name): {"mode": "prefill"} for name in ("prefill-0", "decode-0")}
    status = await world.supervisor.status()
    assert status.is_ready
    details = {process.name: process.detail for process in status.processes}
    assert details == {"router": "", "prefill-0": "", "decode-0": "serves as prefill", "decode-1": ""}


async def test_a_status_has_what_a_start_waits_for_until_its_node_has_room(world):
    world.placer.lose("decode-0")
    while (await world.states())["decode-0"] != "starting":
        await world.turns(1)
    for phase, waits_for, shown in (
        (Phase.PENDING, "waits for 1 CPU", "waits for 1 CPU"),
        (Phase.LOADING, "", "node gone"),
    ):
        world.placer.seen["decode-0"] = Observation(phase=phase, detail=waits_for)
        await world.turns(1)
        found = {process.name: process.detail for process in (await world.supervisor.status()).processes}
        assert found["decode-0"] == shown


async def test_a_status_shows_a_router_that_does_not_answer(world):
    async def is_silent(url):
        raise WorkerUnavailableError("no answer")

    assert {process.pool: process.state for process in (await world.supervisor.status()).processes}["router"] == "ready"
    world.supervisor._router.workers = is_silent
    (router,) = [process for process in (await world.supervisor.status()).processes if process.pool == "router"]
    assert (router.state, router.detail) == ("unhealthy", "it does not answer")


async def test_who_goes_moves_its_requests_first(world):
    url = world.placer.url("decode-1")
    await world.supervisor.scale({"decode": 1})
    await world.turns()
    assert world.router.drained == [url]
    assert set(await world.states()) == {"router", "prefill-0", "decode-0"}


async def test_who_cannot_move_its_requests_ends_them(world):
    world.router.refuses = True
    await world.supervisor.scale({"decode": 1})
    await world.turns()
    assert set(await world.states()) == {"router", "prefill-0", "decode-0"}
    assert any("its requests end there: no other decode worker" in event for event in world.events)


async def test_a_worker_that_is_lost_is_taken_out_of_the_router_and_replaced(world):
    url = world.placer.url("decode-0")
    world.placer.lose("decode-0")
    await world.turns()
    assert world.router.forgotten == [url]
    assert world.placer.url("decode-0") != url
    process = next(p for p in (await world.supervisor.status()).processes if p.name == "decode-0")
    assert process.num_restarts == 1


async def test_a_worker_that_answers_nothing_is_replaced(monkeypatch):
    monkeypatch.setattr(answer_watch, "_PAUSE", 0.0)
    world = World(parse_config(CONFIG))
    await world.turns()
    url = world.placer.url("decode-0")
    world.router.silent.add(url)
    async with asyncio.timeout(60.0):
        while "decode-0" in world.placer.seen and world.placer.url("decode-0") == url:
            await world.turns(1)
    await world.turns()
    assert world.router.forgotten == [url]
    assert any("decode-0: answered no request for 30 s, starting it again" in event for event in world.events)
    assert (await world.states())["decode-0"] == "ready"


async def test_a_router_comes_back_on_its_port_and_elsewhere_is_told_of_its_workers(world):
    old_url = world.placer.url("router")
    world.placer.seen["router"] = Observation(phase=Phase.ENDED, detail="killed by SIGKILL")
    await world.turns()
    assert world.placer.url("router") == old_url
    assert not world.router.announced
    # Another node.
    world.placer.lose("router")
    await world.turns(2)
    moved = world.placer.seen["router"].ready
    assert moved is not None
    new_url = "http://10.0.0.9:80"
    world.placer.seen["router"] = Observation(
        phase=Phase.READY, ready=ReadyInfo(pid=1, port=80, url=new_url), node="other"
    )
    await world.turns(3)
    workers = sorted(worker for url, worker in world.router.announced if url == new_url)
    assert workers == sorted(world.placer.url(name) for name in ("prefill-0", "decode-0", "decode-1"))
    # As workers do it themselves: again and again.
    await world.turns(2, seconds=10.0)
    assert len(world.router.announced) == 9


async def test_going_down_ends_everything(world):
    running = asyncio.create_task(world.supervisor.run())
    world.supervisor.down(now=False)
    async with asyncio.timeout(60):
        await running
    assert not world.placer.seen
    with pytest.raises(ConfigError, match="is going down"):
        await world.supervisor.scale({"decode": 1})


async def test_going_down_does_not_wait_for_the_next_regular_look(world, monkeypatch):
    monkeypatch.setattr(supervisor, "_INTERVAL", 3600.0)
    running = asyncio.create_task(world.supervisor.run())
    world.supervisor.down(now=False)
    async with asyncio.timeout(60):
        await running


async def test_an_error_in_a_step_is_logged_and_ends_no_worker(world, monkeypatch, caplog):
    looked = asyncio.Queue()

    def fail() -> Mapping[str, Observation]:
        looked.put_nowait(None)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(supervisor, "_INTERVAL", 0.0)
    with monkeypatch.context() as broken:
        broken.setattr(world.placer, "observe", fail)
        # The placer is called in threads; their results are used in this loop.
        broken.setattr(asyncio, "to_thread", call_here)
        running = asyncio.create_task(world.supervisor.run())
        async with asyncio.timeout(60):
            for _ in range(3):
                await looked.get()
    assert caplog.text.count("a step of the supervisor failed") == 1
    assert set(world.placer.seen) == {"router", "prefill-0", "decode-0", "decode-1"}
    world.supervisor.down(now=False)
    async with asyncio.timeout(60):
        await running
    assert not world.placer.seen


async def call_here(function):
    return function()


async def test_an_error_in_a_step_before_the_cluster_has_served_is_raised(monkeypatch):
    world = World(parse_config(CONFIG))
    monkeypatch.setattr(world.placer, "start", lambda spec: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await world.supervisor.run()


async def test_scaling_a_pool_that_is_not_there_is_refused(world):
    wrong: list[dict[str, Any]] = [{"encode": 1}, {"decode": -1}]
    for replicas in wrong:
        with pytest.raises(ConfigError):
            await world.supervisor.scale(replicas)


@pytest.mark.parametrize("has_served", [False, True])
async def test_a_worker_that_cannot_be_started_ends_a_cluster_that_never_was_one(has_served):
    world = World(parse_config(CONFIG))
    if has_served:
        await world.turns()
        await world.supervisor.scale({"decode": 3})
    world.placer.unstartable = "decode-2" if has_served else "decode-1"
    await world.turns(20)
    (event,) = [event for event in world.events if "not started again" in event]
    assert "exited with code 2" in event
    if has_served:
        assert "loading\nerror: There is no folder x" in event
        assert world.supervisor.failure is None
        assert (await world.states())["decode-2"] == "failed"
        assert set(world.placer.seen) == {"router", "prefill-0", "decode-0", "decode-1"}
    else:
        assert str(world.supervisor.failure) == "decode-1: There is no folder x"
        assert not world.placer.seen
        await world.supervisor.run()


@pytest.mark.parametrize("has_served", [False, True])
async def test_a_worker_that_never_starts_ends_the_cluster_with_the_reason_and_the_end_of_its_log(has_served):
    world = World(parse_config(CONFIG.replace(b"scale_down", b"max_failed_starts: 3, scale_down")))
    world.placer.exit_code = 1
    if has_served:
        await world.turns()
        world.placer.lose("decode-1")
    world.placer.unstartable = "decode-1"
    await world.turns(40)
    failure = world.supervisor.failure
    assert isinstance(failure, ClusterError)
    assert "decode-1: exited with code 1; 3 starts in a row have failed" in failure.message
    assert failure.message.endswith("the end of its log:\nloading\nerror: There is no folder x\n")
    assert [event for event in world.events if "so the cluster ends" in event]
    assert not world.placer.seen
    # Its requests end first, if there can be any. Workers end in parallel.
    router, workers = world.placer.terminated[:1], world.placer.terminated[1:]
    assert (router, sorted(workers)) == ((["router"], ["decode-0", "prefill-0"]) if has_served else ([], []))


async def test_with_a_socket_of_its_own_workers_need_not_wait_for_the_router_and_it_keeps_its_address():
    with bind("127.0.0.1", 0) as sock:
        world = World(parse_config(CONFIG), sock)
        await world.turns(1)
        assert set(world.placer.seen) == {"router", "prefill-0", "decode-0", "decode-1"}
        args = world.placer.specs["decode-0"].args
        assert args[args.index("--router") + 1] == f"http://10.0.0.1:{port_of(sock)}" == world.supervisor.router_url
        for _ in range(2):
            spec = world.placer.specs.pop("router")
            assert spec.listen_fd == sock.fileno() == int(spec.args[spec.args.index("--fd") + 1])
            world.placer.seen["router"] = Observation(phase=Phase.ENDED, detail="killed by SIGKILL")
            await world.turns(6)
        assert not world.router.announced
        world.supervisor.down(now=True)
        # Connections do not wait for a router that does not come back.
        assert sock.fileno() == -1


async def test_without_restarts_a_process_that_ends_stays_ended_until_it_is_restarted():
    config = parse_config(CONFIG.replace(b"scale_down", b"restart: false, scale_down"))
    with bind("127.0.0.1", 0) as sock:
        world = World(config, sock)
        await world.turns()
        # Without a router connections are refused.
        assert sock.fileno() == -1
        world.placer.seen["decode-1"] = Observation(phase=Phase.ENDED, detail="killed by SIGKILL")
        await world.turns(40)
        assert (await world.states())["decode-1"] == "failed"
        assert (await world.supervisor.status()).failed == ["decode-1"]
        assert world.supervisor.failure is None
        assert not world.router.forgotten
        assert not world.supervisor.restart("decode-0")
        assert world.supervisor.restart("decode-1")
        await world.turns(2)
        assert (await world.states())["decode-1"] == "ready"
        world.supervisor.down(now=True)
        with pytest.raises(ClusterError, match="is going down"):
            world.supervisor.restart("decode-1")


async def test_workers_of_an_unregistered_pool_do_not_count_for_the_router():
    world = World(
        parse_config(CONFIG.replace(b"prefill: {}", b"colocated: {}, prefill: {}")), unregistered={"colocated"}
    )
    await world.turns()
    assert "--router" not in world.placer.specs["colocated-0"].args
    world.router.ready = {world.placer.url(name) for name in ("prefill-0", "decode-0", "decode-1")}
    assert (await world.supervisor.status()).is_ready


async def test_running_requests_are_those_of_all_workers(world):
    world.router.loads = {world.placer.url("decode-0"): 2, world.placer.url("decode-1"): 1}
    assert await world.supervisor.num_requests() is None
    # After a change of roles a worker of this pool generates.
    world.router.loads[world.placer.url("prefill-0")] = 4
    assert await world.supervisor.num_requests() == 7


async def test_a_worker_counts_and_registers_in_its_current_role():
    role: dict[str, Any] = {"role": "prefill", "switching_to": None, "bootstrap_port": 7}
    posted = []

    async def get_role(_: web.Request) -> web.Response:
        return web.json_response(role)

    async def get_load(_: web.Request) -> web.Response:
        return web.json_response([{"num_reqs": 2}, {"num_reqs": 1}])

    async def get_workers(_: web.Request) -> web.Response:
        left = [{"url": "http://d:1", "mode": "decode", "reason": "its memory is released"}]
        return web.json_response({"workers": [{"url": "http://p:1", **ENTRY}], "left": left})

    async def register(request: web.Request) -> web.Response:
        posted.append(await request.json())
        return web.json_response({})

    app = web.Application()
    app.router.add_get("/role", get_role)
    app.router.add_get("/get_load", get_load)
    app.router.add_post("/register", register)
    app.router.add_get("/workers", get_workers)
    async with TestServer(app) as server:
        url, client = str(server.make_url("")).rstrip("/"), RouterClient(None)
        assert [(w["url"], w.get("has_left", False)) for w in await client.workers(url)] == [
            ("http://d:1", True),
            ("http://p:1", False),
        ]
        assert await client.num_requests(url, None) == 0
        await client.announce(url, url, None)
        role["switching_to"] = "decode"
        await client.announce(url, url, None)
        role |= {"role": "decode", "switching_to": None, "bootstrap_port": None}
        assert await client.num_requests(url, None) == 3
        await client.announce(url, url, None)
    expected = [{"mode": "prefill", "registry_url": url, "bootstrap_port": 7}, {"mode": "decode", "registry_url": url}]
    assert posted == expected
    # The worker has ended: the caller repeats it.
    await client.announce(url, url, None)


async def test_only_a_process_that_accepts_a_connection_and_is_silent_answers_nothing():
    client = RouterClient(None)
    with bind("127.0.0.1", 0) as sock:
        url = f"http://127.0.0.1:{port_of(sock)}"
        assert not await client.answers(url, 0.01)
    assert await client.answers(url, 60.0)
    async with TestServer(web.Application()) as server:
        assert await client.answers(str(server.make_url("")).rstrip("/"), 60.0)


def test_a_cluster_that_does_not_come_to_be_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path / "run"))
    (tmp_path / "run").mkdir(mode=0o700)
    # The folder of the other cluster.
    with OwnedFolder(socket_path("splitserve").parent), pytest.raises(ConfigError, match="is up"):
        run_cluster_up(parse_config(CONFIG), None)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_up_with_a_taken_port_leaves_no_folder(monkeypatch):
    # A folder with a short name: a long one has no sockets.
    with tempfile.TemporaryDirectory(prefix="t") as folder, socket.create_server(("127.0.0.1", 0)) as taken:
        config = parse_config(
            f"model: smollm2\npools: {{colocated: {{}}}}\nrouter: {{port: {port_of(taken)}}}".encode()
        )
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with pytest.raises(AddressTakenError):
            run_cluster_up(config)
        assert os.listdir(folder) == []
