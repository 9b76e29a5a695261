"""A worker's switch of its role, step by step: whatever fails, it serves on in its old role and is announced again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from splitserve.core.config import CacheConfig, WorkerConfig
from splitserve.core.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    RoleSwitchRunningError,
    SplitserveError,
    WorkerUnavailableError,
)
from splitserve.core.request import DisaggregationMode
from splitserve.server.front_end import RoleChange
from splitserve.server.scheduler_group import HalfSwitchedError
from support.worker_surroundings import WorkerSurroundings

NULL, PREFILL, DECODE = DisaggregationMode.NULL, DisaggregationMode.PREFILL, DisaggregationMode.DECODE
DEADLINE = 60.0


class Surroundings(WorkerSurroundings):
    """Surroundings that accept orders to change the role."""

    def __init__(self, mode: DisaggregationMode = DECODE, **disaggregation: Any) -> None:
        super().__init__(mode, **disaggregation)
        self.known_as: tuple[DisaggregationMode, int | None] | None = (mode, self.port)

    async def prepare_role(self, mode: DisaggregationMode, bootstrap_url: str | None, timeout: float) -> None:
        assert (bootstrap_url is not None) == (mode is PREFILL)
        assert self.known_as is not None
        await self._step("prepare")

    async def drain_role(self, timeout: float) -> None:
        assert self.front.requests.is_draining
        await self._step("drain")

    async def commit_role(self, mode: DisaggregationMode) -> None:
        await self._step("commit")

    def break_off(self, error: SplitserveError) -> None:
        assert (error.http_status, error.reason) == (503, "worker_draining")
        self.steps.append("break off")

    async def open(self, port: int | None) -> str:
        await self._step("open")
        self.port = port or 7000
        return f"http://127.0.0.1:{self.port}"

    def enter(self, mode: DisaggregationMode, bootstrap_port: int | None) -> None:
        assert self.known_as is None, "announced twice"
        assert not self.front.requests.is_draining
        self.known_as = mode, bootstrap_port

    async def leave(self) -> None:
        self.known_as = None
        await self._step("leave")

    def check_serves_as(self, mode: DisaggregationMode, port: int | None) -> None:
        assert self.front.mode is mode
        assert self.known_as == (mode, port)
        assert self.port == port
        assert self.front.switching_to is None
        assert self.front.unready_reason() is None


async def test_it_changes_when_nothing_runs_and_is_announced_in_its_new_role() -> None:
    around = Surroundings()
    report = await around.switch.switch(RoleChange(PREFILL))
    assert around.steps == ["open", "prepare", "leave", "drain", "commit"]
    assert (report.old, report.new) == (DECODE, PREFILL)
    around.check_serves_as(PREFILL, 7000)
    assert around.front.bootstrap_port == 7000
    await around.switch.switch(RoleChange(NULL))
    around.check_serves_as(NULL, None)
    await around.switch.switch(RoleChange(PREFILL, bootstrap_port=7123))
    around.check_serves_as(PREFILL, 7123)
    # What it is already needs no steps.
    around.steps.clear()
    assert (await around.switch.switch(RoleChange(PREFILL))).seconds == 0.0
    assert around.steps == []


@pytest.mark.parametrize("mode", [DECODE, PREFILL, NULL])
@pytest.mark.parametrize("step", ["open", "prepare", "leave", "drain", "commit"])
async def test_whatever_step_fails_it_goes_on_as_it_was(step: str, mode: DisaggregationMode) -> None:
    around = Surroundings(mode)
    around.fails[step] = ConfigError("no port") if step == "open" else WorkerUnavailableError("no memory")
    goal = PREFILL if mode is not PREFILL else DECODE
    if step == "open" and goal is not PREFILL:
        return
    with pytest.raises(InvalidRequestError if step == "open" else WorkerUnavailableError):
        await around.switch.switch(RoleChange(goal))
    assert around.steps[-1] == "cancel"
    around.check_serves_as(mode, 7000 if mode is PREFILL else None)
    around.fails.clear()
    await around.switch.switch(RoleChange(goal))
    around.check_serves_as(goal, 7000 if goal is PREFILL else None)


async def test_requests_that_do_not_end_in_time_keep_the_role_and_are_not_disturbed() -> None:
    around = Surroundings()
    with around.front.requests.admit({"r": ("r",)}):
        with pytest.raises(DeadlineExceededError, match="1 samples were still running"):
            await around.switch.switch(RoleChange(NULL, timeout=0.01))
        around.check_serves_as(DECODE, None)
    assert "break off" not in around.steps


async def test_with_migrate_requests_are_broken_off_when_the_new_role_is_prepared() -> None:
    around = Surroundings()
    await around.switch.switch(RoleChange(NULL, migrate=True))
    assert around.steps == ["prepare", "leave", "break off", "drain", "commit"]


async def test_while_it_changes_it_takes_nothing_and_no_other_order() -> None:
    around = Surroundings()
    around.held["drain"] = asyncio.Event()
    task = asyncio.create_task(around.switch.switch(RoleChange(NULL)))
    await asyncio.wait_for(around.reached.wait(), DEADLINE)
    assert around.front.switching_to is NULL
    assert "changing its role" in str(around.front.unready_reason())
    with pytest.raises(RoleSwitchRunningError):
        await around.switch.switch(RoleChange(PREFILL))
    # The switch continues even if its client disconnects.
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    with pytest.raises(RoleSwitchRunningError):
        await around.switch.switch(RoleChange(PREFILL))
    around.held["drain"].set()
    (switch,) = (task for task in asyncio.all_tasks() if task.get_name() == "role-switch")
    await asyncio.wait_for(switch, DEADLINE)
    around.check_serves_as(NULL, None)
    await around.switch.switch(RoleChange(DECODE))


async def test_a_worker_that_ends_gives_the_switch_up_and_comes_back_nowhere() -> None:
    around = Surroundings()
    around.held["drain"] = asyncio.Event()
    task = asyncio.create_task(around.switch.switch(RoleChange(NULL)))
    await asyncio.wait_for(around.reached.wait(), DEADLINE)
    await around.switch.close()
    await asyncio.gather(task, return_exceptions=True)
    assert around.steps[-1] == "cancel"
    assert around.known_as is None
    assert around.front.requests.is_draining
    with pytest.raises(RoleSwitchRunningError):
        await around.switch.switch(RoleChange(PREFILL))


async def test_schedulers_that_disagree_end_the_worker() -> None:
    around = Surroundings()
    around.fails["commit"] = HalfSwitchedError("rank 1 is gone")
    with pytest.raises(HalfSwitchedError):
        await around.switch.switch(RoleChange(NULL))
    assert around.switch.broken.result() == "rank 1 is gone"
    assert around.known_as is None
    assert around.front.unready_reason() is not None


async def test_a_role_that_it_cannot_have_is_refused_before_anything_happens() -> None:
    around = Surroundings()
    cache = CacheConfig(shared_pool="/dev/shm/pool")
    around.front.config = WorkerConfig(disaggregation=around.front.config.disaggregation, cache=cache)
    with pytest.raises(InvalidRequestError, match="--shared-pool"):
        await around.switch.switch(RoleChange(NULL))
    # It would listen where others could reach it, and has no token to keep them out.
    around = Surroundings(NULL, host="192.0.2.1")
    with pytest.raises(InvalidRequestError, match="cluster-token-file"):
        await around.switch.switch(RoleChange(DECODE))
    assert around.steps == []
    around.check_serves_as(NULL, None)


def test_the_front_end_does_without_torch_which_takes_seconds_and_memory() -> None:
    code = "import sys, splitserve.worker.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
