"""Health checks and probes of the workers: whether each accepts requests, is alive, and has a proven path.

Checks of a worker, until it leaves:
1. `/health`: whether it accepts requests. A worker that loads its model, drains or does not answer gets no requests.
2. `/get_load`, while this router has calls at the worker, or if a request has failed there since the last check: the
   scheduler must answer it. A long step delays the answer, so a missing answer does not prove a hang. Every byte of an
   answer or a stream is a heartbeat.
3. A worker without a heartbeat for `hang_timeout` seconds of continuous checks counts as hung. Its calls are aborted,
   and their requests move to other workers. Time in which this router's event loop was blocked does not count.

Probe of a worker in doubt (`worker.py`), started by a check:
1. `/health_generate`: the worker generates a token without a partner; a worker of a pair uses a fake bootstrap host.
2. A worker of a pair then gets a request of two tokens together with a partner that passed 1. Prefill computes the
   first, the KV cache is transferred, decode computes the second. That proves both. If decode is proven already, one
   token is enough: it needs no place in decode's running batch. After a failure the next attempt uses another partner.
Each probe has a deadline. The number of parallel probes is limited. Workers admit a probe before requests of clients.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Annotated

import msgspec

from splitserve.core.errors import UNREADABLE, MemoryReleasedError, clause
from splitserve.core.request import DisaggregationMode
from splitserve.process.threads import end_tasks
from splitserve.router.args import LBArgs
from splitserve.router.http_client import ConnectError
from splitserve.router.metrics import RouterMetrics
from splitserve.router.pairing import with_identity, with_rooms
from splitserve.router.registry import WorkerRegistry
from splitserve.router.upstream import (
    MAX_CHECK_ANSWER,
    Misfit,
    Upstream,
    UpstreamError,
    error_object,
    message_in,
    misfit_in,
)
from splitserve.router.waiting import Wakeup
from splitserve.router.worker import Worker, WorkerPair

logger = logging.getLogger(__name__)
# Timeout of one check, seconds.
CHECK_TIMEOUT = 5.0
# Seconds a probe attempt may take: slightly more than the worker's own limit.
PROBE_TIMEOUT = 25.0
# Workers that are probed at the same time.
MAX_PROBES = 16
# Statuses of workers without this route. Such workers are trusted at once.
_HAS_NO_ROUTE = (404, 405)
# Statuses for a missing or wrong key.
_REFUSED = (401, 403)
# Seconds in which the other worker of a pair may still report the cause of a failure.
_GRACE = 1.0

_PARTNER_OF = {
    DisaggregationMode.PREFILL: DisaggregationMode.DECODE,
    DisaggregationMode.DECODE: DisaggregationMode.PREFILL,
}


class HealthMonitor:
    """Health checks and probes. Run `watch` for each worker. Intervals and timeouts are those of `args`."""

    def __init__(self, registry: WorkerRegistry, upstream: Upstream, metrics: RouterMetrics, args: LBArgs) -> None:
        self._registry = registry
        self._upstream = upstream
        self._metrics = metrics
        self._interval = args.health_interval
        self._hang_timeout = args.hang_timeout
        self._probe_slots = asyncio.Semaphore(MAX_PROBES)
        # Sent when a worker begins to generate.
        self._has_partner = Wakeup()

    async def watch(self, worker: Worker) -> None:
        """Check the worker until cancelled, and probe it while it is in doubt."""
        probe: asyncio.Task[None] | None = None
        try:
            while True:
                await self._check(worker)
                is_due = worker.takes_requests and worker.proof.is_due(worker.clock.now())
                if is_due and (probe is None or probe.done()):
                    probe = asyncio.create_task(self._probe(worker))
                # A silent worker was already checked for its whole timeout.
                is_asked = worker.silent_since is not None and worker.broken_off is None
                seconds = min(self._interval, self._hang_timeout / 8) if is_asked else self._interval
                if worker.proof.doubt is not None and (until_probe := worker.proof.next_at - worker.clock.now()) > 0:
                    seconds = min(seconds, until_probe)
                began = time.monotonic()
                await self._pause(worker, seconds)
                _discount(worker, time.monotonic() - began - seconds)
        finally:
            if probe is not None:
                probe.cancel()

    async def _pause(self, worker: Worker, seconds: float) -> None:
        """Wait until the next check: at once if a worker in doubt may have a partner now."""
        if worker.proof.doubt is None:
            await asyncio.sleep(seconds)
            return
        await self._has_partner.wait(seconds)

    async def _check(self, worker: Worker) -> None:
        """Check the worker once."""
        was_healthy, began = worker.healthy, worker.clock.now()
        asked_at = time.monotonic()
        if worker.silent_since is None:
            worker.silent_since = asked_at
        answer = await self._ask(worker, "/health")
        status = None if answer is None else answer[0]
        worker.unready_message = ""
        if answer is not None and status != 200:
            worker.unready_message = message_in(answer[1]) or "it is not ready"
        worker.has_released = answer is not None and error_object(answer[1]).get("code") == MemoryReleasedError.reason
        serves = lives = answer is not None
        if lives and (worker.calls or worker.broken_off is not None or worker.has_failed):
            # 504: the front end answers, but its scheduler does not. 503: its scheduler was lost.
            load = await self._ask(worker, "/get_load")
            lives = load is not None and load[0] != 504
            serves = load is not None and load[0] not in (503, 504)
        if lives:
            worker.heartbeat()
        elif worker.calls and time.monotonic() - (worker.silent_since or asked_at) >= self._hang_timeout:
            if worker.broken_off is None:
                logger.error("worker hangs url=%s mode=%s calls=%d", worker.url, worker.mode, len(worker.calls))
            reason = f"has sent no heartbeat for {self._hang_timeout:g} s (--hang-timeout): see what holds it up"
            worker.break_off(f"hangs: it {reason}", is_hung=True)
        was_lost = was_healthy and not worker.healthy
        if status == 200 and worker.broken_off is None and not was_lost:
            # A failed request returns only after an answer of the scheduler. Without a failure a long step is no loss.
            if (serves or not worker.has_failed) and worker.mark_healthy(began):
                self._registry.has_takers.send()
            if worker.proof.is_wanted and not worker.is_context_current:
                await read_context_length(self._upstream, worker)
        else:
            worker.mark_unhealthy()
        if worker.healthy != was_healthy:
            level = logging.INFO if worker.healthy else logging.WARNING
            logger.log(level, "worker url=%s mode=%s healthy=%s", worker.url, worker.mode, worker.healthy)

    async def _ask(self, worker: Worker, path: str) -> tuple[int, bytes] | None:
        """Return status and body of the answer. None: there was none."""
        silent_since = worker.silent_since or time.monotonic()
        left = silent_since + self._hang_timeout - time.monotonic()
        seconds = min(CHECK_TIMEOUT, self._hang_timeout, max(left, self._hang_timeout / 8))
        began = time.monotonic()
        try:
            status, body, _ = await self._upstream.ask(worker, "GET", path, seconds=seconds, max_bytes=MAX_CHECK_ANSWER)
        except UpstreamError as error:
            _discount(worker, time.monotonic() - began - seconds)
            cause = error.__cause__
            if isinstance(cause, ConnectError) and worker.connect_error != str(cause):
                # The reason is for example a certificate that is not valid for the host.
                worker.connect_error = str(cause)
                logger.warning("worker cannot be reached url=%s reason=%r", worker.url, worker.connect_error)
            return None
        worker.connect_error = ""
        return status, body

    async def _probe(self, worker: Worker) -> None:
        proof, before = worker.proof, worker.proof.doubt
        async with self._probe_slots:
            problem = None if proof.generates else await generate(self._upstream, worker)
            if problem is None:
                if not proof.generates:
                    proof.generates = True
                    self._has_partner.send()
                if worker.mode in _PARTNER_OF and (problem := await self._probe_pair(worker)) is None:
                    # The worker was proven together with its partner, or it waits for one.
                    return
        if not worker.takes_requests or proof.doubt is None:
            # The worker was lost meanwhile, or a request has proven it.
            return
        if problem is None:
            self._succeed(worker)
            return
        proof.fail(problem, worker.clock.now())
        self._metrics.probes.labels("failed").inc()
        if problem != before:
            logger.warning("worker is not ready url=%s mode=%s reason=%s", worker.url, worker.mode, problem)

    async def _probe_pair(self, worker: Worker) -> str | None:
        """Send a probe request through the worker and a partner. Return the problem, or None if it was answered."""
        partner = self._partner(worker)
        if partner is None:
            # This is not a failure of the worker.
            worker.proof.doubt = f"no {_PARTNER_OF[worker.mode]} worker is registered that could be its partner"
            return None
        is_prefill = worker.mode is DisaggregationMode.PREFILL
        pair = WorkerPair(worker, partner) if is_prefill else WorkerPair(partner, worker)
        problem = await transfer_through(self._upstream, pair, 2 if pair.decode.proof.doubt else 1)
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


def _discount(worker: Worker, stall: float) -> None:
    """Exclude seconds in which this event loop was blocked from the silence of the worker."""
    if worker.silent_since is not None and stall > 0:
        worker.silent_since += stall


async def generate(upstream: Upstream, worker: Worker) -> str | None:
    """Let the worker generate a token without a partner. Return the problem, or None."""
    problem = await _ask(upstream, worker, "GET", "/health_generate")
    return problem and f"it generates nothing: {problem}"


class _ModelInfo(msgspec.Struct, frozen=True):
    max_model_len: Annotated[int, msgspec.Meta(ge=1)] | None = None


async def read_context_length(upstream: Upstream, worker: Worker) -> None:
    """Store the tokens that a request may have on the worker, if it answers."""
    try:
        status, answer, _ = await upstream.ask(worker, "GET", "/get_model_info")
        if status >= 500 or status in (401, 403):
            return
        worker.context_length = msgspec.json.decode(answer, type=_ModelInfo).max_model_len
    except UpstreamError:
        return
    except UNREADABLE:
        worker.context_length = None
    worker.is_context_current = True


async def transfer_through(upstream: Upstream, pair: WorkerPair, num_tokens: int = 2) -> str | None:
    """Send a request for `num_tokens` through the pair. Return the problem: a Misfit if the two are incompatible."""
    params = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"rid": f"probe-{secrets.token_hex(8)}", "input_ids": [0], "sampling_params": params}
    body = with_identity("/generate", body) | {"dispatch": {"probe": True}}
    raw = msgspec.json.encode(with_rooms("/generate", body, pair.prefill.host, pair.prefill.bootstrap_port))
    tasks = [asyncio.create_task(_transfer(upstream, worker, raw)) for worker in (pair.prefill, pair.decode)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if any(task.done() and task.result() for task in tasks):
            # The other worker may report more.
            await asyncio.wait(tasks, timeout=_GRACE)
        else:
            await asyncio.wait(tasks)
        problems = [problem for task in tasks if task.done() and (problem := task.result())]
    finally:
        await end_tasks(tasks)
    return next(
        (problem for problem in problems if isinstance(problem, Misfit)), "; ".join(map(clause, problems)) or None
    )


async def _transfer(upstream: Upstream, worker: Worker, raw: bytes) -> str | None:
    """Send the worker its part of the pair's request. Return the problem, or None."""
    problem = await _ask(upstream, worker, "POST", "/generate", raw)
    if problem is None or isinstance(problem, Misfit):
        return problem
    return f"no KV transfer: {worker.mode} worker {worker.url}: {problem}"


async def _ask(upstream: Upstream, worker: Worker, method: str, path: str, raw: bytes | None = None) -> str | None:
    """Send a probe request. Return the problem, or None if the worker succeeded or does not have the route."""
    try:
        status, answer, _ = await upstream.ask(worker, method, path, raw, seconds=PROBE_TIMEOUT)
    except UpstreamError as error:
        return _message(error.body)
    if status in (200, *_HAS_NO_ROUTE):
        return None
    if status in _REFUSED:
        problem = "does not take this router's key: see" if upstream.key_header else "asks for a key: give the router"
        return f"it {problem} --worker-key-file ({status})"
    return misfit_in(answer) or f"{status}, {_message(answer)}"


def _message(body: bytes) -> str:
    """Return the message of an error body, at most 300 characters."""
    return str(error_object(body).get("message", body.decode(errors="replace")))[:300]
