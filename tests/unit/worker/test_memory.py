"""Steps of a worker's change of memory: what blocks it, and the state after a failure."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import pytest
from safetensors.numpy import save_file

from splitserve.core.config import CacheConfig, ClusterToken, DisaggregationConfig, ModelConfig, WorkerConfig
from splitserve.core.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    MemoryBlockedError,
    OptionError,
    RoleSwitchRunningError,
    SplitserveError,
    WorkerUnavailableError,
)
from splitserve.core.memory import MemoryTag, WeightsSource
from splitserve.core.parallel import ParallelConfig, ParallelRank
from splitserve.core.request import DisaggregationMode
from splitserve.server.front_end import RoleChange
from splitserve.server.memory import RunningRequests
from splitserve.server.scheduler_group import HalfSwitchedError
from splitserve.transfer.directory import ClusterAuth, register_rank
from splitserve.transfer.wire import PROTOCOL_VERSION, KVArgs, PrefillInfo
from splitserve.worker.checks import check_worker
from splitserve.worker.exclusions import given_exclusions
from splitserve.worker.memory import WorkerMemory
from splitserve.worker.role_switch import OwnBootstrap
from support.kv_world import layout
from support.worker_surroundings import WorkerSurroundings

NULL, PREFILL = DisaggregationMode.NULL, DisaggregationMode.PREFILL
DEADLINE = 60.0
ALL = frozenset(MemoryTag)
WAIT, ABORT, DRAIN = RunningRequests(), RunningRequests(abort=True), RunningRequests(drain=True, timeout=0.05)
SOURCE = WeightsSource("new")


class MemorySurroundings(WorkerSurroundings):
    """Surroundings that accept orders to change the memory."""

    info = SimpleNamespace(device="cpu", quantization="")

    def __init__(self, mode: DisaggregationMode = PREFILL) -> None:
        super().__init__(mode)
        self.is_known = True
        self.memory = WorkerMemory(self.front, *cast("Any", (self, self, self, self.switch.broken)))
        self.front.memory = self.memory

    async def hold(self, timeout: float) -> None:
        await self._step("hold")

    async def release_memory(self, tags: frozenset[MemoryTag]) -> None:
        await self._step(f"release {' '.join(sorted(tags))}")

    async def resume_memory(self, tags: frozenset[MemoryTag], url: str | None, timeout: float) -> None:
        await self._step(f"resume {' '.join(sorted(tags))} at {url}")

    async def load_weights(self, source: WeightsSource, timeout: float) -> None:
        assert not self.is_known
        await self._step(f"load {source.name}")

    async def use_weights(self, url: str | None) -> None:
        await self._step(f"use at {url}")

    async def discard_weights(self) -> None:
        await self._step("discard")

    def break_off(self, error: SplitserveError) -> None:
        assert isinstance(error, WorkerUnavailableError)
        self.steps.append(f"break off: {error.message.split(' and ended')[0]}")
        self.reached.set()

    def abort(self, rid: str, message: str) -> None:
        self.steps.append(f"abort {rid}")
        self.reached.set()

    async def open(self, port: int | None) -> str:
        assert port is None
        self.port = 7000
        return "URL"

    def enter(self, mode: DisaggregationMode, bootstrap_port: int | None) -> None:
        assert not self.is_known, "announced twice"
        assert bootstrap_port == self.port
        assert not self.front.requests.is_draining
        self.is_known = True

    async def leave(self, reason: str = "") -> None:
        self.is_known, self.why_left = False, reason

    def check_serves(self) -> None:
        assert self.is_known
        assert self.front.unready_reason() is None
        with self.front.requests.admit({"again": ("again",)}):
            pass


async def test_a_released_worker_gets_no_request_until_the_last_part_is_resumed() -> None:
    around = MemorySurroundings()
    await around.memory.release({MemoryTag.KV_CACHE}, WAIT)
    await around.memory.release(ALL, WAIT)
    assert around.steps == ["hold", "release kv_cache", "release kv_cache weights"]
    assert not around.is_known
    assert around.why_left == "memory released: POST /resume_memory_occupation to it"
    assert around.port is None
    assert "released its memory (kv_cache and weights): POST" in str(around.front.unready_reason())
    with pytest.raises(WorkerUnavailableError, match="POST /resume_memory_occupation"):
        around.front.requests.admit({"r": ("r",)}).__enter__()
    with pytest.raises(MemoryBlockedError, match="role cannot change while memory is released: POST"):
        await around.switch.switch(RoleChange(NULL))
    await around.memory.resume({MemoryTag.WEIGHTS})
    assert not around.is_known
    assert "(kv_cache)" in str(around.front.unready_reason())
    await around.memory.resume(ALL)
    assert around.steps[3:] == ["resume weights at None", "resume kv_cache weights at URL"]
    around.check_serves()
    # Nothing is released: nothing is ordered.
    await around.memory.resume(ALL)
    assert len(around.steps) == 5


async def test_running_requests_block_a_change_unless_they_are_aborted_or_end() -> None:
    around = MemorySurroundings(NULL)
    requests = around.front.requests
    with requests.admit({"a": ("a0", "a1")}):
        for change in (around.memory.release(ALL, WAIT), around.memory.update(SOURCE, WAIT)):
            with pytest.raises(MemoryBlockedError, match=r"running on this worker \(2\): .*drain.*abort"):
                await change
        assert around.steps == []
        assert not requests.is_draining
        with pytest.raises(DeadlineExceededError, match=r"requests were still running \(2\) after 0\.05 s"):
            await around.memory.release(ALL, DRAIN)
        assert around.steps == ["cancel"]
        around.check_serves()
        around.steps.clear()
        aborting = asyncio.create_task(around.memory.update(SOURCE, ABORT))
        await asyncio.wait_for(around.reached.wait(), DEADLINE)
    await aborting
    # Requests were aborted only when the weights were loaded.
    assert around.steps[0] == "load new"
    assert set(around.steps[1:3]) == {"abort a0", "abort a1"}
    assert around.steps[3:] == ["hold", "use at None"]
    assert around.front.weights_path == "new"
    around.check_serves()


async def test_a_prefill_worker_breaks_requests_off_so_that_a_router_sends_them_elsewhere() -> None:
    around = MemorySurroundings(PREFILL)
    with around.front.requests.admit({"a": ("a",)}):
        releasing = asyncio.create_task(around.memory.release(ALL, ABORT))
        await asyncio.wait_for(around.reached.wait(), DEADLINE)
    await asyncio.wait_for(releasing, DEADLINE)
    assert around.steps[:2] == ["break off: the prefill worker changes its memory or weights", "hold"]


async def test_a_change_waits_for_probes_and_is_not_blocked_by_them() -> None:
    around = MemorySurroundings(NULL)
    with around.front.requests.admit({"probe": ("probe",)}, is_probe=True):
        with pytest.raises(DeadlineExceededError, match=r"\(1\)"):
            await around.memory.release(ALL, RunningRequests(timeout=0.05))
        with around.front.requests.admit({"a": ("a",)}), pytest.raises(MemoryBlockedError, match=r"\(1\)"):
            await around.memory.release(ALL, WAIT)
        change = asyncio.create_task(around.memory.update(SOURCE, WAIT))
        around.held["load new"] = asyncio.Event()
        await asyncio.wait_for(around.reached.wait(), DEADLINE)
        around.held["load new"].set()
    await asyncio.wait_for(change, DEADLINE)
    around.check_serves()


@pytest.mark.parametrize(
    ("source", "param", "text"),
    [
        (WeightsSource("/nonexistent"), "model_path", "no folder /nonexistent"),
        (WeightsSource("~no-such-user/x"), "model_path", "~no-such-user/x is no path of a model"),
        (WeightsSource("a" * 5000), "model_path", "File name too long"),
        (WeightsSource("../x", is_shared_memory=True), "name", "without folders"),
        (WeightsSource("no-such-file", is_shared_memory=True), "name", "there is no file /dev/shm/no-such-file"),
    ],
)
async def test_a_wrong_source_is_reported_before_running_requests(source: WeightsSource, param: str, text: str) -> None:
    around = MemorySurroundings(NULL)
    with around.front.requests.admit({"a": ("a",)}), pytest.raises(InvalidRequestError, match=text) as error:
        await around.memory.update(source, WAIT)
    assert error.value.param == param
    assert around.steps == []
    around.check_serves()


async def test_weights_of_another_form_are_rejected_before_running_requests(tmp_path: Path) -> None:
    around = MemorySurroundings(NULL)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gguf"}}')
    save_file({}, tmp_path / "model.safetensors")
    with around.front.requests.admit({"a": ("a",)}), pytest.raises(InvalidRequestError, match="the same form"):
        await around.memory.update(WeightsSource(str(tmp_path)), WAIT)
    assert around.steps == []


@pytest.mark.parametrize("step", ["load new", "hold", "use at URL"])
async def test_a_failed_update_leaves_the_worker_as_it_was(step: str) -> None:
    around = MemorySurroundings()
    around.fails[step] = InvalidRequestError("no such model")
    with pytest.raises(InvalidRequestError, match="no such model"):
        await around.memory.update(SOURCE, WAIT)
    assert around.steps[-2:] == ["discard", "cancel"]
    assert around.front.weights_path is None
    assert around.port == 7000
    around.check_serves()


@pytest.mark.parametrize(
    "config",
    [WorkerConfig(parallel=ParallelConfig(tp_size=2)), WorkerConfig(dp_size=2, model=ModelConfig(dp_attention=True))],
)
async def test_ranks_load_new_weights_when_requests_have_ended(config: WorkerConfig) -> None:
    around = MemorySurroundings(NULL)
    around.front.config = config
    await around.memory.update(SOURCE, WAIT)
    assert around.steps == ["hold", "load new", "use at None"]
    around.check_serves()
    # Ranks that still load cannot serve with the old weights.
    around.fails["load new"] = DeadlineExceededError("no answer")
    with pytest.raises(HalfSwitchedError, match="not all ranks loaded the weights within"):
        await around.memory.update(SOURCE, WAIT)
    assert "no answer" in around.switch.broken.result()


async def test_a_load_that_takes_too_long_fails_with_the_option_and_is_discarded() -> None:
    around = MemorySurroundings(NULL)
    around.fails["load new"] = DeadlineExceededError("no answer")
    with pytest.raises(DeadlineExceededError, match=r"weights new were not loaded .*stage: loading; --load-timeout"):
        await around.memory.update(SOURCE, WAIT)
    assert around.steps == ["load new", "discard", "cancel"]
    around.check_serves()


async def test_an_update_of_a_released_worker_resumes_its_weights_only() -> None:
    around = MemorySurroundings()
    await around.memory.release(ALL, WAIT)
    around.fails["load new"] = InvalidRequestError("no such model")
    with pytest.raises(InvalidRequestError):
        await around.memory.update(SOURCE, WAIT)
    assert around.memory.released == ALL
    around.fails.clear()
    await around.memory.update(SOURCE, WAIT)
    assert around.steps[-1] == "use at None"
    assert around.memory.released == {MemoryTag.KV_CACHE}
    assert not around.is_known
    await around.memory.resume(ALL)
    around.check_serves()


async def test_a_failed_resume_stays_released_and_can_be_repeated() -> None:
    around = MemorySurroundings()
    await around.memory.release(ALL, WAIT)
    around.fails["resume kv_cache weights at URL"] = WorkerUnavailableError("no port")
    with pytest.raises(WorkerUnavailableError, match="no port"):
        await around.memory.resume(ALL)
    assert around.memory.released == ALL
    assert not around.is_known
    around.fails.clear()
    await around.memory.resume(ALL)
    around.check_serves()


def rank_info(dp_rank: int) -> PrefillInfo:
    rank = ParallelRank(dp_rank=dp_rank, dp_size=2)
    args = KVArgs(backend="tcp", model="m", layout=layout(), metadata_row_bytes=64, num_metadata_rows=8, rank=rank)
    return PrefillInfo(epoch=1, control_address="tcp://127.0.0.1:9", args=args)


async def test_ranks_that_resumed_stay_registered_if_another_rank_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    around, bootstrap = MemorySurroundings(), OwnBootstrap(DisaggregationConfig(mode=PREFILL))
    memory = WorkerMemory(around.front, *cast("Any", (around, bootstrap, around, around.switch.broken)))
    around.front.memory = memory
    dp_ranks = iter(range(2))

    async def resume_memory(_tags: frozenset[MemoryTag], url: str, _timeout: float) -> None:
        # A rank that has resumed before does not register again.
        dp_rank, where = next(dp_ranks), urlsplit(url)
        host, port = str(where.hostname), where.port or 0
        await asyncio.to_thread(register_rank, host, port, rank_info(dp_rank), b"", timeout=DEADLINE)
        if dp_rank == 0:
            raise DeadlineExceededError("rank 1 did not answer")

    monkeypatch.setattr(around, "resume_memory", resume_memory)
    monkeypatch.setattr(around, "enter", lambda *_: None)
    try:
        url = await bootstrap.open(None)
        await memory.release(ALL, WAIT)
        with pytest.raises(DeadlineExceededError):
            await memory.resume(ALL)
        assert memory.released == ALL
        await memory.resume(ALL)
        async with httpx.AsyncClient(auth=ClusterAuth(b""), trust_env=False) as client:
            for dp_rank in range(2):
                params = {"version": PROTOCOL_VERSION, "dp_rank": dp_rank}
                answer = await client.get(f"{url}/route", params=params, timeout=DEADLINE)
                assert answer.status_code == 200, answer.text
    finally:
        bootstrap.close()


async def test_schedulers_with_different_weights_end_the_worker() -> None:
    around = MemorySurroundings()
    around.fails["use at URL"] = HalfSwitchedError("rank 1 is gone")
    with pytest.raises(HalfSwitchedError):
        await around.memory.update(SOURCE, WAIT)
    assert around.switch.broken.result() == "rank 1 is gone"
    assert not around.is_known


async def test_one_change_at_a_time_and_to_its_end() -> None:
    around = MemorySurroundings()
    around.held["hold"] = asyncio.Event()
    task = asyncio.create_task(around.memory.release(ALL, WAIT))
    await asyncio.wait_for(around.reached.wait(), DEADLINE)
    with pytest.raises(MemoryBlockedError, match="is in progress"):
        await around.memory.update(SOURCE, WAIT)
    # Nothing is released yet, but a success would be wrong a moment later.
    with pytest.raises(MemoryBlockedError, match="is in progress"):
        await around.memory.resume(ALL)
    with pytest.raises(RoleSwitchRunningError):
        await around.switch.switch(RoleChange(NULL))
    # The change continues even if its client disconnects.
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    around.held["hold"].set()
    (change,) = (task for task in asyncio.all_tasks() if task.get_name() == "memory")
    await asyncio.wait_for(change, DEADLINE)
    assert around.memory.released == ALL


async def test_a_worker_that_ends_gives_a_change_up() -> None:
    around = MemorySurroundings()
    around.held["load new"] = asyncio.Event()
    task = asyncio.create_task(around.memory.update(SOURCE, WAIT))
    await asyncio.wait_for(around.reached.wait(), DEADLINE)
    await around.memory.close()
    await asyncio.gather(task, return_exceptions=True)
    assert around.steps == ["load new", "discard", "cancel"]
    assert not around.is_known
    with pytest.raises(MemoryBlockedError):
        await around.memory.release(ALL, WAIT)


OBSTACLES = {
    "--nnodes above 1": WorkerConfig(
        parallel=ParallelConfig(tp_size=2, nnodes=2),
        disaggregation=DisaggregationConfig(mode=NULL, cluster_token=ClusterToken(b"token")),
    ),
    "--shared-pool": WorkerConfig(
        cache=CacheConfig(shared_pool="/dev/shm/pool"),
        disaggregation=DisaggregationConfig(mode=PREFILL, transfer_backend="shm"),
    ),
}


@pytest.mark.parametrize("option", OBSTACLES)
async def test_what_cannot_change_its_memory_refuses_with_the_option(option: str) -> None:
    around = MemorySurroundings()
    around.front.config = config = OBSTACLES[option]
    with pytest.raises(InvalidRequestError, match=option):
        await around.memory.release(ALL, WAIT)
    assert around.steps == []
    changed = CacheConfig(shared_pool=config.cache.shared_pool, enable_memory_saver=True)
    with pytest.raises(OptionError, match=f"--enable-memory-saver does not go together with {option}"):
        check_worker(WorkerConfig(**{**{f: getattr(config, f) for f in config.__struct_fields__}, "cache": changed}))


@pytest.mark.parametrize(
    ("backend", "device", "fits"),
    [("cuda_ipc", "auto", False), ("nixl", "cuda", False), ("nixl", "cpu", True), ("mooncake", "cuda", True)],
)
def test_a_pool_that_cuda_cannot_share_is_refused_beside_backends_that_need_it(
    backend: str, device: str, fits: bool
) -> None:
    config = WorkerConfig(
        cache=CacheConfig(enable_memory_saver=True),
        model=ModelConfig(device=device),
        disaggregation=DisaggregationConfig(mode=PREFILL, transfer_backend=backend),
    )
    assert (not list(given_exclusions(config))) == fits


async def test_a_pool_on_a_gpu_needs_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    around = MemorySurroundings()
    monkeypatch.setattr(around, "info", SimpleNamespace(device="cuda:0"), raising=False)
    with pytest.raises(InvalidRequestError, match="--enable-memory-saver"):
        await around.memory.release(ALL, WAIT)
    assert around.steps == []
    await around.memory.release({MemoryTag.WEIGHTS}, WAIT)
    assert around.memory.released == {MemoryTag.WEIGHTS}
