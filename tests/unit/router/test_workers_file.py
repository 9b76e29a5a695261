"""`--workers-file`: the registry follows it, and an error in it does no harm."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from splitserve.core.errors import ConfigError, UnknownWorkerError
from splitserve.core.request import DisaggregationMode
from splitserve.router.register import WorkersFile, read_workers
from splitserve.router.registry import WorkerRegistry
from splitserve.router.worker import Worker
from support.router_world import answers, start_router, start_worker

P1 = {"url": "http://p1:1", "mode": "prefill", "bootstrap_port": 8998}
D1 = {"url": "http://d1:1", "mode": "decode"}
D2 = {"url": "http://d2:1", "mode": "decode"}


class World:
    """A file and the registry that follows it."""

    def __init__(self, path: Path, *workers: dict[str, Any]) -> None:
        self.path = path
        self._num_writes = 0
        self.registry = WorkerRegistry()
        self.write(*workers)
        self.file = WorkersFile(path, self.registry, 1.0)

    def write(self, *workers: dict[str, Any]) -> None:
        self.write_text("".join(json.dumps(worker) + "\n" for worker in workers))

    def write_text(self, text: str) -> None:
        self.path.write_text(text)
        self._num_writes += 1
        # Clocks of file systems are coarse.
        os.utime(self.path, ns=(self._num_writes, self._num_writes))

    def looks(self) -> None:
        """As often as it takes."""
        look(self.file)
        look(self.file)
        self.registry.forget_gone()

    def state(self) -> dict[str, str]:
        return {w.url: f"{w.mode}{' draining' * w.drains}" for w in self.registry.all()}

    def get(self, worker: dict[str, Any]) -> Worker:
        return self.registry.get(worker["url"])


def look(file: WorkersFile) -> None:
    """Check the file once."""
    if (listed := file.changed()) is not None:
        file.take(listed)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "workers.jsonl"


def begin(worker: Worker) -> None:
    worker.calls.add(object())  # type: ignore[arg-type]


def replace(path: Path, worker: dict[str, Any]) -> None:
    """In one go, as careful writers do."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(worker))
    new.replace(path)


def test_a_file_is_json_lines_with_comments(path: Path) -> None:
    path.write_text(f"# the first rack\n\n{json.dumps(P1)}\n  # more\n{json.dumps({**D1, 'rack': 7})}\n")
    found = read_workers(path)
    assert [(url, w.role, w.bootstrap_port) for url, w in found.items()] == [
        ("http://p1:1", DisaggregationMode.PREFILL, 8998),
        ("http://d1:1", DisaggregationMode.DECODE, None),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("nonsense", "it is no JSON (Expecting value: line 1 column 1 (char 0)): write one object a line"),
        ("[", "it is no JSON"),
        ("5", "it is no object with a url"),
        ('{"mode": "decode"}', "it is no object with a url"),
        ('{"url": "http://d9:1"}', "mode Field required"),
        ('{"url": "http://d9:1", "mode": "both"}', "mode Input should be 'prefill', 'decode' or 'null'"),
        ('{"url": "d9", "mode": "decode"}', "'d9' is not the URL of a worker or router: write http://HOST:PORT"),
        ('{"url": "d9:80", "mode": "decode"}', "'d9:80' is not the URL of a worker or router: write http://d9:80"),
        ('{"url": "http://p9:1", "mode": "prefill"}', "a prefill worker must give its bootstrap_port"),
        ('{"url": "http://d1:1/", "mode": "decode"}', "this worker's url has come before"),
    ],
)
def test_a_wrong_line_is_named_with_its_number_and_a_remedy(path: Path, line: str, problem: str) -> None:
    path.write_text(f"{json.dumps(D1)}\n\n{line}\n")
    with pytest.raises(ConfigError) as error:
        read_workers(path)
    assert f"--workers-file {path}, line 3: " in error.value.message
    assert problem in error.value.message
    assert "write one" in error.value.message or "such as" in error.value.message or "leave" in error.value.message


def test_a_router_does_not_start_with_a_file_that_is_missing_or_wrong(path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; write one worker a line"):
        WorkersFile(path, WorkerRegistry(), 1.0)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is no text"):
        WorkersFile(path, WorkerRegistry(), 1.0)


def test_workers_come_change_and_go_with_their_lines(path: Path) -> None:
    world = World(path, P1, D1)
    assert world.state() == {"http://p1:1": "prefill", "http://d1:1": "decode"}
    world.write({**P1, "bootstrap_port": 9001}, {**D1, "mode": "null"}, D2)
    world.looks()
    assert world.state() == {"http://p1:1": "prefill", "http://d1:1": "null", "http://d2:1": "decode"}
    assert world.get(P1).bootstrap_port == 9001
    assert all(worker.is_static for worker in world.registry.all())
    world.write(D2)
    world.looks()
    assert world.state() == {"http://d2:1": "decode"}


def test_a_worker_whose_line_goes_drains_and_is_forgotten_when_it_is_idle(path: Path) -> None:
    world = World(path, P1, D1)
    worker = world.get(D1)
    begin(worker)
    world.write(P1)
    world.looks()
    assert world.state() == {"http://p1:1": "prefill", "http://d1:1": "decode draining"}
    assert not worker.takes_requests
    worker.calls.clear()
    world.looks()
    assert world.state() == {"http://p1:1": "prefill"}


def test_a_line_that_comes_back_takes_its_worker_back(path: Path) -> None:
    world = World(path, P1, D1)
    worker = world.get(D1)
    begin(worker)
    world.write(P1)
    world.looks()
    world.write(P1, D1)
    world.looks()
    assert world.get(D1) is worker
    assert worker.takes_requests


def test_what_an_operator_drains_stays_so_when_other_lines_change(path: Path) -> None:
    world = World(path, P1, D1)
    world.get(D1).is_draining = True
    world.write(P1, D1, D2)
    world.looks()
    assert world.state()["http://d1:1"] == "decode draining"


def test_a_worker_that_an_operator_removed_stays_away(path: Path) -> None:
    world = World(path, P1, D1)
    world.registry.remove("http://d1:1")
    world.write(P1, D2)
    world.looks()
    assert world.state() == {"http://p1:1": "prefill", "http://d2:1": "decode"}


@pytest.mark.parametrize("harm", ["nonsense", "deleted"])
def test_a_bad_file_is_reported_once_and_the_workers_of_before_stay(
    path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(path, P1, D1)
    if harm == "deleted":
        path.unlink()
    else:
        world.write_text(f"{json.dumps(P1)}\n{{\n")
    for _ in range(3):
        world.looks()
    assert world.state() == {"http://p1:1": "prefill", "http://d1:1": "decode"}
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert ("line 2: it is no JSON" if harm == "nonsense" else "No such file") in record.getMessage()
    assert "The 2 workers of before stay" in record.getMessage()
    world.write(D2)
    world.looks()
    assert world.state() == {"http://d2:1": "decode"}


def test_what_is_being_written_is_not_taken(path: Path) -> None:
    world = World(path, P1, D1)
    for i in range(3):
        world.write_text(json.dumps(P1) + "\n" * (i + 1))
        look(world.file)
        assert world.state() == {"http://p1:1": "prefill", "http://d1:1": "decode"}
    look(world.file)
    assert world.state() == {"http://p1:1": "prefill"}


def test_the_file_counts_where_it_is_a_link_that_changes(path: Path, tmp_path: Path) -> None:
    """As mounted configuration does."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text(json.dumps(D1))
    second.write_text(json.dumps(D2))
    path.symlink_to(first)
    registry = WorkerRegistry()
    file = WorkersFile(path, registry, 1.0)
    link = tmp_path / "next"
    link.symlink_to(second)
    link.replace(path)
    look(file)
    look(file)
    registry.forget_gone()
    assert [w.url for w in registry.all()] == ["http://d2:1"]
    with pytest.raises(UnknownWorkerError):
        registry.get("http://d1:1")


async def test_a_router_follows_its_file_while_it_runs(path: Path) -> None:
    async with start_worker(answers({"text": "a"})) as a, start_worker(answers({"text": "b"})) as b:
        replace(path, {"url": a.url, "mode": "null"})
        async with (
            start_router(workers_file=path, health_interval=0.02) as router,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as client,
        ):

            async def ask() -> str:
                async with client.post(f"{router}/generate", json={"text": "x"}) as response:
                    return str((await response.json())["text"])

            assert await ask() == "a"
            replace(path, {"url": b.url, "mode": "null"})
            limit = time.monotonic() + 60
            while await ask() == "a":
                assert time.monotonic() < limit
                await asyncio.sleep(0.02)
            assert [await ask() for _ in range(4)] == ["b"] * 4
