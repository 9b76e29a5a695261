"""Role switch of a worker: prefill, decode, null. Weights, KV pool and cached prefixes stay.

1. The resources of the new role are prepared beside the old one (`scheduler/role_switch.py`), and the bootstrap server
   for prefill. A failure here has no effect on requests.
2. The worker deregisters at its router and accepts no new requests. A router sends those that still arrive to others.
3. Running requests finish, or are ended so that a router continues them elsewhere.
4. The schedulers wait until they hold no requests, then switch, all or none.
5. The worker registers in its new role.

If a step before the end of 4 fails, the worker continues in its old role and registers again. If the schedulers
disagree, it cannot: `broken` is set, and the worker ends so that its supervisor can restart it.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from splitserve.api.http_server import cannot_listen, reachable_host
from splitserve.core.config import DisaggregationConfig
from splitserve.core.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    MemoryBlockedError,
    RoleSwitchRunningError,
    SplitserveError,
    WorkerDrainingError,
    WorkerUnavailableError,
)
from splitserve.core.request import DisaggregationMode
from splitserve.process.cluster_token import settle_host
from splitserve.process.threads import end_tasks
from splitserve.server.front_end import FrontEnd, RoleChange, RoleReport
from splitserve.server.scheduler_group import HalfSwitchedError, SchedulerGroup
from splitserve.transfer.bootstrap import KVBootstrapServer
from splitserve.worker.exclusions import settings_in_role
from splitserve.worker.registration import RouterRegistration

logger = logging.getLogger(__name__)

PREFILL = DisaggregationMode.PREFILL


class OwnBootstrap:
    """Bootstrap server of this worker. Close it when the worker ends.

    It stays when the worker switches to another role, to notify decode workers that know it as a prefill worker. When
    the worker is a prefill worker again, the server has the same address.
    """

    def __init__(self, config: DisaggregationConfig) -> None:
        self._config = config
        self._server: KVBootstrapServer | None = None
        self._is_retired = False

    @property
    def port(self) -> int | None:
        """Return its port. None: the worker is no prefill worker."""
        return None if self._server is None or self._is_retired else self._server.port

    async def open(self, port: int | None) -> str:
        """Start the server, or resume it, and return its URL. `port` None: the one it had, or any free one.

        Raises ConfigError.
        """
        server = self._server
        host = settle_host(msgspec.structs.replace(self._config, mode=PREFILL)).host
        if server is None or port not in (None, server.port):
            server = KVBootstrapServer(host, port or 0, self._config.cluster_token.secret)
            try:
                await asyncio.to_thread(server.run)
            except OSError as error:
                raise cannot_listen(host, port, error, "--disaggregation-bootstrap-port") from None
            self.close()
            self._server = server
        self._is_retired = False
        return f"http://{reachable_host(host)}:{server.port}"

    def retire(self) -> None:
        """Answer lookups with 410, because the worker is no longer a prefill worker."""
        self._is_retired = True
        if self._server is not None:
            self._server.retire()

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()


class WorkerRoleSwitch:
    """Role switch of one worker. One switch at a time."""

    def __init__(
        self, front: FrontEnd, schedulers: SchedulerGroup, bootstrap: OwnBootstrap, registration: RouterRegistration
    ) -> None:
        self._front = front
        self._schedulers = schedulers
        self._bootstrap = bootstrap
        self._registration = registration
        self._task: asyncio.Task[RoleReport] | None = None
        self._is_closed = False
        # Done if the worker can serve in no role. Its result is the reason.
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def switch(self, order: RoleChange) -> RoleReport:
        """Switch the role. Continues to its end even if the caller is cancelled.

        Raises as described above: InvalidRequestError, RoleSwitchRunningError, MemoryBlockedError,
        DeadlineExceededError, WorkerUnavailableError.
        """
        front = self._front
        if front.memory is not None and front.memory.released:
            raise MemoryBlockedError(
                "the role cannot change while memory is released: POST /resume_memory_occupation to this worker first"
            )
        if front.switching_to is not None or self._is_closed or front.requests.is_draining:
            raise RoleSwitchRunningError(front.unready_reason() or "this worker is changing its role already")
        if (reason := front.unready_reason()) is not None:
            raise WorkerUnavailableError(reason)
        if order.mode is front.mode:
            return RoleReport(order.mode, order.mode, 0.0)
        try:
            settings = settings_in_role(front.config, order.mode)
        except ConfigError as error:
            raise InvalidRequestError(error.message, param="role") from error
        front.switching_to = order.mode
        self._task = asyncio.create_task(self._run(order, settings), name="role-switch")
        # The caller gets its error, or has left.
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._task)

    async def close(self) -> None:
        """Cancel a switch in progress without registering again, because the worker ends. Idempotent."""
        self._is_closed = True
        if self._task is not None:
            await end_tasks((self._task,))

    async def _run(self, order: RoleChange, settings: DisaggregationConfig) -> RoleReport:
        front, began = self._front, time.monotonic()
        old = front.mode, self._bootstrap.port
        deadline = began + order.timeout
        logger.info("the role changes from %s to %s", front.mode, order.mode)
        has_left = False
        try:
            await self._prepare(order, deadline)
            has_left = True
            await self._registration.leave()
            await self._drain(order, deadline)
            await self._schedulers.drain_role(_left(deadline))
            await self._schedulers.commit_role(order.mode)
        except HalfSwitchedError as error:
            self.broken.set_result(error.message)
            raise
        except BaseException as error:
            logger.warning("the role stays %s: %s", front.mode, error or type(error).__name__)
            await self._go_back(order)
            if has_left:
                self._serve(*old)
            raise
        finally:
            front.switching_to = None
        return self._go_on(settings, old[0], time.monotonic() - began)

    async def _prepare(self, order: RoleChange, deadline: float) -> None:
        url = None
        if order.mode is PREFILL:
            try:
                url = await self._bootstrap.open(order.bootstrap_port)
            except ConfigError as error:
                raise InvalidRequestError(error.message, param="bootstrap_port") from error
        await self._schedulers.prepare_role(order.mode, url, _left(deadline))

    async def _drain(self, order: RoleChange, deadline: float) -> None:
        front = self._front
        front.requests.drain()
        if order.migrate:
            # A router treats this like a lost worker, and continues elsewhere.
            self._schedulers.break_off(
                WorkerDrainingError("this worker is changing its role: send the request to another")
            )
        if not await front.requests.wait_idle(_left(deadline)):
            raise DeadlineExceededError(
                f"{front.requests.num_open_samples} samples were still running after {order.timeout:g} s (stage: "
                "draining): give it more time, or drain with migrate"
            )

    def _go_on(self, settings: DisaggregationConfig, old: DisaggregationMode, seconds: float) -> RoleReport:
        if old is PREFILL:
            self._bootstrap.retire()
        self._front.take_role(settings, self._bootstrap.port or settings.bootstrap_port)
        logger.info("the role is %s now, after %.1f s", settings.mode, seconds)
        self._serve(settings.mode, self._bootstrap.port)
        return RoleReport(old, settings.mode, seconds)

    async def _go_back(self, order: RoleChange) -> None:
        try:
            await self._schedulers.cancel_role()
        except SplitserveError as error:
            # A scheduler may be dead; then its end ends the worker. /health_generate detects a silent one.
            logger.error("the switch could not be given up in order: %s", error.message)
        if order.mode is PREFILL:
            self._bootstrap.retire()

    def _serve(self, mode: DisaggregationMode, bootstrap_port: int | None) -> None:
        if not self._is_closed:
            self._front.requests.is_draining = False
            self._registration.enter(mode, bootstrap_port)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
