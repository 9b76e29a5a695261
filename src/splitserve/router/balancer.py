"""Mini load balancer: serves each client request with selected workers, and records its metrics and log line."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from splitserve.api.api_keys import first_key, key_header
from splitserve.api.responses import Headers, error_body, error_headers
from splitserve.api.tls import worker_tls
from splitserve.api.validation import check_fields, parse_object
from splitserve.core.errors import SplitserveError, WorkerUnavailableError, clause
from splitserve.core.limits import LimitsConfig
from splitserve.core.request import DisaggregationMode
from splitserve.router.access_log import LoggedRequest
from splitserve.router.admission import RateLimit, RequestAdmission
from splitserve.router.args import LBArgs
from splitserve.router.attempts import RequestAttempts
from splitserve.router.cache_follower import CacheFollower
from splitserve.router.client_stream import ClientStream
from splitserve.router.failure import FailureCause, UpstreamError, error_frames, in_log, redacted, without_addresses
from splitserve.router.health import HealthMonitor
from splitserve.router.log_words import one_word
from splitserve.router.metrics import RouterMetrics
from splitserve.router.pairing import Body, check_num_samples
from splitserve.router.prober import Prober, generate, transfer_through
from splitserve.router.prompts import PromptReader
from splitserve.router.registry import WorkerRegistry
from splitserve.router.upstream import Upstream
from splitserve.router.worker import Worker, WorkerPair
from splitserve.router.workers_file import WorkersFile

logger = logging.getLogger(__name__)

# Largest body that is parsed in the event loop, bytes: takes about a millisecond.
_INLINE_BYTES = 256 << 10


class MiniLoadBalancer:
    """Owner of the registry, the HTTP client and the tasks that watch workers.

    Call `open` and `close` in the event loop.
    """

    def __init__(self, args: LBArgs) -> None:
        self.args = args
        self.registry = WorkerRegistry(args)
        self.metrics = RouterMetrics()
        self._admission = RequestAdmission(args.max_running_requests, args.max_queued_requests)
        self.metrics.waiting.set_function(lambda: self._admission.num_queued)
        self._rate_limit = None if args.rate_limit is None else RateLimit(args.rate_limit, args.burst)
        for config in args.prefill:
            self.registry.add(config.url, DisaggregationMode.PREFILL, config.bootstrap_port, is_static=True)
        for url in args.decode:
            self.registry.add(url, DisaggregationMode.DECODE, is_static=True)
        for url in args.workers:
            self.registry.add(url, DisaggregationMode.NULL, is_static=True)
        self._workers_file = None
        if args.workers_file is not None:
            self._workers_file = WorkersFile(args.workers_file, self.registry, args.health_interval)
        path = args.worker_key_file
        self._key_header = key_header(None if path is None else first_key(path, "--worker-key-file"))
        self._worker_tls = worker_tls(args.worker_ssl_ca_certs, args.worker_ssl_certfile, args.worker_ssl_keyfile)
        self._prompts = PromptReader(lambda: self.registry.context_length)
        self._tasks: list[asyncio.Task[None]] = []
        self._upstream: Upstream | None = None

    async def open(self) -> None:
        self._upstream = Upstream(self.args, self._key_header, self._worker_tls)
        monitor = HealthMonitor(self.registry, self._upstream, self.args.health_interval, self.args.hang_timeout)
        follower = CacheFollower(
            self.registry, self._upstream, self._prompts, self.args.model, self.args.health_interval
        )
        self._tasks = [asyncio.create_task(monitor.run()), asyncio.create_task(follower.run())]
        if self.args.probe:
            self._tasks.append(asyncio.create_task(Prober(self.registry, self._upstream, self.metrics).run()))
        if self._workers_file is not None:
            self._tasks.append(asyncio.create_task(self._workers_file.run()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._prompts.close()
        if self._upstream is not None:
            await self._upstream.close()

    @property
    def upstream(self) -> Upstream:
        if self._upstream is None:
            raise RuntimeError("the balancer is not open")
        return self._upstream

    async def generate(
        self, path: str, raw: bytes, headers: Headers, client: ClientStream, caller: str | None = None
    ) -> None:
        """Serve one request to its last byte, streamed or not. Errors are sent to the client and not raised."""
        record = LoggedRequest(path, caller)
        counts = self.metrics.of_route(path)
        counts.requests.inc()
        try:
            if self._rate_limit is not None and caller is not None:
                self._rate_limit.take(caller)
            body = await self._parse(path, raw)
            await self._dispatch(record, body, headers, client)
        except UpstreamError as error:
            self._log_failure(record, error.worker.side, error.status, error.body, error.worker.url)
            answer = error.body
            if error.cause is not FailureCause.REQUEST:
                answer = redacted(answer, (worker.host for worker in self.registry.all()))
            await self._fail(record, client, error.worker.side, error.status, answer, error.headers)
        except SplitserveError as error:
            answer = error_body(error)
            self._log_failure(record, "router", error.http_status, answer)
            await self._fail(record, client, "router", error.http_status, answer, error_headers(error))
        except asyncio.CancelledError:
            record.fail("client", 499)
            raise
        finally:
            counts.duration.observe(time.monotonic() - record.arrived)
            if self.args.access_log:
                record.log(client)

    async def _parse(self, path: str, raw: bytes) -> Body:
        """Parse the body of a request. Raises InvalidRequestError."""
        limits = self.args.limits
        if len(raw) <= _INLINE_BYTES:
            return parse_request(path, raw, limits)
        return await asyncio.to_thread(parse_request, path, raw, limits)

    async def _dispatch(self, record: LoggedRequest, body: Body, headers: Headers, client: ClientStream) -> None:
        attempts = record.attempts = RequestAttempts(
            record.route,
            body,
            headers,
            client,
            upstream=self.upstream,
            registry=self.registry,
            metrics=self.metrics,
            prompts=self._prompts,
            args=self.args,
        )
        attempts.queued = await self._admission.enter(attempts.rid, attempts.seconds_left)
        self.metrics.running.inc()
        try:
            await attempts.run()
        finally:
            self.metrics.running.dec()
            self._admission.leave()

    def _log_failure(self, record: LoggedRequest, side: str, status: int, body: bytes, url: str = "-") -> None:
        rid = one_word(None if record.attempts is None else record.attempts.rid)
        logger.warning(
            "request failed rid=%s route=%s side=%s worker=%s status=%d error=%s",
            rid,
            record.route,
            side,
            url,
            status,
            in_log(body),
        )

    async def _fail(
        self, record: LoggedRequest, client: ClientStream, side: str, status: int, body: bytes, extra: Headers
    ) -> None:
        record.fail(side, status)
        self.metrics.errors.labels(record.route, side, str(status)).inc()
        if not client.started:
            await client.respond(status, body, extra)
        elif client.is_event_stream:
            await client.end(error_frames(body))
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


def parse_request(path: str, raw: bytes, limits: LimitsConfig) -> Body:
    """Return the body of a request to generate. Raises InvalidRequestError."""
    body = parse_object(raw, limits)
    check_fields(body, limits)
    check_num_samples(path, body, limits)
    return body
