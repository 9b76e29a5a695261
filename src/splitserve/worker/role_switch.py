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
from typing import Protocol

import msgspec

from splitserve.core.config import DisaggregationConfig
from splitserve.core.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    RoleSwitchRunningError,
    SplitserveError,
    WorkerUnavailableError,
)
from splitserve.core.request import DisaggregationMode
from splitserve.process.cluster_token import settle_host
from splitserve.server.front_end import FrontEnd, RoleChange, RoleReport
from splitserve.server.scheduler_group import HalfSwitchedError
from splitserve.worker.role_rules import check_role

logger = logging.getLogger(__name__)

PREFILL = DisaggregationMode.PREFILL


class SchedulersPort(Protocol):
    """Interface of SchedulerGroup for role switches."""

    async def prepare_role(self, mode: DisaggregationMode, bootstrap_url: str | None, timeout: float) -> None: ...

    async def drain_role(self, timeout: float) -> None: ...

    async def commit_role(self, mode: DisaggregationMode) -> None: ...

    async def cancel_role(self) -> None: ...

    def break_off(self, error: SplitserveError) -> None: ...


class BootstrapPort(Protocol):
    """Bootstrap server of the worker while it is a prefill worker."""

    async def open(self, port: int | None) -> str:
        """Start or resume it. Return its URL. Raises ConfigError."""
        ...

    def retire(self) -> None: ...

    @property
    def port(self) -> int | None:
        """Return its port. None: the worker is no prefill worker."""
        ...


class MembershipPort(Protocol):
    """Registration of the worker at its router."""

    def enter(self, mode: DisaggregationMode, bootstrap_port: int | None) -> None: ...

    async def leave(self) -> None: ...


class WorkerRoleSwitch:
    """Role switch of one worker. One switch at a time."""

    def __init__(
        self, front: FrontEnd, schedulers: SchedulersPort, bootstrap: BootstrapPort, membership: MembershipPort
    ) -> None:
        self._front = front
        self._schedulers = schedulers
        self._bootstrap = bootstrap
        self._membership = membership
        self._task: asyncio.Task[RoleReport] | None = None
        self._is_closed = False
        # Done if the worker can serve in no role. Its result is the reason.
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def switch(self, order: RoleChange) -> RoleReport:
        """Switch the role. Continues to its end even if the caller is cancelled.

        Raises as described above: InvalidRequestError, RoleSwitchRunningError, DeadlineExceededError,
        WorkerUnavailableError.
        """
        front = self._front
        if front.switching_to is not None or self._is_closed or front.requests.is_draining:
            raise RoleSwitchRunningError(front.unready_reason() or "this worker is changing its role already")
        if (reason := front.unready_reason()) is not None:
            raise WorkerUnavailableError(reason)
        if order.mode is front.mode:
            return RoleReport(order.mode, order.mode, 0.0)
        try:
            check_role(front.config, order.mode)
            settings = msgspec.structs.replace(front.config.disaggregation, mode=order.mode)
            settings = settle_host(settings)
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
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, order: RoleChange, settings: DisaggregationConfig) -> RoleReport:
        front, began = self._front, time.monotonic()
        old = front.mode, self._bootstrap.port
        deadline = began + order.timeout
        logger.info("the role changes from %s to %s", front.mode, order.mode)
        has_left = False
        try:
            await self._prepare(order, deadline)
            has_left = True
            await self._membership.leave()
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
        front.requests.is_draining = True
        if order.migrate:
            # A router treats this like a lost worker, and continues elsewhere.
            self._schedulers.break_off(
                WorkerUnavailableError("this worker is changing its role: send the request to another")
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
            self._membership.enter(mode, bootstrap_port)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
