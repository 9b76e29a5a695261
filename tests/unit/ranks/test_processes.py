from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from splitserve.core.config import ModelConfig, WorkerConfig
from splitserve.core.parallel import ParallelConfig, ParallelRank
from splitserve.ranks import processes
from splitserve.ranks.lockstep_channel import LockstepEndpoints
from splitserve.ranks.processes import EarlyProcess, SchedulerProcess, _starts_of_ranks, first_end
from splitserve.ranks.rank_heartbeat import SILENT_HEARTBEATS
from splitserve.ranks.scheduler_start import SchedulerStart

START = SchedulerStart(config=WorkerConfig(), model_folder="m", to_scheduler="ipc://a", from_scheduler="ipc://b")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that starts slowly must not be killed before it reads the end of its input."""
    monkeypatch.setattr(processes, "END_TIMEOUT", 60.0)


async def start(program: str, rank: ParallelRank | None = None) -> SchedulerProcess:
    told = START if rank is None else msgspec.structs.replace(START, rank=rank)
    return await SchedulerProcess.start((sys.executable, "-c", program), told)


async def test_it_is_told_everything_in_one_line_and_ends_with_its_input() -> None:
    scheduler = await start(
        "import json, sys\nassert json.loads(sys.stdin.readline())['model_folder'] == 'm'\nsys.stdin.read()"
    )
    assert not scheduler.ended.done()
    await scheduler.close()
    assert scheduler.ended.result() == 0


async def test_one_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "END_TIMEOUT", 0.1)
    scheduler = await start("import threading; threading.Event().wait()")
    pid = scheduler.pid
    await scheduler.close()
    await scheduler.close()
    assert scheduler.ended.result() == -9
    assert not psutil.pid_exists(pid)


async def test_one_that_is_silent_is_killed_without_a_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processes, "END_TIMEOUT", float("inf"))
    told = msgspec.structs.replace(START, heartbeat=str(tmp_path / "pipe"))
    scheduler = await SchedulerProcess.start((sys.executable, "-c", WAITS), told)
    assert scheduler._heartbeats is not None
    scheduler._heartbeats.num_missed = SILENT_HEARTBEATS
    await scheduler.close()
    assert scheduler.ended.result() == -9


async def test_one_that_is_stopped_is_killed_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "END_TIMEOUT", float("inf"))
    scheduler = await start(WAITS)
    os.kill(scheduler.pid, signal.SIGSTOP)
    await asyncio.to_thread(os.waitid, os.P_PID, scheduler.pid, os.WSTOPPED | os.WNOWAIT)
    await scheduler.close()
    assert scheduler.ended.result() == -9


async def test_one_that_dies_before_it_is_told_anything_is_noticed() -> None:
    scheduler = await start("import os; os._exit(3)")
    assert await scheduler.ended == 3
    await scheduler.close()


async def test_a_process_that_was_started_early_is_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; sys.stdin.readline(); sys.stdin.read(); sys.exit(5)"
    monkeypatch.setattr(processes, "SCHEDULER_COMMAND", (sys.executable, "-c", program))
    early = EarlyProcess()
    taken = early.take()
    assert taken is not None
    assert early.take() is None
    scheduler = await SchedulerProcess.start(("no", "command"), START, taken)
    # It belongs to the scheduler now.
    early.close()
    assert not scheduler.ended.done()
    await scheduler.close()
    assert scheduler.ended.result() == 5


def test_a_process_that_no_scheduler_took_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    spawn = processes.spawn
    monkeypatch.setattr(processes, "SCHEDULER_COMMAND", (sys.executable, "-c", WAITS))
    monkeypatch.setattr(processes, "spawn", lambda *args: started.append(spawn(*args)) or started[0])
    EarlyProcess().close()
    assert started[0].returncode == -9


WAITS = "import threading; threading.Event().wait()"


async def test_the_first_end_in_a_group_is_that_of_all_its_ranks_and_of_no_others() -> None:
    ranks = [r for dp in (0, 1) for r in ParallelRank(tp_size=2, dp_size=2, dp_rank=dp).group()]
    processes = [await start(WAITS, rank) for rank in ranks]
    ended = asyncio.create_task(first_end(processes))
    psutil.Process(processes[3].pid).kill()
    name = "tensor parallel rank 1 of pipeline stage 0, data parallel rank 1"
    assert await ended == f"scheduler process of {name} was killed by signal 9"
    assert await processes[2].ended == -9
    assert not processes[0].ended.done()
    for process in processes:
        process.kill()
        await process.ended


async def test_the_end_of_a_data_parallel_rank_is_that_of_all_where_they_compute_together() -> None:
    processes = [await start(WAITS, ParallelRank(dp_rank=dp, dp_size=3)) for dp in range(3)]
    ended = asyncio.create_task(first_end(processes, all_together=True))
    psutil.Process(processes[1].pid).kill()
    assert await ended == "scheduler process of data parallel rank 1 was killed by signal 9"
    assert [await process.ended for process in processes] == [-9, -9, -9]


async def test_of_a_group_it_is_the_killed_one_that_is_named() -> None:
    driver, follower = ParallelRank(pp_size=2, pp_rank=1), ParallelRank(pp_size=2)
    failed, killed = await start("import sys; sys.exit(1)", driver), await start(WAITS, follower)
    killed.kill()
    await asyncio.gather(failed.ended, killed.ended)
    assert "pipeline stage 0 was killed by signal 9" in await first_end([failed, killed])


def test_every_rank_of_every_scheduler_is_told_its_place() -> None:
    config = WorkerConfig(parallel=ParallelConfig(tp_size=2, pp_size=2), dp_size=2)
    told = msgspec.structs.replace(START, config=config)
    starts = [s for dp in (0, 1) for s in _starts_of_ranks(told, dp, "/pipes")]
    assert len({s.rank for s in starts}) == 8
    assert [s.rank.is_driver for s in starts] == [True, False, False, False] * 2
    assert len({s.endpoints.init_method for s in starts if s.endpoints}) == 2
    assert not any(s.lockstep for s in starts)
    (alone,) = _starts_of_ranks(START, 0, "/pipes")
    assert (alone.rank, alone.endpoints) == (ParallelRank(), None)


@pytest.mark.parametrize(("tp_size", "group_size"), [(1, 1), (2, 1), (4, 2), (6, 3)])
def test_ranks_that_share_experts_are_a_group_for_each_scheduler(tp_size: int, group_size: int) -> None:
    config = WorkerConfig(model=ModelConfig(dp_attention=True), parallel=ParallelConfig(tp_size=tp_size), dp_size=2)
    lockstep = LockstepEndpoints.in_folder("/pipes", 2)
    told = msgspec.structs.replace(START, config=config, lockstep=lockstep)
    starts = [s for dp in (0, 1) for s in _starts_of_ranks(told, dp, "/pipes")]
    assert [(s.rank.dp_rank, s.rank.tp_rank) for s in starts] == [(d, t) for d in (0, 1) for t in range(group_size)]
    assert {s.rank.tp_size for s in starts} == {group_size}
    # Followers, too, meet the ranks of the other groups. They get their orders from their own driver alone.
    assert {s.lockstep for s in starts} == {lockstep}
    assert len({s.endpoints for s in starts}) == (2 if group_size > 1 else 1)


async def test_the_end_of_a_follower_is_that_of_all_groups_that_share_experts() -> None:
    places = [ParallelRank(tp_rank=tp, tp_size=2, dp_rank=dp, dp_size=2) for dp in range(2) for tp in range(2)]
    processes = [await start(WAITS, place) for place in places]
    ended = asyncio.create_task(first_end(processes, all_together=True))
    psutil.Process(processes[3].pid).kill()
    assert "tensor parallel rank 1 of pipeline stage 0, data parallel rank 1 was killed by signal 9" in await ended
    assert [await process.ended for process in processes] == [-9] * 4


async def test_a_rank_without_heartbeats_is_killed_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processes, "HEARTBEAT_SECONDS", 0.01)
    # It sends its first heartbeat, and hangs.
    hangs = (
        f"import json, sys; f = open(json.loads(sys.stdin.readline())['heartbeat'], 'wb', 0); f.write(b'.'); {WAITS}"
    )
    told = msgspec.structs.replace(START, rank=ParallelRank(tp_size=2, tp_rank=1), heartbeat=str(tmp_path / "pipe"))
    driver = await start(WAITS, ParallelRank(tp_size=2))
    follower = await SchedulerProcess.start((sys.executable, "-c", hangs), told)
    text = "scheduler process of tensor parallel rank 1 of pipeline stage 0 sent no heartbeat for 0.3 s and was killed"
    assert await first_end([driver, follower]) == text
    await asyncio.gather(driver.close(), follower.close())
    assert (driver.silence, round(follower.silence, 3)) == (0.0, 0.3)
    assert (driver.is_hung, driver.ended.result(), follower.ended.result()) == (False, -9, -9)
