"""Background task of the router that proves the paths of workers in doubt (`worker.py`).

Probe of a worker:
1. `/health_generate`: the worker generates a token without a partner; a worker of a pair uses a fake bootstrap host.
2. A worker of a pair then gets a request of two tokens together with a partner that passed 1. Prefill computes the
   first, the KV cache is transferred, decode computes the second. That proves both. After a failure the next attempt
   uses another partner.

Each probe attempt has a deadline, and the number of parallel probes is limited.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress

import msgspec

from splitserve.core.errors import clause
from splitserve.core.request import DisaggregationMode
from splitserve.router.failure import Misfit, UpstreamError, error_object, misfit_in
from splitserve.router.metrics import RouterMetrics
from splitserve.router.pairing import pair_body
from splitserve.router.registry import WorkerRegistry
from splitserve.router.upstream import Upstream
from splitserve.router.worker import Worker, WorkerPair

logger = logging.getLogger(__name__)

# Seconds a probe attempt may take: slightly more than the worker's own limit.
PROBE_TIMEOUT = 25.0
# Workers that are probed at the same time.
MAX_PROBES = 16
# Seconds between two searches for workers in doubt. A worker that joins is found at once.
LOOK_INTERVAL = 0.25
# Statuses of workers without this route. Such workers are trusted at once.
_CANNOT_BE_ASKED = (404, 405)
# Statuses for a missing or wrong key.
_REFUSED = (401, 403)
# Seconds in which the other worker of a pair may still report the cause of a failure.
_GRACE = 1.0

_PARTNER_OF = {
    DisaggregationMode.PREFILL: DisaggregationMode.DECODE,
    DisaggregationMode.DECODE: DisaggregationMode.PREFILL,
}


class Prober:
    def __init__(self, registry: WorkerRegistry, upstream: Upstream, metrics: RouterMetrics) -> None:
        self._registry = registry
        self._upstream = upstream
        self._metrics = metrics
        self._places = asyncio.Semaphore(MAX_PROBES)
        self._tasks: dict[Worker, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Probe workers in doubt until cancelled."""
        try:
            while True:
                self._registry.has_joined.clear()
                self._begin()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_INTERVAL):
                        await self._registry.has_joined.wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _begin(self) -> None:
        """Start a probe of each worker that is due and not being probed."""
        self._tasks = {worker: task for worker, task in self._tasks.items() if not task.done()}
        now = self._registry.now()
        for worker in self._registry.all():
            if worker.takes_requests and worker.proof.is_due(now) and worker not in self._tasks:
                self._tasks[worker] = asyncio.create_task(self._probe(worker))

    async def _probe(self, worker: Worker) -> None:
        proof, before = worker.proof, worker.proof.doubt
        async with self._places:
            problem = None if proof.generates else await generate(self._upstream, worker)
            if problem is None:
                proof.generates = True
                if worker.context_length is None:
                    worker.context_length = await context_length(self._upstream, worker)
                if worker.mode in _PARTNER_OF and (problem := await self._meet(worker)) is None:
                    # The worker was proven together with its partner, or it waits for one.
                    return
        if not worker.takes_requests or proof.doubt is None:
            # The worker was lost meanwhile, or a request has proven it.
            return
        if problem is None:
            self._succeed(worker)
            return
        proof.fail(problem, self._registry.now())
        self._metrics.probes.labels("failed").inc()
        if problem != before:
            logger.warning("worker is not ready url=%s mode=%s reason=%s", worker.url, worker.mode, problem)

    async def _meet(self, worker: Worker) -> str | None:
        """Send a probe request through the worker and a partner. Return the problem, or None if it was answered."""
        partner = self._partner(worker)
        if partner is None:
            worker.proof.wait_for_partner(f"no {_PARTNER_OF[worker.mode]} worker is there that could be its partner")
            return None
        is_prefill = worker.mode is DisaggregationMode.PREFILL
        pair = WorkerPair(worker, partner) if is_prefill else WorkerPair(partner, worker)
        problem = await transfer_through(self._upstream, pair)
        if isinstance(problem, Misfit):
            self._registry.add_misfit(pair, problem)
            return f"it is incompatible with {partner.url}: {problem}"
        if problem is None:
            worker.forget_misfits(partner)
            self._succeed(worker)
            self._succeed(partner)
        return problem

    def _partner(self, worker: Worker) -> Worker | None:
        """Return a partner that generates: a proven one first, and a different one after each failure."""
        pool = self._registry.pool(_PARTNER_OF[worker.mode])
        able = [w for w in pool if w.takes_requests and w.proof.generates]
        able.sort(key=lambda w: w.proof.doubt is not None)
        return able[worker.proof.num_failures % len(able)] if able else None

    def _succeed(self, worker: Worker) -> None:
        if worker.proof.doubt is not None and worker.takes_requests:
            worker.proof.succeed()
            self._metrics.probes.labels("ok").inc()
            logger.info("worker is ready url=%s mode=%s", worker.url, worker.mode)


async def generate(upstream: Upstream, worker: Worker) -> str | None:
    """Let the worker generate a token without a partner. Return the problem, or None."""
    try:
        status, answer, _ = await upstream.ask(worker, "GET", "/health_generate", seconds=PROBE_TIMEOUT)
    except UpstreamError as error:
        return f"it generates nothing: {_message(error.body)}"
    if status in (200, *_CANNOT_BE_ASKED):
        return None
    return _refusal(upstream, status) or f"it generates nothing: {status}, {_message(answer)}"


async def context_length(upstream: Upstream, worker: Worker) -> int | None:
    """Return the tokens that a request may have on the worker. None: the worker does not report it."""
    try:
        status, answer, _ = await upstream.ask(worker, "GET", "/get_model_info")
        found = msgspec.json.decode(answer).get("max_model_len") if status == 200 else None
    except (UpstreamError, msgspec.DecodeError, AttributeError):
        return None
    return found if isinstance(found, int) and found > 0 else None


async def transfer_through(upstream: Upstream, pair: WorkerPair) -> str | None:
    """Send a request of two tokens through the pair. Return the problem: a Misfit if the two are incompatible."""
    params = {"max_new_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    body = {"rid": f"probe-{secrets.token_hex(8)}", "input_ids": [0], "sampling_params": params}
    raw = msgspec.json.encode(pair_body("/generate", body, pair.prefill.host, pair.prefill.bootstrap_port))
    tasks = [asyncio.create_task(_ask(upstream, worker, raw)) for worker in (pair.prefill, pair.decode)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if any(task.done() and task.result() for task in tasks):
            # The other worker may report more.
            await asyncio.wait(tasks, timeout=_GRACE)
        else:
            await asyncio.wait(tasks)
        problems = [problem for task in tasks if task.done() and (problem := task.result())]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return next(
        (problem for problem in problems if isinstance(problem, Misfit)), "; ".join(map(clause, problems)) or None
    )


async def _ask(upstream: Upstream, worker: Worker, raw: bytes) -> str | None:
    """Send the worker its part of the pair's request. Return the problem, or None."""
    try:
        status, answer, _ = await upstream.ask(worker, "POST", "/generate", raw, seconds=PROBE_TIMEOUT)
    except UpstreamError as error:
        return f"no KV transfer: {_message(error.body)}"
    if status in (200, *_CANNOT_BE_ASKED):
        return None
    if (misfit := misfit_in(answer)) is not None:
        return misfit
    problem = _refusal(upstream, status) or f"{status}, {_message(answer)}"
    return f"no KV transfer: {worker.mode} worker {worker.url}: {problem}"


def _refusal(upstream: Upstream, status: int) -> str | None:
    """Return why a worker rejects the router's own requests. None: it does not, or for another reason."""
    if status not in _REFUSED:
        return None
    problem = "does not take this router's key: see" if upstream.key_header else "asks for a key: give the router"
    return f"it {problem} --worker-key-file ({status})"


def _message(body: bytes) -> str:
    """Return the message of an error body, at most 300 characters."""
    return str(error_object(body).get("message", body.decode(errors="replace")))[:300]
