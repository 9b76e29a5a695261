from __future__ import annotations

import sys

import psutil
import pytest

from splitserve.config import WorkerConfig
from splitserve.launch import scheduler_link
from splitserve.launch.scheduler_link import SchedulerProcess, SchedulerStart

START = SchedulerStart(config=WorkerConfig(), model_folder="m", to_scheduler="ipc://a", from_scheduler="ipc://b")


async def start(program: str) -> SchedulerProcess:
    return await SchedulerProcess.start((sys.executable, "-c", program), START)


async def test_it_is_told_everything_in_one_line_and_ends_with_its_input() -> None:
    scheduler = await start(
        "import json, sys\nassert json.loads(sys.stdin.readline())['model_folder'] == 'm'\nsys.stdin.read()"
    )
    assert not scheduler.ended.done()
    await scheduler.close()
    assert scheduler.ended.result() == 0


async def test_one_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_link, "END_TIMEOUT", 0.1)
    scheduler = await start("import threading; threading.Event().wait()")
    pid = scheduler.pid
    await scheduler.close()
    await scheduler.close()
    assert scheduler.ended.result() == -9
    assert not psutil.pid_exists(pid)


async def test_one_that_dies_before_it_is_told_anything_is_noticed() -> None:
    scheduler = await start("import os; os._exit(3)")
    assert await scheduler.ended == 3
    await scheduler.close()
