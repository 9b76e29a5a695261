"""One scheduler's part in a switch to another role: engine, weights, pool and caches stay, the role is replaced.

The front end orders it in steps, which all schedulers of the worker take or none:
1. PREPARE   Open what the new role needs (transport, manager, metadata) while the old role serves. Everything that may
             fail, fails here.
2. SETTLE    Take no more requests. Reply when nothing is held, or with an error if something still is at the deadline.
             A settled scheduler stays settled.
3. COMMIT    Replace the old role by the new one, and close what only the old one needed.
or CANCEL    At any time before COMMIT: close what was prepared; the old role continues unchanged.

This module depends neither on what a role needs nor on why it changes.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass

from splitserve.core.errors import ConfigError, DeadlineExceededError, SplitserveError, WorkerUnavailableError
from splitserve.core.messages import RoleReply, RoleRequest, RoleStep
from splitserve.scheduler.parts import PreparedRole, SchedulerParts
from splitserve.scheduler.roles.role import Role

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Settling:
    call_id: int
    # Clock time.
    deadline: float
    timeout: float


class SchedulerRoleSwitch:
    """Owner of the current role's `PreparedRole`. Used by the scheduler's thread alone."""

    def __init__(self, parts: SchedulerParts, current: PreparedRole) -> None:
        self._parts = parts
        self._current = current
        self._preparing: tuple[int, Future[PreparedRole]] | None = None
        self._prepared: PreparedRole | None = None
        self._settling: _Settling | None = None
        self._is_settled = False

    @property
    def is_held(self) -> bool:
        """Whether requests are rejected because the role is about to change."""
        return self._settling is not None or self._is_settled

    @property
    def is_under_way(self) -> bool:
        return self.is_held or self._preparing is not None or self._prepared is not None

    def take(self, order: RoleRequest, role: Role, now: float) -> tuple[Role, RoleReply | None]:
        """Return the role from here on, and the reply; None: `poll` returns it later."""
        try:
            return self._take(order, role, now)
        except SplitserveError as error:
            return role, _refusal(order.call_id, error)

    def poll(self, role: Role, now: float, *, is_resting: bool = False) -> list[RoleReply]:
        """Return replies that have become due. `is_resting`: no step runs, and nothing is held."""
        return [reply for reply in (self._poll_prepared(), self._poll_settled(role, now, is_resting)) if reply]

    def close(self) -> None:
        """Close all open parts, those of the current role last."""
        self._drop_prepared()
        self._current.closing.close()

    def _take(self, order: RoleRequest, role: Role, now: float) -> tuple[Role, RoleReply | None]:
        match order.step:
            case RoleStep.PREPARE:
                if self.is_under_way:
                    raise WorkerUnavailableError("another switch of the role is under way: wait for its end")
                ports = self._parts.ports
                future = ports.role_thread.submit(self._parts.prepare, order.mode, order.bootstrap_url)
                self._preparing = order.call_id, future
                future.add_done_callback(lambda _: ports.wake())
                return role, None
            case RoleStep.SETTLE:
                if self._prepared is None:
                    raise WorkerUnavailableError("no role has been prepared: begin the switch anew")
                self._settling = _Settling(order.call_id, now + order.timeout, order.timeout)
                return role, None
            case RoleStep.COMMIT:
                return self._commit(), RoleReply(call_id=order.call_id)
            case RoleStep.CANCEL:
                self._drop_prepared()
                self._settling, self._is_settled = None, False
                role.hold(False)
                return role, RoleReply(call_id=order.call_id)

    def _commit(self) -> Role:
        if self._prepared is None or not self._is_settled:
            raise WorkerUnavailableError("the role cannot change before its scheduler has settled: begin anew")
        role = self._parts.install(self._prepared)
        old, self._current, self._prepared = self._current, self._prepared, None
        self._is_settled = False
        try:
            old.closing.close()
        except Exception:
            # The new role works. What the old role could not close only occupies memory.
            logger.exception("what the %s role needed could not be closed", old.mode)
        logger.info("the role is %s now, and was %s", role.mode, old.mode)
        return role

    def _poll_prepared(self) -> RoleReply | None:
        if self._preparing is None or not self._preparing[1].done():
            return None
        (call_id, future), self._preparing = self._preparing, None
        try:
            self._prepared = future.result()
        except SplitserveError as error:
            return _refusal(call_id, error)
        except Exception as error:
            logger.exception("the role could not be prepared")
            return _refusal(call_id, WorkerUnavailableError(f"{type(error).__name__}: {error}"))
        return RoleReply(call_id=call_id)

    def _poll_settled(self, role: Role, now: float, is_resting: bool) -> RoleReply | None:
        settling = self._settling
        if settling is None:
            return None
        if is_resting:
            self._settling, self._is_settled = None, True
            # Only now: peers may hold what this scheduler waits for until their own requests are served.
            role.hold(True)
            return RoleReply(call_id=settling.call_id)
        if now < settling.deadline:
            return None
        self._settling = None
        return _refusal(
            settling.call_id,
            DeadlineExceededError(
                f"the scheduler still held requests or leased pages after {settling.timeout:g} s (stage: settling)"
            ),
        )

    def _drop_prepared(self) -> None:
        if self._preparing is not None:
            self._preparing[1].add_done_callback(_close_late)
            self._preparing = None
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.closing.close()


def _close_late(future: Future[PreparedRole]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().closing.close()


def _refusal(call_id: int, error: SplitserveError) -> RoleReply:
    status = 400 if isinstance(error, ConfigError) else error.http_status
    return RoleReply(call_id=call_id, error=error.message, status_code=status)
