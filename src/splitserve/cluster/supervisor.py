"""Keeps a cluster as its file says: looks, lets the reconciler decide, has the placer do it, and again.

It also stands between workers and the router: who died is taken out of it at once, and where the router comes back
somewhere else, who was started with its old address is announced to it from here.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from splitserve.clock import Clock, SystemClock
from splitserve.cluster.commands import Credentials, router_spec, threads_of, worker_spec
from splitserve.cluster.config import MODES, ROUTER, ClusterConfig, ScaleDown, check_replicas
from splitserve.cluster.control import ClusterStatus, ProcessStatus
from splitserve.cluster.placer import Observation, Placer
from splitserve.cluster.reconciler import Action, Drain, Failed, Reconciler, Remove, Slot, SlotState, Start, last_line
from splitserve.cluster.router_client import RouterClient
from splitserve.errors import ConfigError, WorkerUnavailableError
from splitserve.launch.ready_file import ReadyInfo

logger = logging.getLogger(__name__)

# Seconds between two looks, and between two announcements to a router that workers were not started with.
_INTERVAL = 0.25
_ANNOUNCE_INTERVAL = 10.0
# Processes that are ended at the same time.
_NUM_REMOVERS = 32


class Supervisor:
    """`num_cores`: of the machine that all processes share; None: they have nodes of their own.

    `router_host`: where the router listens if the file does not say. `on_event`: hears what happens, for people.
    """

    def __init__(
        self,
        config: ClusterConfig,
        credentials: Credentials,
        placer: Placer,
        *,
        router_host: str,
        num_cores: int | None,
        on_event: Callable[[str], None] = logger.info,
        clock: Clock | None = None,
        router: RouterClient | None = None,
    ) -> None:
        self._config = config
        self._credentials = credentials
        self._placer = placer
        self._router_host = router_host
        self._num_cores = num_cores
        self._on_event = on_event
        self._clock = clock or SystemClock()
        replicas = {name: pool.replicas for name, pool in config.pools.by_name().items()}
        self._reconciler = Reconciler(replicas, config.supervision, self._clock.now())
        self._router = router or RouterClient(credentials.operator_key)
        self._seen: Mapping[str, Observation] = {}
        # Which router each worker was started with.
        self._told: dict[str, str] = {}
        # Where each worker was last seen to serve.
        self._urls: dict[str, str] = {}
        self._router_port = config.router.port
        self._announced_at = float("-inf")
        self._is_ending = False
        self._was_settled = False
        # Why nothing can come of this cluster: a process that cannot be started before all have once served.
        self.failure: ConfigError | None = None
        self._woken = asyncio.Event()
        self._removers = ThreadPoolExecutor(_NUM_REMOVERS, thread_name_prefix="remove")
        self._tasks: set[asyncio.Future[Any]] = set()

    @property
    def router_url(self) -> str | None:
        found = self._seen.get(ROUTER)
        return found.ready.url if found is not None and found.ready is not None else None

    async def run(self) -> None:
        """Until it was told to go down and everything is gone."""
        async with self._router:
            try:
                while not self._reconciler.is_over:
                    await self.turn()
                    self._woken.clear()
                    try:
                        async with asyncio.timeout(_INTERVAL):
                            await self._woken.wait()
                    except TimeoutError:
                        pass
            finally:
                await asyncio.gather(*self._tasks, return_exceptions=True)
                await asyncio.to_thread(self._placer.close)
                self._removers.shutdown()

    async def turn(self) -> None:
        """Look once, and do what follows from that."""
        before = self._states()
        self._seen = await asyncio.to_thread(self._placer.observe)
        for action in self._reconciler.tick(self._clock.now(), self._seen):
            await self._do(action)
        self._tell_changes(before)
        self._was_settled = self._was_settled or self._reconciler.is_settled
        await self._announce()

    async def status(self) -> ClusterStatus:
        is_settled = self._reconciler.is_settled and await self._is_proven()
        return ClusterStatus(
            name=self._config.name,
            pid=os.getpid(),
            router_url=self.router_url,
            is_ready=is_settled,
            is_ending=self._is_ending,
            replicas=self._reconciler.replicas,
            processes=[self._describe(slot) for slot in self._reconciler.slots],
        )

    def scale(self, replicas: dict[str, Any]) -> None:
        """Raises ConfigError."""
        if self._is_ending:
            raise ConfigError(f"the cluster {self._config.name!r} is going down")
        for pool, count in check_replicas(self._config, replicas, self._reconciler.replicas).items():
            self._on_event(f"scale {pool} from {self._reconciler.replicas[pool]} to {count}")
            self._reconciler.scale(pool, count, self._clock.now())
        self._woken.set()

    def down(self, *, now: bool) -> None:
        """Let everything end, the router first, when its requests have ended; `now`: at once."""
        self._is_ending = True
        if now:
            self._reconciler.stop_now()
        else:
            self._reconciler.shut_down()
        self._woken.set()

    async def _do(self, action: Action) -> None:
        match action:
            case Start(name, pool):
                await self._start(name, pool)
            case Drain(name):
                self._spawn(self._drain(name))
            case Remove(name):
                loop = asyncio.get_running_loop()
                self._keep(loop.run_in_executor(self._removers, self._placer.remove, name))
            case Failed():
                self._tell_failure(action)
                url, router_url = self._urls.pop(action.name, None), self.router_url
                if url is not None and router_url is not None:
                    self._spawn(self._router.forget(router_url, url))

    def _tell_failure(self, failed: Failed) -> None:
        again = "again at once" if not failed.pause else f"again in {failed.pause:.0f} s"
        if failed.pause is None:
            again = "and would do so again: it is not started any more"
            if not self._was_settled and self.failure is None:
                self.failure = ConfigError(f"{failed.name}: {last_line(failed.log_tail) or failed.why}")
                self.down(now=True)
        tail = f"; the end of its log:\n{failed.log_tail}" if failed.log_tail else ""
        self._on_event(f"{failed.name}: {failed.why}, {again}{tail}")

    async def _start(self, name: str, pool: str) -> None:
        config, credentials = self._config, self._credentials
        if pool == ROUTER:
            spec = router_spec(config, credentials, self._router_host, self._router_port)
        else:
            # The reconciler starts no worker while there is no router.
            url = self._told[name] = self.router_url or ""
            threads = threads_of(config, config.pools.by_name()[pool], self._num_cores)
            spec = worker_spec(config, credentials, name, pool, threads=threads, router_url=url)
        await asyncio.to_thread(self._placer.start, spec)

    async def _drain(self, name: str) -> None:
        """Its end begins: it leaves the router by itself, and before that what runs there moves, if that is wanted."""
        found, router_url = self._seen.get(name), self.router_url
        moves = self._config.supervision.scale_down is ScaleDown.MIGRATE and not self._is_ending
        if moves and found is not None and found.ready is not None and router_url is not None:
            try:
                await self._router.drain(router_url, found.ready.url, migrate=True)
            except WorkerUnavailableError as error:
                self._on_event(f"{name}: its requests end there: {error.message}")
        await asyncio.to_thread(self._placer.terminate, name)

    async def _announce(self) -> None:
        """Workers that another router was told of, to this one."""
        router_url, now = self.router_url, self._clock.now()
        strangers = [
            (MODES[slot.pool], ready)
            for slot in self._reconciler.slots
            if slot.state is SlotState.READY
            and slot.pool != ROUTER
            and self._told.get(slot.name) != router_url
            and (ready := self._ready_info(slot.name)) is not None
        ]
        if router_url is None or not strangers or now - self._announced_at < _ANNOUNCE_INTERVAL:
            return
        self._announced_at = now
        for mode, ready in strangers:
            self._spawn(self._router.announce(router_url, mode, ready))

    async def _is_proven(self) -> bool:
        """Whether the router gives requests to every worker."""
        workers = {slot.name for slot in self._reconciler.slots if slot.pool != ROUTER}
        urls = {ready.url for name in workers if (ready := self._ready_info(name)) is not None}
        if self.router_url is None:
            return False
        try:
            return urls <= await self._router.ready_workers(self.router_url)
        except WorkerUnavailableError:
            return False

    def _ready_info(self, name: str) -> ReadyInfo | None:
        found = self._seen.get(name)
        return None if found is None else found.ready

    def _states(self) -> dict[str, SlotState]:
        return {slot.name: slot.state for slot in self._reconciler.slots}

    def _tell_changes(self, before: Mapping[str, SlotState]) -> None:
        for slot in self._reconciler.slots:
            if slot.state is before.get(slot.name):
                continue
            if slot.state is SlotState.READY:
                ready = self._ready_info(slot.name)
                assert ready is not None
                self._on_event(f"{slot.name}: ready at {ready.url} on {self._seen[slot.name].node}")
                if slot.pool == ROUTER:
                    # Whoever knows its address finds it there again.
                    self._router_port = ready.port
                else:
                    self._urls[slot.name] = ready.url
            elif slot.state is SlotState.DRAINING:
                self._on_event(f"{slot.name}: draining")
        for name in before.keys() - self._states().keys():
            self._told.pop(name, None)
            self._urls.pop(name, None)
            self._on_event(f"{name}: gone")

    def _describe(self, slot: Slot) -> ProcessStatus:
        found = self._seen.get(slot.name)
        ready = self._ready_info(slot.name)
        return ProcessStatus(
            name=slot.name,
            pool=slot.pool,
            state=slot.state.value,
            node="" if found is None else found.node,
            url=None if ready is None else ready.url,
            pid=None if found is None else found.pid,
            num_restarts=max(0, slot.num_starts - 1),
            detail=slot.detail,
        )

    def _spawn(self, doing: Awaitable[None]) -> None:
        self._keep(asyncio.ensure_future(doing))

    def _keep(self, task: asyncio.Future[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("what the cluster's supervisor began has failed: %r", error)
        self._woken.set()
