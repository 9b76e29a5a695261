"""One worker: a front end with HTTP (this process) and a child process that computes, the scheduler.

With `dp_size` N there are N schedulers. The worker serves when all are ready, and ends when the first of them dies.

Life cycle of a worker:
1. The HTTP socket is bound, the model is found, and the process of the first scheduler starts (`start.py`). On prefill
   workers the bootstrap server is started. If the model is sharded over ranks on several hosts, this is node 0, and it
   waits for the other nodes.
2. The scheduler process loads. Meanwhile the front end answers requests, /health with 503.
3. The scheduler is ready: the ready file is written, and the worker registers at its routers.
4. It serves until a signal, its parent's end or the scheduler's death. Its role may change (`role_switch.py`).
5. Drain: it deregisters, rejects new requests and finishes running ones, up to a deadline.
6. Everything is closed in reverse order, the scheduler last. No process, socket or file is left.

This module does not know requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from splitserve.api.http_server import HttpServer, port_of, reachable_host
from splitserve.api.tokenizer import Tokenizer
from splitserve.core.config import DisaggregationConfig, WorkerConfig
from splitserve.core.errors import SchedulerLostError, WorkerDrainingError, WorkerUnavailableError
from splitserve.core.groups import group_of
from splitserve.core.messages import SchedulerReady
from splitserve.core.options import size_text
from splitserve.core.request import FAKE_BACKEND, DisaggregationMode
from splitserve.process.lifecycle import Lifecycle, ReadyInfo, drain_line, request_hint, write_ready_file
from splitserve.process.process_end import is_starter_watched
from splitserve.process.threads import end_tasks
from splitserve.ranks.launch import LaunchConfig
from splitserve.ranks.node_head import NodeHead, gather_nodes
from splitserve.ranks.processes import EarlyProcess, Schedulers, open_schedulers
from splitserve.server.app import build_app
from splitserve.server.fake_transfer import FAKE_ACCEPTED, FAKE_HEADER
from splitserve.server.front_end import FrontEnd, Heartbeat
from splitserve.server.scheduler_group import SchedulerGroup
from splitserve.worker.checks import router_key, router_tls, server_tls
from splitserve.worker.memory import WorkerMemory
from splitserve.worker.registration import RouterRegistration
from splitserve.worker.role_switch import OwnBootstrap, WorkerRoleSwitch

logger = logging.getLogger(__name__)

# Seconds in which answers that end in an error may reach their clients.
_ERROR_FLUSH_SECONDS = 2.0
# Seconds for which a last message of the scheduler may still arrive after its end.
_LAST_WORDS_SECONDS = 1.0


class ServingWorker:
    def __init__(
        self,
        config: WorkerConfig,
        options: LaunchConfig,
        sock: socket.socket,
        folder: Path,
        head_socket: socket.socket | None,
        early: EarlyProcess | None,
    ) -> None:
        """Create the worker, which closes the sockets.

        `head_socket`: listener for the other nodes. None: there are none. `early`: process for the first scheduler.
        """
        self._early = early
        settings = config.server
        self._head_socket = head_socket
        self._config = config
        self._options = options
        self._socket = sock
        self._folder = folder
        self._mode = config.disaggregation.mode
        self._lifecycle = Lifecycle()
        self._has_served = False
        self._bootstrap = OwnBootstrap(config.disaggregation)
        # How others reach this worker.
        self._scheme = "http" if settings.ssl_certfile is None else "https"
        is_wildcard = settings.host in ("0.0.0.0", "::", "")
        self._host = reachable_host(config.disaggregation.host if is_wildcard else settings.host)
        self._port = port_of(sock)

    async def run(self, tokenizer: Tokenizer) -> int:
        code = await self._run(tokenizer)
        if self._lifecycle.draining.is_set():
            logger.info(self._lifecycle.end_line("every process of the worker", has_served=self._has_served))
        return code

    async def _run(self, tokenizer: Tokenizer) -> int:
        async with AsyncExitStack() as closing:
            closing.enter_context(self._lifecycle.watch(exit_with_parent=self._options.exit_with_parent))
            closing.callback(self._bootstrap.close)
            bootstrap_url = None
            if self._mode is DisaggregationMode.PREFILL:
                bootstrap_url = await self._bootstrap.open(self._config.disaggregation.bootstrap_port)
            head = None
            if self._head_socket is not None:
                timeout = self._config.model.load_timeout
                head = await gather_nodes(
                    self._config, self._head_socket, self._folder, self._lifecycle, timeout, closing
                )
                if head is None:
                    self._socket.close()
                    return self._exit_code_before_serving()
            schedulers = await open_schedulers(
                self._config, str(self._folder), closing, bootstrap_url=bootstrap_url, head=head, early=self._early
            )
            if head is not None:
                head.on_failed = schedulers.group.failed
            app = build_app(
                config=self._config,
                scheduler=schedulers.group,
                tokenizer=tokenizer,
                model_path=str(self._folder),
                bootstrap_port=self._bootstrap.port,
                scheduler_pids=schedulers.pids,
            )
            settings = self._config.server
            server = HttpServer(app, self._socket, server_tls(settings), settings.limits)
            closing.push_async_callback(server.stop, _ERROR_FLUSH_SECONDS)
            await server.start()
            if not await self._loaded(schedulers):
                return self._exit_code_before_serving()
            return await self._serve(schedulers, server, app.state.front, head)

    def _exit_code_before_serving(self) -> int:
        return self._lifecycle.exit_code(has_served=False) if self._lifecycle.draining.is_set() else 1

    async def _loaded(self, schedulers: Schedulers) -> bool:
        """Wait until all schedulers are ready. Return False if a signal came before. Raises SplitserveError."""
        ready = asyncio.create_task(schedulers.group.ready(self._config.model.load_timeout))
        draining = asyncio.create_task(self._lifecycle.draining.wait())
        try:
            await asyncio.wait({ready, draining, schedulers.ended}, return_when=asyncio.FIRST_COMPLETED)
            if draining.done() and not ready.done():
                return False
            if schedulers.ended.done() and not ready.done():
                await asyncio.wait({ready}, timeout=_LAST_WORDS_SECONDS)
                problem = "while it loaded the model: see the log above, and whether memory ran out"
                schedulers.group.fail_all(SchedulerLostError(f"the {schedulers.ended.result()} {problem}"))
            await ready
            return True
        finally:
            if schedulers.group.info is None:
                # Schedulers do not watch their input while they import modules. They hold no resources yet.
                schedulers.kill()
            await end_tasks((ready, draining))

    async def _serve(self, schedulers: Schedulers, server: HttpServer, front: FrontEnd, head: NodeHead | None) -> int:
        self._has_served = True
        url = self._write_ready_file(schedulers)
        if head is not None:
            head.serves(url)
        settings = self._config.server
        registration = RouterRegistration(
            settings.router_urls,
            self._host,
            self._port,
            api_key=router_key(settings),
            tls=router_tls(settings),
            scheme=self._scheme,
        )
        registration.enter(self._mode, self._bootstrap.port)
        switch = WorkerRoleSwitch(front, schedulers.group, self._bootstrap, registration)
        front.switch_role = switch.switch
        memory = WorkerMemory(front, schedulers.group, self._bootstrap, registration, switch.broken)
        front.memory, changes = memory, (switch, memory)
        front.silence, front.heartbeat = schedulers.silence, Heartbeat(schedulers.group, front.clock)
        heartbeat = asyncio.create_task(front.heartbeat.run(), name="heartbeat")
        draining = asyncio.create_task(self._lifecycle.draining.wait())
        drained: asyncio.Task[None] | None = None
        try:
            ends: set[asyncio.Future[Any]] = {draining, schedulers.ended, switch.broken}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not (schedulers.ended.done() or switch.broken.done()):
                drained = asyncio.create_task(self._drain(schedulers.group, server, front, changes, registration))
                await asyncio.wait({drained, schedulers.ended}, return_when=asyncio.FIRST_COMPLETED)
            if not (schedulers.ended.done() or switch.broken.done()):
                return self._lifecycle.exit_code(has_served=True)
            error = _died(schedulers.ended.result()) if schedulers.ended.done() else _broke(switch.broken.result())
            logger.error("%s", error)
            # Ranks on other nodes may wait inside collectives for the ranks that ended here.
            if head is not None:
                head.end(error.message)
            # Every open request ends with this error before the server closes.
            schedulers.group.fail_all(error)
            return 1
        finally:
            draining.cancel()
            heartbeat.cancel()
            if drained is not None:
                await drained
            for change in changes:
                await change.close()
            await registration.leave()

    def _write_ready_file(self, schedulers: Schedulers) -> str:
        """Write the ready file. Return this worker's URL."""
        url = f"{self._scheme}://{self._host}:{self._port}"
        loaded = schedulers.group.info
        assert loaded is not None
        num_tokens = loaded.pages_total * loaded.page_size
        pool_bytes = num_tokens * loaded.kv_bytes_per_token * group_of(self._config).group_size
        pids = (os.getpid(), *schedulers.pids, *schedulers.follower_pids)
        logger.info(
            "%s worker ready url=%s bootstrap_port=%s %s",
            self._mode.adjective,
            url,
            self._bootstrap.port,
            startup_figures(self._config, loaded, pool_bytes, memory_bytes(pids)),
        )
        if (line := fake_transfer_line(self._config.disaggregation)) is not None:
            logger.warning("%s", line)
        if self._options.ready_file is not None:
            info = ReadyInfo(
                pid=os.getpid(),
                scheduler_pids=schedulers.pids,
                follower_pids=schedulers.follower_pids,
                port=self._port,
                bootstrap_port=self._bootstrap.port,
                url=url,
                disaggregation_mode=str(self._mode),
                model=self._config.served_model_name,
                dtype=loaded.dtype,
                quantization=loaded.weights_quantization,
                device=loaded.device,
                kv_pool_tokens=num_tokens,
                kv_pool_bytes=pool_bytes,
            )
            write_ready_file(self._options.ready_file, info)
        self._print_hint(url)
        return url

    def _print_hint(self, url: str) -> None:
        """Print a request to try on standard output, if a user started this worker and it answers alone."""
        settings = self._config.server
        is_for_program = settings.log_format == "json" or self._options.ready_file is not None or is_starter_watched()
        if is_for_program or self._mode is not DisaggregationMode.NULL or settings.router_urls:
            return
        model, has_keys = self._config.served_model_name, settings.api_key_file is not None
        lines = (*request_hint(url, model, has_keys=has_keys), "Ctrl-C drains and stops")
        # A closed standard output does not end a worker. AttributeError: it was closed before the start.
        with suppress(OSError, ValueError, AttributeError):
            sys.stdout.write("".join(f"{line}\n" for line in lines))
            sys.stdout.flush()

    async def _drain(
        self,
        group: SchedulerGroup,
        server: HttpServer,
        front: FrontEnd,
        changes: Iterable[WorkerRoleSwitch | WorkerMemory],
        registration: RouterRegistration,
    ) -> None:
        """Finish running requests; those left at the deadline or the second signal end with an error."""
        front.requests.drain()
        logger.info(drain_line(front.requests.num_open_samples, self._options.drain_timeout))
        for change in changes:
            await change.close()
        await registration.leave()
        idle = asyncio.create_task(front.requests.wait_idle(self._options.drain_timeout))
        stopping = asyncio.create_task(self._lifecycle.stopping.wait())
        await asyncio.wait({idle, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if idle.done() and not idle.result():
            logger.warning("requests were still running after %g s: cut off", self._options.drain_timeout)
        await end_tasks((idle, stopping))
        group.fail_all(WorkerDrainingError("this worker is shutting down: send the request again, to another"))
        await server.stop(_ERROR_FLUSH_SECONDS)


def startup_figures(config: WorkerConfig, info: SchedulerReady, pool_bytes: int, memory: int) -> str:
    """Return the figures for sizing a worker, as NAME=VALUE.

    `info`: of all schedulers. `memory`: bytes that the worker's processes use.
    """
    figures = {
        "model": config.served_model_name,
        "dtype": info.dtype,
        "quantization": info.weights_quantization,
        "device": info.device,
        "kernels": info.kernels or "torch",
        "context_length": info.max_total_tokens_per_request,
        "kv_pool_tokens": info.pages_total * info.page_size,
        "kv_pool": size_text(pool_bytes).replace(" ", ""),
        "memory": size_text(memory).replace(" ", ""),
        "threads": info.threads,
        "transfer_backend": config.disaggregation.transfer_backend,
    }
    return " ".join(f"{name}={value}" for name, value in figures.items() if value is not None)


def fake_transfer_line(config: DisaggregationConfig) -> str | None:
    """Return the line that marks a worker with a fake transfer. None: its transfers are real."""
    if config.transfer_backend != FAKE_BACKEND:
        return None
    link = " ".join(f"{name}={value}" for name, value in sorted(config.transfer_options.items())) or "unlimited"
    what = "its KV cache goes to a sink" if config.mode is DisaggregationMode.PREFILL else "answers are MEANINGLESS"
    return (
        f"FAKE TRANSFER: this {config.mode} worker has no peer, and {what} (link: {link}). Requests need the header "
        f"{FAKE_HEADER}: {FAKE_ACCEPTED}. Use it for benchmarks and warm-up only"
    )


def memory_bytes(pids: Iterable[int]) -> int:
    """Return the resident bytes of processes. One that has ended counts as 0."""
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def _broke(what: str) -> WorkerUnavailableError:
    return WorkerUnavailableError(f"{what}; this worker ends, see its log; send the request again")


def _died(what: str) -> SchedulerLostError:
    return SchedulerLostError(f"the {what}: this worker ends, see its log; send the request again")
