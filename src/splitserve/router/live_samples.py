"""Samples of the workers for the live view: one small request per worker and second.

Each worker has its own task and every request has a deadline, so a slow worker delays no other. A worker that cannot be
reached is excluded at once (`upstream.py`). So a killed worker is visible after one interval, even if health checks are
rare. Workers of other systems have no such route. The router tries them again after a minute.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from splitserve.core.errors import UNREADABLE
from splitserve.core.request import DisaggregationMode
from splitserve.observe.live import SAMPLE_PATH, LiveWorker, WorkerSample
from splitserve.router.upstream import MAX_CHECK_ANSWER, Upstream, UpstreamError
from splitserve.router.worker import Worker

# Seconds between two samples of a worker. Retry: after a broken connection. Foreign: if it does not have the route.
INTERVAL = 1.0
_RETRY_INTERVAL = 0.1
_FOREIGN_INTERVAL = 60.0
# Deadline of a sample, and time without an answer after which a worker counts as unhealthy, seconds.
_TIMEOUT = 5.0
SILENCE_SECONDS = 3.0
_SAMPLE = msgspec.json.Decoder(WorkerSample)


@dataclass(slots=True)
class WorkerRates:
    """Rates between two samples. None: unknown, or nothing to measure."""

    tokens_per_s: float | None = None
    step_ms: float | None = None
    prefix_hit_rate: float | None = None
    # Tokens looked up and found in the prefix cache, for rates over several workers.
    prefix_queries: int = 0
    prefix_hits: int = 0
    transfer_bytes_per_s: float | None = None


@dataclass(slots=True)
class SampledWorker:
    """Latest sample of a worker. Times are clock times."""

    sample: WorkerSample | None = None
    rates: WorkerRates = field(default_factory=WorkerRates)
    # Time since which requests are unanswered. None: the last one was answered.
    silent_since: float | None = None
    # Sample from which the next rates are computed, and its time. None: there is no earlier sample.
    _base: tuple[WorkerSample, float] | None = None

    def take(self, sample: WorkerSample | None, now: float) -> None:
        """Store the sample of an answer. None: the answer contained none."""
        self.silent_since = None
        if sample is None:
            self.lose()
            return
        self.sample, base = sample, self._base
        if base is not None and sample.num_steps == base[0].num_steps and sample.running and sample.status != "unready":
            # A step takes longer than the interval. The rates are computed when it has ended, over its whole time.
            return
        self.rates, self._base = WorkerRates(), (sample, now)
        # Totals are smaller after a restart.
        if base is not None and now > base[1] and base[0].num_steps <= sample.num_steps:
            self.rates = rates_between(base[0], sample, now - base[1])

    def lose(self) -> None:
        """Forget the sample of a worker that was lost."""
        self.sample, self.rates, self._base = None, WorkerRates(), None


def rates_between(before: WorkerSample, after: WorkerSample, seconds: float) -> WorkerRates:
    steps = after.num_steps - before.num_steps
    queries, hits = after.prefix_queries - before.prefix_queries, after.prefix_hits - before.prefix_hits
    # A prefill worker generates no tokens except the first ones.
    is_prefill = after.role == DisaggregationMode.PREFILL
    computed, output = after.computed_tokens - before.computed_tokens, after.output_tokens - before.output_tokens
    return WorkerRates(
        tokens_per_s=max(0, computed if is_prefill else output) / seconds,
        step_ms=(after.step_seconds - before.step_seconds) / steps * 1e3 if steps > 0 else None,
        prefix_hit_rate=hits / queries if queries > 0 else None,
        prefix_queries=max(0, queries),
        prefix_hits=max(0, hits),
        transfer_bytes_per_s=max(0, after.transfer_bytes - before.transfer_bytes) / seconds,
    )


class WorkerSampler:
    """Samples of all workers by URL. Run `watch` for each worker. `on_change`: called after its health changed."""

    def __init__(
        self, upstream: Upstream, on_change: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._upstream = upstream
        self._on_change = on_change
        self._clock = clock
        self.workers: dict[str, SampledWorker] = {}

    async def watch(self, worker: Worker) -> None:
        """Request samples until cancelled."""
        found = self.workers[worker.url] = SampledWorker()
        try:
            while True:
                began = self._clock()
                pause = await self.sample(worker, found)
                await asyncio.sleep(max(0.0, began + pause - self._clock()))
        finally:
            if self.workers.get(worker.url) is found:
                del self.workers[worker.url]

    async def sample(self, worker: Worker, found: SampledWorker) -> float:
        """Request one sample. Return the seconds from its start to the next one."""
        was_healthy, began = worker.healthy, self._clock()
        if found.silent_since is None:
            found.silent_since = began
        pause = INTERVAL
        try:
            status, answer, _ = await self._upstream.ask(
                worker, "GET", SAMPLE_PATH, seconds=_TIMEOUT, max_bytes=MAX_CHECK_ANSWER
            )
        except UpstreamError as error:
            found.lose()
            if not isinstance(error.__cause__, TimeoutError):
                # The connection broke. A new one reveals at once whether the process still runs.
                pause = _RETRY_INTERVAL if was_healthy and worker.healthy else INTERVAL
        else:
            sample = _decoded(answer) if status == 200 else None
            found.take(sample, self._clock())
            if sample is None:
                pause = _FOREIGN_INTERVAL
        if worker.healthy != was_healthy:
            self._on_change()
        return pause

    def describe(self, worker: Worker) -> LiveWorker:
        """Return the worker for the live view."""
        found = self.workers.get(worker.url) or SampledWorker()
        sample, rates = found.sample, found.rates
        state, reason = self._state(worker, found)
        shown = LiveWorker(
            url=worker.url,
            name=name_of(worker.url),
            role=worker.mode.value,
            state=state,
            reason=reason,
            in_flight=worker.num_running,
        )
        if sample is None:
            return shown
        return msgspec.structs.replace(
            shown,
            running=sample.running,
            waiting=sample.waiting,
            retracted=sample.retracted,
            queues=sample.queues,
            waiting_reason=sample.waiting_reason,
            kv_usage=round(sample.kv_usage, 4),
            kv_tokens_total=sample.kv_tokens_total,
            step_ms=_rounded(rates.step_ms),
            tokens_per_s=_rounded(rates.tokens_per_s),
            prefix_hit_rate=_rounded(rates.prefix_hit_rate),
            transfer_gb_s=None if rates.transfer_bytes_per_s is None else round(rates.transfer_bytes_per_s / 1e9, 6),
        )

    def _state(self, worker: Worker, found: SampledWorker) -> tuple[str, str]:
        """Return the state of a worker, and the reason for it."""
        sample = found.sample
        if worker.switching_to is not None or (sample is not None and sample.status == "switching"):
            return "switching", "it changes its role"
        if worker.drains or (sample is not None and sample.status == "draining"):
            return "draining", "it gets no new requests"
        if not worker.healthy:
            return "unhealthy", worker.connect_error or (sample.reason if sample else "") or str(worker.unready_reason)
        if found.silent_since is not None and (seconds := self._clock() - found.silent_since) >= SILENCE_SECONDS:
            return "unhealthy", f"it has not answered for {seconds:.0f} s"
        return "ready", worker.unready_reason or ""


def name_of(url: str) -> str:
    """Return the address without the scheme."""
    return url.partition("://")[2]


def _decoded(answer: bytes) -> WorkerSample | None:
    try:
        return _SAMPLE.decode(answer)
    except UNREADABLE:
        # The worker belongs to another release or another system.
        return None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
