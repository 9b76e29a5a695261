"""`splitserve up` and `splitserve cluster up`: a supervisor in a terminal.

1. It starts: one line of progress with the state of each process.
2. It is ready: a table on standard output. From then on one line for each event, such as a restart.
3. The first signal, or `cluster down`, drains: one line of progress with the number of running requests. The second
   signal stops at once. A signal before it is ready stops at once, too.
4. Every process has ended. If the cluster ended by itself, the reason is raised, and the logs of failed starts stay.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import socket
import sys
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console

from splitserve.api.http_server import bind
from splitserve.core.errors import ClusterError, OptionError
from splitserve.deploy.commands import Credentials, check_startable
from splitserve.deploy.config import ClusterConfig
from splitserve.deploy.control import ClusterStatus, control_server, describe, start_line
from splitserve.deploy.placer import LocalPlacer
from splitserve.deploy.supervisor import Supervisor
from splitserve.process.console import LossyOutput, progress, standard_output
from splitserve.process.lifecycle import Lifecycle, ReadyInfo, drain_line, request_hint, write_ready_file
from splitserve.process.settings import setup_logger
from splitserve.process.threads import end_tasks

logger = logging.getLogger(__name__)

# Seconds between two lines of progress.
_INTERVAL = 0.5
# Addresses reserved for documentation: routed like any other, and nothing is sent to them.
_ELSEWHERE = {"0.0.0.0": (socket.AF_INET, "192.0.2.1"), "::": (socket.AF_INET6, "2001:db8::1")}


def run_cluster_up(
    config: ClusterConfig,
    ray_address: str | None = None,
    *,
    ready_file: Path | None = None,
    exit_with_parent: bool = False,
) -> int:
    """Run a cluster until it ends. Return the exit code of the signal that ended it, 0 after `cluster down`.

    Raises ConfigError before anything has started, and if the options of a process are wrong; ClusterError if the
    starts of a process fail again and again.
    """
    check_startable(config, is_local=ray_address is None)
    credentials = Credentials.read(config)
    setup_logger(config.log_level, config.log_format)
    host = config.router.host or ("127.0.0.1" if ray_address is None else "its node's address")
    is_private = host in ("localhost", "::1") or host.startswith("127.")
    if not (is_private or credentials.clients or credentials.operators):
        logger.warning(
            "the router listens on %s without keys: every client that reaches it may use and operate it; restrict it "
            "with --api-key-file and --operator-key-file (in a cluster file: keys)",
            host,
        )
    return asyncio.run(_Up(config, credentials).run(ray_address, ready_file, exit_with_parent))


class _Up:
    def __init__(self, config: ClusterConfig, credentials: Credentials) -> None:
        self._config = config
        self._credentials = credentials
        self._lifecycle = Lifecycle()
        # JSON lines are for programs: events are log lines, and progress is not shown.
        self._is_json = config.log_format == "json"
        # A cluster goes on if its messages cannot be written.
        output = cast(TextIO, LossyOutput(sys.stderr))
        self._console = Console(file=output, highlight=False, quiet=self._is_json, emoji=False)

    async def run(self, ray_address: str | None, ready_file: Path | None, exit_with_parent: bool) -> int:
        async with AsyncExitStack() as closing:
            if ray_address is not None:
                # Connect before `watch`, because Ray installs signal handlers of its own.
                supervisor = self._on_ray(ray_address, closing)
            closing.enter_context(self._lifecycle.watch(exit_with_parent=exit_with_parent))
            if ray_address is None:
                supervisor = self._on_this_machine(closing)
            await closing.enter_async_context(control_server(self._config.name, supervisor))
            output = (self._end_at_signal(supervisor), self._report(supervisor, ready_file))
            tasks = [asyncio.create_task(task) for task in output]
            closing.push_async_callback(_end_output, tasks)
            await supervisor.run()
        self._print(self._lifecycle.end_line("every process of the cluster", has_served=supervisor.has_served))
        if supervisor.failure is not None:
            raise supervisor.failure
        return self._lifecycle.exit_code(has_served=supervisor.has_served)

    def _on_this_machine(self, closing: AsyncExitStack) -> Supervisor:
        num_workers = sum(pool.replicas for pool in self._config.pools.by_name().values())
        # First, because it fails if the port is taken: the placer has a folder that must be removed.
        sock = closing.enter_context(bind(self._config.router.host or LocalPlacer.address, self._config.router.port))
        # One worker alone starts faster without a template.
        placer = LocalPlacer(has_template=num_workers > 1)
        supervisor = Supervisor(self._config, self._credentials, placer, router_socket=sock, on_event=self._print)

        async def close() -> None:
            if isinstance(supervisor.failure, ClusterError):
                placer.keep_logs()
                self._print(f"the logs stay in {placer.log_folder}")
            await asyncio.to_thread(placer.close)

        closing.push_async_callback(close)
        return supervisor

    def _on_ray(self, address: str, closing: AsyncExitStack) -> Supervisor:
        if importlib.util.find_spec("ray") is None:
            raise OptionError("--ray", "needs the Python package 'ray' on every node: pip install 'splitserve[ray]'")
        from splitserve.deploy.ray_placer import RayPlacer

        placer = RayPlacer(address, f"splitserve-{self._config.name}")
        closing.push_async_callback(asyncio.to_thread, placer.close)
        return Supervisor(self._config, self._credentials, placer, on_event=self._print)

    async def _end_at_signal(self, supervisor: Supervisor) -> None:
        await self._lifecycle.draining.wait()
        supervisor.down(now=not supervisor.has_served)
        await self._lifecycle.stopping.wait()
        supervisor.down(now=True)

    async def _report(self, supervisor: Supervisor, ready_file: Path | None) -> None:
        """Report its start, once that it is ready, and its end."""
        await self._report_start(supervisor)
        if not supervisor.ending.is_set():
            status = await supervisor.status()
            if ready_file is not None and status.router_url is not None:
                port = int(status.router_url.rpartition(":")[2])
                try:
                    write_ready_file(ready_file, ReadyInfo(pid=os.getpid(), port=port, url=status.router_url))
                except ClusterError as error:
                    # Otherwise the process that started this one would wait without end.
                    supervisor.failure = error
                    supervisor.down(now=True)
                    return
            self._show(status)
        await supervisor.ending.wait()
        if supervisor.has_served:
            await self._report_drain(supervisor)

    async def _report_start(self, supervisor: Supervisor) -> None:
        began = time.monotonic()
        with progress(self._console, start_line(self._console, await supervisor.status(), began)) as show:
            while not supervisor.ending.is_set() and not (status := await supervisor.status()).is_ready:
                show(start_line(self._console, status, began))
                with suppress(TimeoutError):
                    async with asyncio.timeout(_INTERVAL):
                        await supervisor.ending.wait()

    async def _report_drain(self, supervisor: Supervisor) -> None:
        """Show the progress of the drain until the workers have ended too."""
        timeout = self._config.supervision.drain_timeout
        with progress(self._console, drain_line(await supervisor.num_requests(), timeout)) as show:
            while True:
                await asyncio.sleep(_INTERVAL)
                if (num_running := await supervisor.num_requests()) is not None:
                    show(drain_line(num_running, timeout))

    def _show(self, status: ClusterStatus) -> None:
        """Print on standard output the running processes and a request to try."""
        output = cast(TextIO, LossyOutput(sys.stdout))
        console = standard_output(output)
        model = next((process.model for process in status.processes if process.model), self._config.model)
        url = outward_url(status.router_url or "", self._config.router.host)
        lines = (
            describe(status),
            *request_hint(url, model, has_keys=self._credentials.clients is not None),
            f"see what happens: {url} in a browser, splitserve top {url}, splitserve trace --url {url}",
            "Ctrl-C drains and stops; from another terminal: "
            f"splitserve cluster status --name {status.name}, scale, down",
        )
        for line in lines:
            console.print(line, highlight=False, soft_wrap=True, markup=False)
        output.flush()

    def _print(self, event: str) -> None:
        if self._is_json:
            logger.info("%s", event)
        self._console.print(event, markup=False, soft_wrap=True)


def outward_url(url: str, host: str | None) -> str:
    """Return the router's URL for other machines. `host`: where it listens. Only 0.0.0.0 and `::` change it."""
    if host in _ELSEWHERE:
        family, target = _ELSEWHERE[host]
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            address = str(probe.getsockname()[0])
            return url.replace("[::1]", f"[{address}]").replace("127.0.0.1", address)
    return url


async def _end_output(tasks: list[asyncio.Task[None]]) -> None:
    for result in await end_tasks(tasks):
        if isinstance(result, Exception):
            logger.error("terminal output failed: %r", result)
