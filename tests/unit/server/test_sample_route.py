"""The sample of a worker for routers: small, and never late."""

from __future__ import annotations

import msgspec

from splitserve.core.errors import DeadlineExceededError
from splitserve.core.messages import SchedulerState
from splitserve.observe.live import SAMPLE_PATH, sample_of
from splitserve.observe.worker_metrics import WorkerTotals

from .conftest import StartWorker, Worker
from .server_fakes import READY


async def test_a_sample_has_the_state_of_the_schedulers_and_totals(start_worker: StartWorker) -> None:
    async with start_worker("decode") as worker:
        before = (await worker.http.get(SAMPLE_PATH)).json()
        assert (before["role"], before["model"], before["status"], before["reason"]) == ("decode", "tiny", "ready", "")
        assert before["kv_tokens_total"] == READY.pages_total * READY.page_size
        assert set(before["queues"]) == {"grammar", "bootstrap", "inflight", "prealloc", "transfer"}
        body = {"text": "abc", "local_prefill": True, "sampling_params": {"max_new_tokens": 3}}
        assert (await worker.http.post("/generate", json=body)).status_code == 200
        after = (await worker.http.get(SAMPLE_PATH)).json()
        assert after["output_tokens"] - before["output_tokens"] == 3


def test_a_sample_has_each_reason_of_its_ranks_once() -> None:
    empty = SchedulerState(page_size=16, pages_total=1, pages_free=1, pages_cached=0, rows_total=1, rows_free=1)
    states = [msgspec.structs.replace(empty, waiting_reason=reason) for reason in ("kv_pool", "", "budget", "kv_pool")]
    found = sample_of(states, WorkerTotals(), role="null", model="tiny", status="ready", reason="")
    assert found.waiting_reason == "budget, kv_pool"


async def test_a_scheduler_in_a_long_step_does_not_delay_the_sample(worker: Worker, monkeypatch) -> None:
    first = (await worker.http.get(SAMPLE_PATH)).json()

    async def states(*_: object, **__: object) -> None:
        raise DeadlineExceededError("the scheduler has not answered")

    monkeypatch.setattr(worker.front.scheduler, "states", states)
    assert (await worker.http.get(SAMPLE_PATH)).json() == first


async def test_a_draining_worker_says_so(worker: Worker) -> None:
    worker.front.requests.is_draining = True
    found = (await worker.http.get(SAMPLE_PATH)).json()
    assert found["status"] == "draining"
    assert "draining" in found["reason"]
