"""Supervisor: keeps a cluster in its desired state. It observes, lets the reconciler decide and the placer act,
repeatedly.

It also connects workers and router. A dead worker is removed from the router at once. If the router restarts at
another address, the supervisor registers the workers that were started with the old one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from splitserve.api.http_server import port_of, reachable_host
from splitserve.core.clock import Clock, SystemClock
from splitserve.core.errors import ClusterError, ConfigError, SplitserveError, WorkerUnavailableError, clause
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.answer_watch import AnswerWatch
from splitserve.deploy.commands import Credentials, router_spec, threads_of, worker_spec
from splitserve.deploy.config import MODES, ROUTER, ClusterConfig, ScaleDown, check_replicas
from splitserve.deploy.control import ClusterStatus, ProcessStatus
from splitserve.deploy.placer import LocalPlacer, Observation, Phase, Placer
from splitserve.deploy.reconciler import (
    Action,
    Drain,
    Failed,
    Killed,
    Reconciler,
    Remove,
    Slot,
    SlotState,
    StartAction,
    last_line,
)
from splitserve.deploy.router_client import RouterClient
from splitserve.process.lifecycle import ReadyInfo

logger = logging.getLogger(__name__)

# Seconds between two observations, and between two registrations at a router that workers were not started with.
_INTERVAL = 0.25
# During shutdown: each step waits for the end of the processes of the previous step.
_ENDING_INTERVAL = 0.05
_ANNOUNCE_INTERVAL = 10.0
# Maximum number of processes that are ended in parallel.
_NUM_REMOVERS = 32


class Supervisor:
    """Supervisor of one cluster.

    `router_socket`: listener of a router on this machine, which survives a restart of the router. None: the router
    opens one. `unregistered`: pools with workers that do not register with the router. `on_event`: gets event texts
    for operators.
    """

    def __init__(
        self,
        config: ClusterConfig,
        credentials: Credentials,
        placer: Placer,
        *,
        router_socket: socket.socket | None = None,
        unregistered: Collection[str] = (),
        on_event: Callable[[str], None] = logger.info,
        clock: Clock | None = None,
        router: RouterClient | None = None,
    ) -> None:
        self._config = config
        self._credentials = credentials
        self._placer = placer
        self._router_host = config.router.host or placer.address
        self._router_socket = router_socket
        self._unregistered = unregistered
        self._on_event = on_event
        self._clock = clock or SystemClock()
        replicas = {name: pool.replicas for name, pool in config.pools.by_name().items()}
        self._reconciler = Reconciler(
            replicas, config.supervision, self._clock.now(), router_first=router_socket is None
        )
        self._router = router or RouterClient(
            credentials.operator_key, tls=credentials.tls, worker_tls=credentials.worker_tls
        )
        self._answer_watch = AnswerWatch(self._router.answers)
        self._seen: Mapping[str, Observation] = {}
        # URL of the router that each worker was started with.
        self._started_with: dict[str, str] = {}
        # Last known URL of each worker.
        self._urls: dict[str, str] = {}
        self._router_port = config.router.port if router_socket is None else port_of(router_socket)
        self._announced_at = float("-inf")
        # Whether all processes have served at the same time.
        self.has_served = False
        # Set when it is shutting down.
        self.ending = asyncio.Event()
        # Error with which the cluster ends by itself. None: none.
        self.failure: SplitserveError | None = None
        # Error of the last turn, which was logged. Empty: none.
        self._problem = ""
        self._woken = asyncio.Event()
        self._removers = ThreadPoolExecutor(_NUM_REMOVERS, thread_name_prefix="remove")
        self._tasks: set[asyncio.Future[Any]] = set()

    @property
    def router_url(self) -> str | None:
        if self._router_socket is not None:
            scheme = "http" if self._credentials.certificate is None else "https"
            return f"{scheme}://{reachable_host(self._router_host)}:{self._router_port}"
        found = self._seen.get(ROUTER)
        return found.ready.url if found is not None and found.ready is not None else None

    @property
    def replicas(self) -> dict[str, int]:
        """Return the desired replicas by pool."""
        return self._reconciler.replicas

    async def run(self) -> None:
        """Return when the cluster has gone down and all its processes have ended."""
        try:
            while not self._reconciler.is_over:
                await self._safe_turn()
                self._woken.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_ENDING_INTERVAL if self.ending.is_set() else _INTERVAL):
                        await self._woken.wait()
        finally:
            self._answer_watch.close()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._removers.shutdown()

    async def _safe_turn(self) -> None:
        """Run a turn. An error in it is logged, because healthy workers must not end for it.

        Before the cluster has served, and while it ends, the error is raised.
        """
        try:
            await self.turn()
            self._problem = ""
        except Exception as error:
            if not self.has_served or self.ending.is_set():
                raise
            if repr(error) != self._problem:
                logger.exception("a step of the supervisor failed; the workers go on")
            self._problem = repr(error)

    async def turn(self) -> None:
        """Observe once, and act on the result."""
        before = {slot.name: slot.state for slot in self._reconciler.slots}
        seen = await asyncio.to_thread(self._placer.observe)
        self._seen = self._answer_watch.review(seen) if self._config.supervision.restart else seen
        for action in self._reconciler.tick(self._clock.now(), self._seen):
            await self._do(action)
        self._report_changes(before)
        self.has_served = self.has_served or self._reconciler.is_settled
        await self._announce()

    async def status(self) -> ClusterStatus:
        listed = await self._listed_workers()
        registered = {
            ready.url for slot, ready in self._ready_slots() if slot.pool not in (ROUTER, *self._unregistered)
        }
        is_proven = listed is not None and registered <= {url for url, entry in listed.items() if entry["ready"]}
        return ClusterStatus(
            name=self._config.name,
            pid=os.getpid(),
            router_url=self.router_url,
            is_ready=self._reconciler.is_settled and is_proven,
            is_ending=self.ending.is_set(),
            replicas=dict(self._reconciler.replicas),
            processes=[self._describe(slot, listed) for slot in self._reconciler.slots],
            log_folder=str(self._placer.log_folder) if isinstance(self._placer, LocalPlacer) else None,
        )

    async def num_requests(self) -> int | None:
        """Return how many requests run or wait on workers that generate. None: a worker does not answer."""
        urls = [ready.url for slot, ready in self._ready_slots() if slot.pool != ROUTER]
        key = self._credentials.worker_key
        try:
            return sum(await asyncio.gather(*(self._router.num_requests(url, key) for url in urls)))
        except WorkerUnavailableError:
            return None

    async def scale(self, replicas: dict[str, Any]) -> None:
        # A request to the router changes a worker's mode, but not its pool.
        modes = self._modes(await self._listed_workers() or {})
        if self.ending.is_set():
            raise ConfigError(f"the cluster {self._config.name!r} is going down")
        for pool, count in check_replicas(self._config, replicas, self._reconciler.replicas).items():
            before = self._reconciler.replicas[pool]
            self._reconciler.scale(pool, count, self._clock.now(), modes)
            self._on_event(f"scale {pool} from {before} to {count}")
        self._woken.set()

    def restart(self, name: str) -> bool:
        """Start a process again that was given up. Return False if it has not been removed yet. Raises ClusterError."""
        if self.ending.is_set():
            raise ClusterError(f"the cluster {self._config.name!r} is going down")
        self._woken.set()
        return self._reconciler.restart(name, self._clock.now())

    def down(self, *, now: bool) -> None:
        """End the cluster: the router first, after its requests have ended. `now`: everything at once."""
        self.ending.set()
        if self._router_socket is not None:
            # The router rejects new connections; they must not wait for this process instead.
            self._router_socket.close()
        if now:
            self._reconciler.stop_now()
        else:
            self._reconciler.shut_down()
        self._woken.set()

    async def _do(self, action: Action) -> None:
        match action:
            case StartAction(name, pool):
                await self._start(name, pool)
            case Drain(name):
                self._spawn(self._drain(name))
            case Remove(name):
                loop = asyncio.get_running_loop()
                self._spawn(loop.run_in_executor(self._removers, self._placer.remove, name))
            case Killed(name, why):
                self._on_event(f"{name}: {why}; it was killed during its drain, and any running requests were cut off")
            case Failed():
                self._report_failure(action)
                url, router_url = self._urls.pop(action.name, None), self.router_url
                if url is not None and router_url is not None and self._config.supervision.restart:
                    self._spawn(self._router.forget(router_url, url))

    def _report_failure(self, failed: Failed) -> None:
        why = clause(failed.why)
        tail = f"; the end of its log:\n{failed.log_tail}" if failed.log_tail else ""
        if failed.pause is not None:
            again = f"starting it again in {failed.pause:.0f} s" if failed.pause else "starting it again"
            self._on_event(f"{failed.name}: {why}, {again}{tail}")
            return
        failure: SplitserveError | None = None
        if failed.num_failed_starts:
            count = failed.num_failed_starts
            failures = "its start has failed" if count == 1 else f"{count} starts in a row have failed"
            failure = ClusterError(f"{failed.name}: {why}; {failures}{tail}")
        elif not self.has_served:
            failure = ConfigError(f"{failed.name}: {last_line(failed.log_tail) or failed.why}")
        if failure is None:
            reason = "its options are wrong" if self._config.supervision.restart else "supervision.restart is false"
            self._on_event(f"{failed.name}: {why}; it is not started again, as {reason}{tail}")
        elif self.failure is None:
            self.failure = failure
            self._on_event(f"{failed.name}: {why}; it is not started again, so the cluster ends")
            self.down(now=not self.has_served)

    async def _start(self, name: str, pool: str) -> None:
        config, credentials = self._config, self._credentials
        if pool == ROUTER:
            listen_fd = None if self._router_socket is None else self._router_socket.fileno()
            spec = router_spec(config, credentials, self._router_host, self._router_port, listen_fd)
        else:
            # The reconciler starts no worker before this is known.
            url = self._started_with[name] = self.router_url or ""
            threads = threads_of(config, config.pools.by_name()[pool], self._placer.num_cores)
            registered_at = None if pool in self._unregistered else url
            spec = worker_spec(config, credentials, name, pool, threads=threads, router_url=registered_at)
        await asyncio.to_thread(self._placer.start, spec)
        if pool == ROUTER and self._router_socket is not None and not config.supervision.restart:
            # Without a router connections are refused.
            self._router_socket.close()

    async def _drain(self, name: str) -> None:
        """End a process in order. If the config says so, move its requests to other workers first."""
        found, router_url = self._seen.get(name), self.router_url
        moves = self._config.supervision.scale_down is ScaleDown.MIGRATE and not self.ending.is_set()
        if moves and found is not None and found.ready is not None and router_url is not None:
            try:
                await self._router.drain(router_url, found.ready.url, migrate=True)
            except WorkerUnavailableError as error:
                self._on_event(f"{name}: its requests end there: {error.message}")
        await asyncio.to_thread(self._placer.terminate, name)

    async def _announce(self) -> None:
        """Register workers that were started with the address of another router."""
        router_url, now = self.router_url, self._clock.now()
        strangers = [
            ready.url
            for slot, ready in self._ready_slots()
            if slot.state is SlotState.READY
            and slot.pool not in (ROUTER, *self._unregistered)
            and self._started_with.get(slot.name) != router_url
        ]
        if router_url is None or not strangers or now - self._announced_at < _ANNOUNCE_INTERVAL:
            return
        self._announced_at = now
        for url in strangers:
            self._spawn(self._router.announce(router_url, url, self._credentials.worker_key))

    @property
    def _has_started(self) -> bool:
        return self.has_served or self._reconciler.is_settled

    async def _listed_workers(self) -> dict[str, dict[str, Any]] | None:
        """Return the router's entries of its workers, by URL. None: it does not serve, or the cluster still starts."""
        ready_pools = {slot.pool for slot in self._reconciler.slots if slot.state is SlotState.READY}
        # A router that does not serve yet may have an open socket, where a request would wait.
        if self.router_url is None or not self._has_started or ROUTER not in ready_pools:
            return None
        try:
            return {worker["url"]: worker for worker in await self._router.workers(self.router_url)}
        except WorkerUnavailableError:
            return None

    def _modes(self, listed: Mapping[str, Mapping[str, Any]]) -> dict[str, DisaggregationMode]:
        """Return the modes of the workers that the router lists, by name. A mode that is changing counts as changed."""
        found = [(slot.name, listed.get(ready.url)) for slot, ready in self._ready_slots() if slot.pool != ROUTER]
        return {
            name: DisaggregationMode(entry["switching_to"] or entry["mode"])
            for name, entry in found
            if entry is not None
        }

    def _ready_slots(self) -> list[tuple[Slot, ReadyInfo]]:
        """Return the slots with a process that has written its ready file, each with the content of the file."""
        found = [(slot, self._seen.get(slot.name)) for slot in self._reconciler.slots]
        return [(slot, seen.ready) for slot, seen in found if seen is not None and seen.ready is not None]

    def _report_changes(self, before: Mapping[str, SlotState]) -> None:
        for slot in self._reconciler.slots:
            if slot.state is before.get(slot.name):
                continue
            if slot.state is SlotState.READY:
                found = self._seen[slot.name]
                ready = found.ready
                assert ready is not None
                self._report(f"{slot.name}: ready at {ready.url} on {found.node}")
                if slot.pool == ROUTER:
                    # Keep the port, so that clients find the router at the same address after a restart.
                    self._router_port = ready.port
                else:
                    self._urls[slot.name] = ready.url
            elif slot.state is SlotState.DRAINING:
                self._report(f"{slot.name}: draining")
        for name in before.keys() - {slot.name for slot in self._reconciler.slots}:
            self._started_with.pop(name, None)
            self._urls.pop(name, None)
            self._report(f"{name}: gone")

    def _report(self, event: str) -> None:
        """Report a change of a running cluster. Its start and its end have progress lines of their own."""
        (self._on_event if self.has_served and not self.ending.is_set() else logger.debug)(event)

    def _describe(self, slot: Slot, listed: Mapping[str, Mapping[str, Any]] | None) -> ProcessStatus:
        """Return the status of a process. `listed`: the router's entries of workers, by URL. None: no answer."""
        found = self._seen.get(slot.name) or Observation(phase=Phase.LOST)
        state, detail = slot.state.value, found.detail if found.phase is Phase.PENDING else slot.detail
        entry = listed.get(found.ready.url) if listed is not None and found.ready is not None else None
        if slot.state is SlotState.READY and slot.pool == ROUTER and listed is None and self._has_started:
            state, detail = "unhealthy", "it does not answer"
        if slot.state is SlotState.READY and entry is not None and not entry["ready"]:
            state, detail = _state_at_router(entry)
        if slot.state is SlotState.READY and entry is not None and entry["mode"] != MODES[slot.pool]:
            detail = "; ".join(filter(None, (f"serves as {entry['mode']}", detail)))
        of_ready = ("url", "model", "dtype", "quantization", "device", "kv_pool_tokens", "kv_pool_bytes")
        return ProcessStatus(
            name=slot.name,
            pool=slot.pool,
            state=state,
            node=found.node,
            pid=found.pid,
            num_restarts=max(0, slot.num_starts - 1),
            detail=detail,
            **{name: getattr(found.ready, name, None) for name in of_ready},
        )

    def _spawn(self, step: Awaitable[None]) -> None:
        task = asyncio.ensure_future(step)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("supervision step failed: %r", error)
        self._woken.set()


def _state_at_router(entry: Mapping[str, Any]) -> tuple[str, str]:
    """Return the state of a worker that the router does not find ready, and the reason. `entry`: of GET /workers."""
    if entry["switching_to"] is not None:
        return "switching", f"its new role: {entry['switching_to']}"
    if entry.get("has_left"):
        return "unregistered", entry["reason"]
    state = "draining" if entry["draining"] else "ready" if entry["healthy"] else "unhealthy"
    return state, entry["reason"] or ""
