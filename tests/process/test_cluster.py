"""`splitserve cluster` as its user runs it: one file, on this machine and on Ray nodes that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from splitserve.core.errors import WorkerUnavailableError
from splitserve.deploy.control import ClusterStatus, ControlClient, ProcessStatus, socket_path
from splitserve.process.child import POLL_INTERVAL, ChildProcess
from splitserve.process.owned_folder import RUN_FOLDER_VARIABLE
from splitserve.tools.chaos.streams import follow_undisturbed, make_requests
from support import ray_nodes
from support.processes import running, wait_ready
from support.streams import follow_all
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.process

# Seconds that anything may take.
DEADLINE = 180.0
NUM_TOKENS = 160
PAIRS = {"prefill": {"replicas": 1}, "decode": {"replicas": 2}}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path / "run"))
    return make_tiny_model("llama", tmp_path / "llama")


class Cluster:
    """One that is up, and its user beside it."""

    def __init__(self, name: str, child: ChildProcess) -> None:
        self._name = name
        self._client = ControlClient(name)
        self.child = child

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "splitserve", "cluster", *words, "--name", self._name]
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)

    def processes(self) -> dict[str, ProcessStatus]:
        return {process.name: process for process in self._client.status().processes}

    def wait_until(self, holds: Callable[[ClusterStatus], bool]) -> dict[str, ProcessStatus]:
        deadline = time.monotonic() + DEADLINE
        while True:
            assert self.child.exit_code is None, self.child.log_tail(60)
            with suppress(WorkerUnavailableError):
                if holds(self._client.status()):
                    return self.processes()
            assert time.monotonic() < deadline, f"{self._client.status()}\n{self.child.log_tail(60)}"
            time.sleep(POLL_INTERVAL)

    def wait_for(self, name: str, **fields: Any) -> ProcessStatus:
        def holds(status: ClusterStatus) -> bool:
            found = [process for process in status.processes if process.name == name]
            return bool(found) and all(getattr(found[0], field) == value for field, value in fields.items())

        return self.wait_until(holds)[name]

    def wait_settled(self) -> dict[str, ProcessStatus]:
        return self.wait_until(lambda status: status.is_ready)


@contextmanager
def up(tmp_path: Path, model: Path, pools: dict[str, Any], *options: str) -> Iterator[Cluster]:
    name = "trial"
    config = {
        "name": name,
        "model": str(model),
        "pools": {pool: {"cpus": 1, **settings} for pool, settings in pools.items()},
        "worker_args": ["--dtype", "float32", "--max-total-tokens", "20000"],
        "router": {"port": 0},
        "supervision": {"drain_timeout": 10, "scale_down": "migrate"},
    }
    # JSON is YAML, too.
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps(config))
    with running(["cluster", "up", str(path), *options], tmp_path, name="up") as child:
        yield Cluster(name, child)
    assert not socket_path(name).exists()


def check_gone(pids: set[int | None]) -> None:
    """What has served is not there any more, nor are its children."""
    for pid in pids - {None}:
        # A process that ends in between, or that its parent has not reaped, is gone.
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            assert "splitserve" not in psutil.Process(pid).cmdline()


@pytest.mark.soak
@pytest.mark.parametrize(
    "pools",
    [{"colocated": {"replicas": 1}}, PAIRS],
    ids=lambda p: " and ".join(p),
)
def test_on_this_machine_what_dies_is_started_again_and_a_signal_ends_it_all(tmp_path, model, pools):
    with up(tmp_path, model, pools) as cluster:
        url = wait_ready(cluster.child, DEADLINE).url
        requests = make_requests(6, 12)
        expected = follow_undisturbed(url, requests, timeout=DEADLINE)
        name = f"{list(pools)[-1]}-0"
        before = cluster.processes()
        os.kill(before[name].pid, signal.SIGKILL)
        cluster.wait_for(name, num_restarts=1)
        after = cluster.wait_settled()
        assert after[name].pid != before[name].pid
        assert after["router"].pid == before["router"].pid
        outcomes = follow_all(url, requests, timeout=DEADLINE)
        assert {i: problem for i, o in outcomes.items() if (problem := o.difference(expected[i]))} == {}
        refused = cluster.command("scale", "encode=2")
        assert refused.returncode == 2
        assert "there is no pool 'encode'" in refused.stderr
        cluster.child.send_signal(signal.SIGTERM)
        assert cluster.child.wait(DEADLINE)
        assert cluster.child.exit_code == 0, cluster.child.log_tail(60)
        check_gone({process.pid for process in (*before.values(), *after.values())})


@pytest.mark.soak
@pytest.mark.skipif(ray_nodes.missing() is not None, reason=str(ray_nodes.missing()))
@pytest.mark.parametrize(
    "pools",
    [{"colocated": {"replicas": 2}}, PAIRS],
    ids=lambda p: " and ".join(p),
)
def test_on_ray_streams_outlive_a_node_and_its_worker_is_placed_on_the_next(tmp_path, model, pools):
    pool = list(pools)[-1]
    num_workers = sum(settings["replicas"] for settings in pools.values())
    with ExitStack() as closing:
        nodes = closing.enter_context(ray_nodes.ray_nodes())
        # For all workers but one.
        nodes.start(num_cpus=num_workers - 1)
        cluster = closing.enter_context(up(tmp_path, model, pools, "--ray", nodes.address))
        waiting = cluster.wait_for(f"{pool}-1", detail="waits for a node with 1 CPU")
        assert waiting.url is None
        second = nodes.start(num_cpus=1)
        url = wait_ready(cluster.child, DEADLINE).url
        before = cluster.processes()
        assert [name for name, process in before.items() if second.has(process.pid)] == [f"{pool}-1"]
        requests = make_requests(20, NUM_TOKENS)
        expected = follow_undisturbed(url, requests, timeout=DEADLINE)

        disturbed = follow_all(url, requests, timeout=DEADLINE, disturb=second.kill, after=3)
        assert {i: problem for i, o in disturbed.items() if (problem := o.difference(expected[i]))} == {}
        cluster.wait_for(f"{pool}-1", num_restarts=1, detail="waits for a node with 1 CPU")
        third = nodes.start(num_cpus=1)
        after = cluster.wait_settled()
        assert third.has(after[f"{pool}-1"].pid)

        scaled = cluster.command("scale", f"{pool}=1", "--wait", str(DEADLINE - 30))
        assert scaled.returncode == 0, scaled.stderr
        workers = httpx.get(f"{url}/workers").json()["workers"]
        assert len(workers) == num_workers - 1
        follow_undisturbed(url, requests[:2], timeout=DEADLINE)

        done = cluster.command("down")
        assert done.returncode == 0, done.stderr
        assert cluster.child.wait(DEADLINE)
        assert cluster.child.exit_code == 0, cluster.child.log_tail(60)
        check_gone({process.pid for process in (*before.values(), *after.values())})
