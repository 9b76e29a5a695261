"""Health checks of workers: a silent worker counts as hung, and a router that stood still does not blame a worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from splitserve.api.responses import error_body
from splitserve.core.errors import MemoryReleasedError, SplitserveError, WorkerUnavailableError
from splitserve.core.request import DisaggregationMode
from splitserve.router import health
from splitserve.router.args import LBArgs
from splitserve.router.health import HealthMonitor
from splitserve.router.metrics import RouterMetrics
from splitserve.router.prefixes import CachedPrefixes
from splitserve.router.registry import WorkerRegistry
from splitserve.router.upstream import MAX_CHECK_ANSWER, UpstreamError
from splitserve.router.worker import Worker, WorkerProof

HANG_TIMEOUT = 16.0
_START = 1000.0


class OpenCall:
    def fail(self, error: Exception) -> None: ...


class SilentWorkers:
    """Questions go unanswered, for the time that each may take and `stall` more. `clock` is this router's."""

    def __init__(self, stall: float = 0.0) -> None:
        self.now = _START
        self.stall = stall
        self.answers = False
        self.status, self.body, self.load_status = 200, b"", 200
        # Answer for the context length, and number of requests for it.
        self.model_info, self.num_model_infos = b"", 0

    def monotonic(self) -> float:
        return self.now

    async def ask(
        self, worker: Worker, method: str, path: str, *, seconds: float = 5.0, max_bytes: int | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        if path == "/get_model_info":
            self.num_model_infos += 1
            return self.status, self.model_info, {}
        assert max_bytes == MAX_CHECK_ANSWER
        if self.answers:
            return self.load_status if path == "/get_load" else self.status, self.body, {}
        self.now += seconds + self.stall
        raise UpstreamError.lost(worker, 504, "silent")


@pytest.fixture
def worker() -> Worker:
    worker = Worker("http://w", DisaggregationMode.DECODE)
    worker.calls.add(OpenCall())
    return worker


def monitor(workers: Any, monkeypatch: pytest.MonkeyPatch) -> HealthMonitor:
    monkeypatch.setattr(health, "time", workers)
    args = LBArgs(probe=False, health_interval=2.0, hang_timeout=HANG_TIMEOUT)
    return HealthMonitor(WorkerRegistry(args), workers, RouterMetrics(), args)


async def unready(
    worker: Worker, error: SplitserveError, monkeypatch: pytest.MonkeyPatch
) -> tuple[SilentWorkers, HealthMonitor]:
    """Return the workers and the monitor, which has checked `worker` and received `error`."""
    workers = SilentWorkers()
    watch = monitor(workers, monkeypatch)
    monkeypatch.setattr(watch._registry, "_workers", {worker.url: worker})
    workers.answers, workers.status, workers.body = True, 503, error_body(error)
    await watch._check(worker)
    return workers, watch


async def test_a_worker_with_released_memory_is_not_ready_and_has_the_reason(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = MemoryReleasedError("this worker has released its memory (kv_cache)")
    workers, watch = await unready(worker, error, monkeypatch)
    assert not worker.takes_requests
    assert "POST /resume_memory_occupation" in str(worker.unready_reason)
    assert "(1 with memory released: POST /resume_memory_occupation to it)" in str(watch._registry.unready_reason())
    workers.status, workers.body = 200, b""
    await watch._check(worker)
    assert worker.takes_requests
    assert worker.unready_reason is None


async def test_a_worker_that_is_not_ready_has_its_own_reason_and_cannot_return_by_registering(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, watch = await unready(worker, WorkerUnavailableError("no heartbeat for 7 s"), monkeypatch)
    watch._registry.add(worker.url, worker.mode)
    assert (worker.takes_requests, worker.unready_reason) == (False, "no heartbeat for 7 s")
    # It was restarted, and registers before it is checked again.
    workers.answers = False
    await watch._check(worker)
    assert (worker.takes_requests, worker.unready_reason) == (False, "it does not answer")
    watch._registry.add(worker.url, worker.mode)
    assert worker.takes_requests


async def test_the_context_length_is_read_again_after_a_loss(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = SilentWorkers()
    watch = monitor(workers, monkeypatch)
    worker.proof = WorkerProof.wanted(is_held=False)
    workers.answers, workers.model_info = True, b'{"max_model_len": 2048}'
    for _ in range(2):
        await watch._check(worker)
    assert (worker.context_length, workers.num_model_infos) == (2048, 1)
    workers.status, workers.model_info = 503, b'{"max_model_len": 131072}'
    await watch._check(worker)
    # Requests of clients wait for this worker meanwhile, and are as long as before.
    assert (worker.context_length, workers.num_model_infos) == (2048, 1)
    # It registers, and serves a request before the next check, so it is not probed.
    worker.mark_healthy()
    worker.forgive()
    workers.status = 200
    await watch._check(worker)
    assert (worker.context_length, workers.num_model_infos) == (131072, 2)


@pytest.mark.parametrize(
    ("answer", "length"),
    [
        (b'{"max_model_len": 4096}', 4096),
        (b'{"max_model_len": 0}', None),
        (b"{}", None),
        (b"[]", None),
        (b"[" * 200_000, None),
    ],
)
async def test_a_context_length_that_cannot_be_read_is_unknown(
    worker: Worker, answer: bytes, length: int | None
) -> None:
    worker.context_length = 2048
    workers = SilentWorkers()
    workers.model_info = answer
    await health.read_context_length(workers, worker)  # type: ignore[arg-type]
    assert (worker.context_length, worker.is_context_current) == (length, True)


@pytest.mark.parametrize("status", [401, 503])
async def test_a_context_length_stays_while_the_worker_does_not_report_it(worker: Worker, status: int) -> None:
    worker.context_length = 2048
    workers = SilentWorkers()
    workers.status, workers.model_info = status, b'{"error": {}}'
    await health.read_context_length(workers, worker)  # type: ignore[arg-type]
    assert (worker.context_length, worker.is_context_current) == (2048, False)


def test_the_caches_of_a_worker_that_was_away_are_unknown(worker: Worker) -> None:
    worker.mark_unhealthy()
    # Followed while it drained, before its restart.
    worker.prefixes = CachedPrefixes(16, [])
    worker.mark_unhealthy()
    worker.mark_healthy()
    assert worker.prefixes is None


async def test_a_worker_that_missed_a_check_is_healthy_again_during_a_long_step(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = SilentWorkers()
    watch = monitor(workers, monkeypatch)
    await watch._check(worker)
    assert not worker.healthy
    workers.answers, workers.load_status = True, 504
    await watch._check(worker)
    assert worker.takes_requests
    # A request has failed there: now the scheduler must answer.
    worker.failed_at = worker.clock.now()
    for workers.load_status in (504, 503):
        await watch._check(worker)
        assert worker.has_failed
    workers.load_status = 200
    await watch._check(worker)
    assert not worker.has_failed


async def test_a_worker_that_is_silent_for_the_timeout_hangs(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = SilentWorkers()
    watch = monitor(workers, monkeypatch)
    await watch._check(worker)
    assert worker.broken_off is None
    while workers.now < _START + HANG_TIMEOUT:
        await watch._check(worker)
    assert worker.is_hung
    workers.answers = True
    await watch._check(worker)
    assert (worker.broken_off, worker.is_hung, worker.silent_since) == (None, False, None)


async def test_time_in_which_the_router_stood_still_is_no_silence(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = SilentWorkers(stall=100.0)
    watch = monitor(workers, monkeypatch)
    await watch._check(worker)
    assert workers.now > _START + 100.0
    assert worker.broken_off is None
    # It still has to answer.
    for _ in range(8):
        await watch._check(worker)
    assert worker.is_hung


async def test_a_stall_between_two_questions_is_no_silence_either(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = SilentWorkers()
    watch = monitor(workers, monkeypatch)
    pauses: list[float] = []

    async def stalls(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) > 1:
            raise asyncio.CancelledError
        workers.now += seconds + 100.0

    monkeypatch.setattr(health.asyncio, "sleep", stalls)
    with pytest.raises(asyncio.CancelledError):
        await watch.watch(worker)
    assert len(pauses) == 2
    assert worker.broken_off is None
