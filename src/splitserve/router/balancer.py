"""The mini load balancer: takes a client's request, chooses who serves it, and accounts for what came of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from splitserve.api.field_limits import check_fields
from splitserve.api.json_body import parse_object
from splitserve.config import LimitsConfig
from splitserve.core.request import DisaggregationMode
from splitserve.errors import SplitserveError, WorkerUnavailableError, clause
from splitserve.router.access_log import Visit
from splitserve.router.admission import Admission
from splitserve.router.api_keys import first_key, key_header
from splitserve.router.args import LBArgs, PrefillConfig
from splitserve.router.cache_follower import CacheFollower
from splitserve.router.client_stream import ClientStream
from splitserve.router.failure import Cause, Headers, UpstreamError, body_of, error_frames, headers_of, in_log
from splitserve.router.health import HealthMonitor
from splitserve.router.log_words import one_word
from splitserve.router.metrics import RouterMetrics
from splitserve.router.pairing import Body
from splitserve.router.prober import Prober, generate, hand_over
from splitserve.router.prompts import PromptReader
from splitserve.router.rate_limit import RateLimit
from splitserve.router.redaction import redacted, without_addresses
from splitserve.router.registry import WorkerRegistry
from splitserve.router.tries import Tries
from splitserve.router.upstream import Upstream
from splitserve.router.worker import Pair, Worker
from splitserve.router.worker_tls import worker_tls
from splitserve.router.workers_file import WorkersFile

logger = logging.getLogger(__name__)

# Largest body that is parsed in the event loop, bytes: about a millisecond.
_INLINE_BYTES = 256 << 10


class MiniLoadBalancer:
    """Owns the registry, the HTTP client and what watches the workers. `open` and `close` it inside the event loop."""

    def __init__(self, args: LBArgs) -> None:
        self.args = args
        self.registry = WorkerRegistry(args)
        self.metrics = RouterMetrics()
        self._admission = Admission(args.max_running_requests, args.max_queued_requests)
        self.metrics.waiting.set_function(lambda: self._admission.num_queued)
        self._rate_limit = None if args.rate_limit is None else RateLimit(args.rate_limit, args.burst)
        for config in args.prefill:
            self.add_prefill_server(config, is_static=True)
        for url in args.decode:
            self.add_decode_server(url, is_static=True)
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

    def add_prefill_server(self, config: PrefillConfig, *, is_static: bool = False) -> bool:
        return self.registry.add(config.url, DisaggregationMode.PREFILL, config.bootstrap_port, is_static=is_static)

    def add_decode_server(self, url: str, *, is_static: bool = False) -> bool:
        return self.registry.add(url, DisaggregationMode.DECODE, is_static=is_static)

    def select_pair(self) -> Pair:
        return self.registry.select_pair()

    async def open(self) -> None:
        self._upstream = Upstream(self.args, self.registry, self._key_header, self._worker_tls)
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
        """Serve one request to its last byte, streamed or not. Errors go to the client; nothing is raised for them."""
        visit = Visit(path, caller)
        counts = self.metrics.of_route(path)
        counts.requests.inc()
        try:
            if self._rate_limit is not None and caller is not None:
                self._rate_limit.take(caller)
            body = await self._parse(raw)
            await self._dispatch(visit, body, headers, client)
        except UpstreamError as error:
            await self._fail_upstream(visit, client, error)
        except SplitserveError as error:
            self._log_failure(visit, "router", error.http_status, body_of(error))
            await self._fail(visit, client, "router", error.http_status, body_of(error), headers_of(error))
        except asyncio.CancelledError:
            visit.fail("client", 499)
            raise
        finally:
            counts.duration.observe(time.monotonic() - visit.arrived)
            if self.args.access_log:
                visit.log(client)

    async def _parse(self, raw: bytes) -> Body:
        """Parse the body of a request. Raises InvalidRequestError."""
        limits = self.args.limits
        if len(raw) <= _INLINE_BYTES:
            return parse_request(raw, limits)
        return await asyncio.to_thread(parse_request, raw, limits)

    async def _dispatch(self, visit: Visit, body: Body, headers: Headers, client: ClientStream) -> None:
        tries = visit.tries = Tries(
            visit.route,
            body,
            headers,
            client,
            upstream=self.upstream,
            registry=self.registry,
            metrics=self.metrics,
            prompts=self._prompts,
            timeout=self.args.timeout,
            max_retries=self.args.max_retries,
            max_prefill_retries=self.args.max_prefill_retries,
            hang_timeout=self.args.hang_timeout,
        )
        async with self._admission.place(tries.rid, tries.seconds_left) as tries.queued:
            self.metrics.running.inc()
            try:
                await tries.run()
            finally:
                self.metrics.running.dec()

    async def _fail_upstream(self, visit: Visit, client: ClientStream, error: UpstreamError) -> None:
        self._log_failure(visit, error.side, error.status, error.body, error.url)
        body = error.body
        if error.cause is not Cause.REQUEST:
            body = redacted(body, (worker.host for worker in self.registry.all()))
        await self._fail(visit, client, error.side, error.status, body, error.headers)

    def _log_failure(self, visit: Visit, side: str, status: int, body: bytes, url: str = "-") -> None:
        rid = one_word(None if visit.tries is None else visit.tries.rid)
        logger.warning(
            "request failed rid=%s route=%s side=%s worker=%s status=%d error=%s",
            rid,
            visit.route,
            side,
            url,
            status,
            in_log(body),
        )

    async def _fail(
        self, visit: Visit, client: ClientStream, side: str, status: int, body: bytes, extra: Headers
    ) -> None:
        visit.fail(side, status)
        self.metrics.errors.labels(visit.route, side, str(status)).inc()
        if not client.started:
            await client.respond(status, body, extra)
        elif client.is_event_stream:
            await client.end(error_frames(body, mid_frame=client.mid_frame))
        else:
            raise ConnectionAbortedError("the answer broke off after its headers")

    async def prove_path(self) -> None:
        """Have a pair generate, or a colocated worker where there are no pairs, chosen as for a request.

        Raises WorkerUnavailableError, saying why it cannot.
        """
        target = self.registry.select()
        if isinstance(target, Pair):
            problem = await hand_over(self.upstream, target)
        else:
            problem = await generate(self.upstream, target)
        if problem is not None:
            logger.warning("health generation failed reason=%r", problem)
            problem = without_addresses(problem, (worker.host for worker in self.registry.all()))
            raise WorkerUnavailableError(f"{clause(problem)} (stage: health generation)")

    async def ask_all(
        self, workers: Sequence[Worker], method: str, path: str, body: bytes | None = None
    ) -> list[tuple[Worker, int, bytes]]:
        """The same short question to several workers at once: status and body of each; 503 for one that is lost."""

        async def ask(worker: Worker) -> tuple[Worker, int, bytes]:
            try:
                status, answer, _ = await self.upstream.ask(worker, method, path, body, seconds=30.0)
            except UpstreamError as error:
                return worker, error.status, error.body
            return worker, status, answer

        return await asyncio.gather(*(ask(worker) for worker in workers))


def parse_request(raw: bytes, limits: LimitsConfig) -> Body:
    """Return the body of a request to generate. Raises InvalidRequestError."""
    body = parse_object(raw, limits)
    check_fields(body, limits)
    return body
