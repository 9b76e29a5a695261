"""A start that is interrupted halfway leaves no process behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from splitserve.core.config import WorkerConfig
from splitserve.offline.backends import SchedulerBackend
from splitserve.ranks import processes


class SlowStart:
    """In place of SchedulerProcess: `start` ends when `release` is set."""

    def __init__(self) -> None:
        self.starting, self.release = asyncio.Event(), asyncio.Event()
        self.is_closed = False

    async def start(self, command: object, start: object, early: object) -> Any:
        self.starting.set()
        await self.release.wait()
        return self

    async def close(self) -> None:
        self.is_closed = True


async def test_a_process_whose_start_was_interrupted_is_waited_for_and_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process = SlowStart()
    monkeypatch.setattr(processes, "SchedulerProcess", process)
    backend = SchedulerBackend(WorkerConfig(), tmp_path, None, load_timeout=10.0)
    opening = asyncio.create_task(backend.open())
    await process.starting.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    closing = asyncio.create_task(backend.close())
    process.release.set()
    await closing
    assert process.is_closed
