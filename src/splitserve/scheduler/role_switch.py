"""One scheduler's part in a switch to another role: engine, weights, pool and caches stay, the role is replaced.

The front end orders these steps. Either all schedulers of the worker commit, or none:
1. PREPARE   Open what the new role needs (transport, manager, metadata) while the old role serves. Everything that may
             fail, fails here.
2. DRAIN     Take no more requests. Reply when nothing is held, or with an error if something still is at the deadline.
             A drained scheduler stays drained.
3. COMMIT    Replace the old role by the new one, and close what only the old one needed.
or CANCEL    At any time before COMMIT: close what was prepared; the old role continues unchanged.

HOLD is DRAIN for a change of the worker's memory (`memory.py`), which closes the role and opens it again.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from contextlib import ExitStack

from splitserve.core.errors import (
    ConfigError,
    DeadlineExceededError,
    ModelLoadError,
    SplitserveError,
    WorkerUnavailableError,
)
from splitserve.core.messages import RoleReply, RoleRequest, RoleStep
from splitserve.scheduler.parts import PreparedRole, SchedulerParts
from splitserve.scheduler.roles.role import Role

logger = logging.getLogger(__name__)


class SchedulerRoleSwitch:
    """Owner of the current role's `PreparedRole`. Replies to the steps. Used by the scheduler's thread alone."""

    def __init__(self, parts: SchedulerParts, current: PreparedRole) -> None:
        self._parts = parts
        self._current = current
        # PREPARE in progress: the number of the call, and the role.
        self._preparing: tuple[int, Future[PreparedRole]] | None = None
        self._prepared: PreparedRole | None = None
        # DRAIN in progress, and the clock time of its deadline.
        self._draining: tuple[RoleRequest, float] | None = None
        self._is_drained = False
        # Why HOLD and DRAIN are rejected: the load in progress was discarded (`memory.py`). Empty: they are not.
        self.hold_obstacle = ""

    @property
    def is_held(self) -> bool:
        """Whether requests are rejected because the role is about to change."""
        return self._draining is not None or self._is_drained

    @property
    def is_drained(self) -> bool:
        """Whether nothing is held, and nothing is accepted."""
        return self._is_drained

    def take(self, order: RoleRequest, role: Role) -> Role:
        """Take a step and return the role from here on. `poll` replies to those that take time."""
        try:
            match order.step:
                case RoleStep.PREPARE:
                    self._prepare(order)
                    return role
                case RoleStep.DRAIN | RoleStep.HOLD:
                    if self._prepared is None and order.step is RoleStep.DRAIN:
                        raise WorkerUnavailableError("no role has been prepared: begin the switch anew")
                    if self.hold_obstacle:
                        raise WorkerUnavailableError(self.hold_obstacle)
                    self._draining = order, self._parts.ports.clock.now() + order.timeout
                    return role
                case RoleStep.COMMIT:
                    role = self._commit()
                case RoleStep.CANCEL:
                    self._drop_prepared()
                    self._draining, self._is_drained = None, False
                    role.hold(False)
        except SplitserveError as error:
            self._reply(order.call_id, error)
        else:
            self._reply(order.call_id)
        return role

    def poll(self, role: Role, *, is_resting: bool = False) -> None:
        """Reply to the steps that are complete or overdue. `is_resting`: no step runs, and nothing is held."""
        if self._preparing is not None and self._preparing[1].done():
            (call_id, future), self._preparing = self._preparing, None
            self._take_prepared(call_id, future)
        if self._draining is None:
            return
        order, deadline = self._draining
        if is_resting:
            self._draining, self._is_drained = None, True
            # Only now: peers may hold what this scheduler waits for until their own requests are served.
            role.hold(True)
            self._reply(order.call_id)
        elif self._parts.ports.clock.now() >= deadline:
            self._draining = None
            text = f"the scheduler still held requests or leased pages after {order.timeout:g} s (stage: draining)"
            self._reply(order.call_id, DeadlineExceededError(text))

    def install(self, prepared: PreparedRole) -> Role:
        """Replace the current role and accept requests again. Only while drained. Raises SplitserveError."""
        role = self._parts.install(prepared)
        old, self._current = self._current, prepared
        self._is_drained = False
        # The new role already works. If closing the old role fails, only memory is lost.
        _close_old(old)
        return role

    def park(self) -> None:
        """Close the KV transfer of the current role. Only while drained, until the next `install`."""
        old, self._current = self._current, PreparedRole(self._current.mode, None, ExitStack())
        _close_old(old)

    def close(self) -> None:
        """Close all open parts, those of the current role last."""
        self._drop_prepared()
        self._current.closing.close()

    def _prepare(self, order: RoleRequest) -> None:
        if self.is_held or self._preparing is not None or self._prepared is not None:
            raise WorkerUnavailableError("another switch of the role is in progress: wait for its end")
        ports = self._parts.ports
        future = ports.role_thread.submit(self._parts.prepare, order.mode, order.bootstrap_url)
        self._preparing = order.call_id, future
        future.add_done_callback(lambda _: ports.wake())

    def _take_prepared(self, call_id: int, future: Future[PreparedRole]) -> None:
        try:
            self._prepared = future.result()
        except SplitserveError as error:
            self._reply(call_id, error)
        except Exception as error:
            logger.exception("the role could not be prepared")
            self._reply(call_id, WorkerUnavailableError(f"{type(error).__name__}: {error}"))
        else:
            self._reply(call_id)

    def _commit(self) -> Role:
        if self._prepared is None or not self._is_drained:
            raise WorkerUnavailableError("the role cannot change before its scheduler is drained: begin anew")
        old, role = self._current.mode, self.install(self._prepared)
        self._prepared = None
        logger.info("the role is %s now, and was %s", role.mode, old)
        return role

    def _drop_prepared(self) -> None:
        if self._preparing is not None:
            self._preparing[1].add_done_callback(_close_late)
            self._preparing = None
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.closing.close()

    def _reply(self, call_id: int, error: SplitserveError | None = None) -> None:
        self._parts.outbox.reply(role_reply(call_id, error))


def _close_old(old: PreparedRole) -> None:
    try:
        old.closing.close()
    except Exception:
        logger.exception("resources of the old %s role could not be closed", old.mode)


def role_reply(call_id: int, error: SplitserveError | None, model: str = "") -> RoleReply:
    """Return the answer to a call. An error in the order itself has the status 400. `model`: see RoleReply."""
    if error is None:
        return RoleReply(call_id=call_id, model=model)
    is_order = isinstance(error, ConfigError | ModelLoadError)
    return RoleReply(call_id=call_id, error=error.message, status_code=400 if is_order else error.http_status)


def _close_late(future: Future[PreparedRole]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().closing.close()
