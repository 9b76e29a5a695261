"""Mini load balancer: serves each client request with selected workers, and records its metrics and log line."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from splitserve.api.api_keys import first_key, key_header
from splitserve.api.responses import Headers, IdWaits, error_body, error_headers, event_of
from splitserve.api.tls import worker_tls
from splitserve.api.validation import check_fields, check_rooms, parse_object, request_ids, stage
from splitserve.core.errors import (
    ConfigError,
    DuplicateRequestError,
    InvalidRequestError,
    SplitserveError,
    WorkerUnavailableError,
    clause,
)
from splitserve.core.request import DisaggregationMode
from splitserve.process.threads import end_tasks
from splitserve.router.aborts import AbortOrders
from splitserve.router.access_log import LoggedRequest, one_word, word_or_none
from splitserve.router.admission import RateLimit, RequestAdmission
from splitserve.router.args import LBArgs
from splitserve.router.attempts import RequestAttempts, RouterParts
from splitserve.router.cache_follower import CacheFollower, PromptReader
from splitserve.router.client_stream import ClientStream
from splitserve.router.exchange import READ_SECONDS
from splitserve.router.health import HealthMonitor, generate, transfer_through
from splitserve.router.latencies import StreamLatencies
from splitserve.router.live import LiveView
from splitserve.router.live_events import LiveEventLog
from splitserve.router.live_requests import LiveRequests
from splitserve.router.live_samples import WorkerSampler
from splitserve.router.metrics import RouterMetrics
from splitserve.router.pairing import Body, check_num_samples
from splitserve.router.register import WorkersFile
from splitserve.router.registry import WorkerRegistry
from splitserve.router.request_trace import START_HEADER, FinishedTrace
from splitserve.router.trace_store import TraceStore
from splitserve.router.upstream import FailureCause, Upstream, UpstreamError, in_log, message_in, without_addresses
from splitserve.router.waiting import WorkerWait
from splitserve.router.worker import Worker, WorkerPair

logger = logging.getLogger(__name__)

# Largest body that is parsed in the event loop, bytes: takes about a millisecond.
_INLINE_BYTES = 256 << 10
# Maximum number of requests that do not generate and wait for a worker.
_MAX_OTHERS = 64


class MiniLoadBalancer:
    """Owner of the registry, the HTTP client and the tasks that watch workers.

    Call `open` and `close` in the event loop.
    """

    def __init__(self, args: LBArgs) -> None:
        self.args = args
        self.registry = WorkerRegistry(args)
        self.metrics = RouterMetrics()
        self.traces = TraceStore(args.trace_records, args.trace_sample)
        self._spans: SpanQueue | None = None
        if args.otlp_traces_endpoint is not None:
            try:
                from splitserve.router.otel import SpanQueue, otlp_exporter

                exporter = otlp_exporter(args.otlp_traces_endpoint, args.otlp_protocol)
            except ImportError as missing:
                problem = f"--otlp-traces-endpoint needs {missing.name}: pip install 'splitserve[otel]'"
                raise ConfigError(problem) from missing
            self._spans = SpanQueue(exporter, self.traces.clocks, self.metrics.dropped_traces.inc)
            self.traces.on_stored = self._spans.add
        # Requests that have not ended, by the identity of their record, and their ids.
        self.running: dict[int, tuple[LoggedRequest, ClientStream]] = {}
        self._rids: dict[str, ClientStream] = {}
        self._id_waits = IdWaits()
        self.aborts = AbortOrders()
        self.traces.listeners.append(self.metrics.observe_finish)
        self._admission = RequestAdmission(args.max_running_requests, args.max_queued_requests)
        returned, wait = self.registry.has_takers, args.worker_wait_timeout
        self._worker_wait = WorkerWait(returned, wait, args.max_queued_requests)
        # For requests that do not generate. They must not fill the queue of those that do.
        self.other_wait = WorkerWait(returned, wait, _MAX_OTHERS)
        self.metrics.waiting.set_function(self._num_waiting)
        self.metrics.oldest.labels("admission").set_function(self._admission.queue.oldest_wait)
        self.metrics.oldest.labels("worker").set_function(self._worker_wait.queue.oldest_wait)
        self._rate_limit = None if args.rate_limit is None else RateLimit(args.rate_limit, args.burst)
        self._add_static_workers()
        path = args.worker_key_file
        self.upstream = Upstream(
            args,
            key_header(None if path is None else first_key(path, "--worker-key-file")),
            worker_tls(args.worker_ssl_ca_certs, args.worker_ssl_certfile, args.worker_ssl_keyfile),
        )
        self._prompts = PromptReader(lambda: self.registry.context_length)
        self.live = self._live_view()
        self._parts = RouterParts(
            args=args,
            registry=self.registry,
            upstream=self.upstream,
            metrics=self.metrics,
            prompts=self._prompts,
            latencies=self.live.latencies,
            events=self.live.events,
            worker_wait=self._worker_wait,
        )
        monitor = HealthMonitor(self.registry, self.upstream, self.metrics, args)
        follower = CacheFollower(self.registry, self.upstream, self._prompts, args.model, args.health_interval)
        # Work beside the requests: for each worker, and for the router.
        self._watches = (monitor.watch, follower.watch, self.live.sampler.watch)
        self._runs = [self._watch_workers, self.live.run, self.metrics.loop_lag.run]
        if args.workers_file is not None:
            self._runs.append(WorkersFile(args.workers_file, self.registry, args.health_interval).run)
        self._tasks: list[asyncio.Task[None]] = []

    def _add_static_workers(self) -> None:
        args = self.args
        for config in args.prefill:
            self.registry.add(config.url, DisaggregationMode.PREFILL, config.bootstrap_port, is_static=True)
        for url in args.decode:
            self.registry.add(url, DisaggregationMode.DECODE, is_static=True)
        for url in args.workers:
            self.registry.add(url, DisaggregationMode.NULL, is_static=True)

    def end_waits(self) -> None:
        """End everything that would outlast the running requests when the router stops. Idempotent."""
        self.live.end()
        self._worker_wait.close()
        self.other_wait.close()

    def _num_waiting(self) -> int:
        return self._admission.queue.num_waiting + self._worker_wait.queue.num_waiting

    def _live_view(self) -> LiveView:
        live = LiveView(
            registry=self.registry,
            sampler=WorkerSampler(self.upstream, lambda: live.wake()),
            requests=LiveRequests(self.running),
            latencies=StreamLatencies(),
            events=LiveEventLog(),
            take_loop_lag=self.metrics.loop_lag.take_longest,
        )
        self.traces.listeners.append(live.requests.finish)
        return live

    async def open(self) -> None:
        self._tasks = [asyncio.create_task(run()) for run in self._runs]

    async def close(self) -> None:
        await end_tasks(self._tasks)
        self._prompts.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
        await self.upstream.close()

    async def _watch_workers(self) -> None:
        """Keep the watches of all workers running until cancelled. Forget workers that are gone."""
        tasks: dict[Worker, list[asyncio.Task[None]]] = {}
        has_joined = self.registry.has_joined
        try:
            while True:
                has_joined.clear()
                self.registry.forget_gone()
                workers = self.registry.all()
                for worker in tasks.keys() - set(workers):
                    await end_tasks(tasks.pop(worker))
                for worker in workers:
                    if worker not in tasks:
                        tasks[worker] = [asyncio.create_task(self._watch(watch, worker)) for watch in self._watches]
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.args.health_interval):
                        await has_joined.wait()
        finally:
            await end_tasks([task for watches in tasks.values() for task in watches])

    async def _watch(self, watch: Callable[[Worker], Awaitable[None]], worker: Worker) -> None:
        """Run a watch until it returns. Restart it after an error: a worker without a watch could hang unnoticed."""
        while True:
            try:
                return await watch(worker)
            except Exception:
                logger.exception("watch of a worker failed and is restarted url=%s mode=%s", worker.url, worker.mode)
            await asyncio.sleep(self.args.health_interval)

    async def generate(
        self,
        path: str,
        raw: bytes,
        headers: Headers,
        client: ClientStream,
        caller: str | None = None,
        received_at: float | None = None,
    ) -> None:
        """Serve one request to its last byte, streamed or not. Errors are sent to the client and not raised.

        `received_at`: clock time at which the head of the request was received.
        """
        arrived = time.monotonic() if received_at is None else received_at
        started = headers.pop(START_HEADER, None)
        record = LoggedRequest(path, caller, arrived, headers.get("traceparent"), headers.get("x-request-id"), started)
        client.request_id = record.answer_id
        self.running[id(record)] = record, client
        self.metrics.requests.labels(path).inc()
        try:
            if self._rate_limit is not None and caller is not None:
                self._rate_limit.take(caller)
            record.num_bytes = len(raw)
            body = await self._parse(path, raw, record.answer_id or "")
            record.trace.parsed_at = time.monotonic()
            attempts = RequestAttempts(self._parts, record, body, headers, client)
            only = self._only(request_ids(record.rid), client, attempts.seconds_left)
            async with self.aborts.obeyed(record), only:
                record.queued = await self._admission.enter(record.rid, attempts.seconds_left)
                record.trace.admitted_at = time.monotonic()
                self.metrics.running.inc()
                try:
                    await attempts.run()
                finally:
                    self.metrics.running.dec()
                    self._admission.leave()
        except (UpstreamError, SplitserveError) as error:
            await self._fail(record, client, error)
        except (asyncio.CancelledError, ConnectionAbortedError):
            cause = "client_too_slow" if client.is_dropped else "client_disconnected"
            record.side, record.status, record.error = "client", 499, cause
            raise
        finally:
            self._finish(record, client)

    @asynccontextmanager
    async def _only(self, rids: list[str], client: ClientStream, seconds_left: float) -> AsyncIterator[None]:
        """Hold the ids of a request until its client has the answer. Raises DuplicateRequestError if one stays held."""

        def is_held(rid: str) -> bool:
            return rid in self._rids and not self._rids[rid].finished

        await self._id_waits.wait(rids, is_held, seconds_left)
        if (held := next(filter(is_held, rids), None)) is not None:
            raise DuplicateRequestError(held)
        self._rids.update(dict.fromkeys(rids, client))
        try:
            yield
        finally:
            for rid in rids:
                if self._rids.get(rid) is client:
                    del self._rids[rid]

    def _finish(self, record: LoggedRequest, client: ClientStream) -> None:
        """Count, log and trace a request that has ended."""
        del self.running[id(record)]
        now = time.monotonic()
        summary = record.summary(client, now)
        if self.args.access_log:
            record.log(summary, client)
        trace = FinishedTrace(
            now, record.caller, client.request_id, summary, record.trace, client.started_at, record.is_stream
        )
        self.traces.add(trace)

    async def _parse(self, path: str, raw: bytes, request_id: str) -> Body:
        """Parse the body of a request. `request_id`: its id if it has no `rid`. Raises InvalidRequestError."""
        limits = self.args.limits

        def parse() -> Body:
            with stage(request_id, "validation"):
                body = parse_object(raw, limits)
            with stage(body.get("rid") or request_id, "validation"):
                check_fields(body, limits)
                check_num_samples(path, body, limits)
                # Check it here, because the router replaces it and workers never receive it.
                check_rooms(body.get("bootstrap_room"))
            return body

        return parse() if len(raw) <= _INLINE_BYTES else await asyncio.to_thread(parse)

    async def _fail(self, record: LoggedRequest, client: ClientStream, error: UpstreamError | SplitserveError) -> None:
        """Log a failure, count it, and send it to the client."""
        if isinstance(error, UpstreamError):
            side = "client" if error.cause is FailureCause.REQUEST else error.worker.side
            url, headers = error.worker.url, error.headers
            status, body, record.error = error.status, error.body, error.code or str(error.status)
        else:
            self.metrics.count_rejection(error.reason)
            side = "client" if isinstance(error, InvalidRequestError) else "router"
            url, headers = "-", error_headers(error)
            status, body, record.error = error.http_status, error_body(error), error.reason
        own = word_or_none(record.request_id)
        ids = one_word(record.rid) + (f" request_id={own}" if own not in (None, record.rid) else "")
        values = (ids, record.route, side, url, status, in_log(body))
        logger.warning("request failed rid=%s route=%s side=%s worker=%s status=%d error=%s", *values)
        if isinstance(error, UpstreamError):
            body = error.redacted(worker.host for worker in self.registry.all())
        record.trace.error_message = message_in(body)
        record.side, record.status = side, status
        self.metrics.errors.labels(record.route, side, str(status)).inc()
        if not client.started:
            await client.respond(status, body, headers)
        elif client.is_event_stream:
            try:
                async with asyncio.timeout(READ_SECONDS):
                    await client.end(event_of(b" ".join(body.split(b"\n"))) + event_of(b"[DONE]"))
            except TimeoutError:
                await client.drop()
        else:
            raise ConnectionAbortedError("the answer broke off after its headers")

    async def prove_path(self) -> None:
        """Let a pair generate, or a colocated worker if there are no pairs, selected as for a request.

        Raises WorkerUnavailableError with the reason of a failure.
        """
        target = self.registry.select()
        if isinstance(target, WorkerPair):
            problem = await transfer_through(self.upstream, target)
        else:
            problem = await generate(self.upstream, target)
        if problem is not None:
            logger.warning("health generation failed reason=%r", problem)
            problem = without_addresses(problem, (worker.host for worker in self.registry.all()))
            raise WorkerUnavailableError(f"{clause(problem)} (stage: health generation)")

    async def ask_all(
        self, workers: Sequence[Worker], method: str, path: str, body: bytes | None = None
    ) -> list[tuple[Worker, int, bytes]]:
        """Send one short request to several workers at once. Return status and body of each; 503 for a lost one."""

        async def ask(worker: Worker) -> tuple[Worker, int, bytes]:
            try:
                status, answer, _ = await self.upstream.ask(worker, method, path, body, seconds=30.0)
            except UpstreamError as error:
                return worker, error.status, error.body
            return worker, status, answer

        return await asyncio.gather(*(ask(worker) for worker in workers))
