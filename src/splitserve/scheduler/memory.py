"""One scheduler's part in the release of memory and in updates of weights.

The front end orders it in steps. A scheduler is drained before RELEASE and UPDATE (HOLD, `role_switch.py`):
1. LOAD      Load other weights beside those in use, while the role serves.
2. UPDATE    Use them, drop all cached KV, and open the role anew, so that peers pair again. If the role
             cannot be opened, the old weights and the old role continue. DISCARD drops loaded weights before UPDATE.
             During LOAD it replies at once, and the weights are dropped when LOAD ends. HOLD is rejected until then.
             An engine with followers (`closes_role`) is drained before LOAD, and its role is closed before UPDATE. If
             that role cannot be opened again, the ranks are out of step, and the worker ends.

   RELEASE   Close the role, and with it every registration of the pool. Then return memory to the system.
   RESUME    Make memory usable again. When nothing is released any more, open the role.

Between RELEASE and RESUME the role is parked: it transfers nothing, and the scheduler accepts no requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from splitserve.core.errors import InvalidRequestError, RanksLostError, SplitserveError, WorkerUnavailableError, clause
from splitserve.core.memory import EngineMemory, MemoryStep, MemoryTag
from splitserve.core.messages import MemoryRequest
from splitserve.core.request import DisaggregationMode
from splitserve.scheduler.parts import PreparedRole, SchedulerParts
from splitserve.scheduler.role_switch import SchedulerRoleSwitch, role_reply
from splitserve.scheduler.roles.role import Role

logger = logging.getLogger(__name__)

_STILL_LOADING = "the load of a failed update is still running, and its weights are dropped when it ends: retry then"


class SchedulerMemory:
    """Executor of MemoryRequests, one at a time. Used by the scheduler's thread alone."""

    def __init__(self, parts: SchedulerParts, role_switch: SchedulerRoleSwitch) -> None:
        self._parts = parts
        self._role_switch = role_switch
        # Mode of the parked role. None: the role is open.
        self._parked: DisaggregationMode | None = None
        # Fingerprint of the weights that computed the cached KV.
        self._fingerprint = "" if parts.engine.engine_memory is None else parts.engine.engine_memory.fingerprint
        # Order in progress in the role's thread. Its result is the role to install; None: none.
        self._running: tuple[MemoryRequest, Future[PreparedRole | None]] | None = None

    def take(self, order: MemoryRequest, role: Role) -> Role:
        """Take a step and return the role from here on. `poll` replies to those that take time."""
        try:
            engine = self._check(order)
            match order.step:
                case MemoryStep.LOAD:
                    self._begin(order, lambda: self._load(engine, order))
                    return role
                case MemoryStep.UPDATE:
                    mode = self._parked or role.mode
                    if engine.closes_role:
                        role = self._park(role)
                    self._begin(order, lambda: self._update(engine, mode, order))
                    return role
                case MemoryStep.RESUME:
                    if self._parked is not None:
                        mode = self._parked
                        self._begin(order, lambda: self._resume(engine, mode, order))
                        return role
                case MemoryStep.DISCARD if self._running is not None:
                    self._role_switch.hold_obstacle = _STILL_LOADING
                case MemoryStep.DISCARD:
                    engine.discard()
                case MemoryStep.RELEASE:
                    role = self._park(role)
                    self._release(engine, order)
        except RanksLostError:
            raise
        except SplitserveError as error:
            self._reply(order, error)
        else:
            self._reply(order)
        return role

    def poll(self, role: Role) -> Role:
        """Reply to an order that is complete, and return the role from here on."""
        if self._running is None or not self._running[1].done():
            return role
        (order, future), self._running = self._running, None
        is_discarded, self._role_switch.hold_obstacle = bool(self._role_switch.hold_obstacle), ""
        try:
            return self._take_result(order, future.result(), role, is_discarded=is_discarded)
        except RanksLostError:
            # The ranks may have different weights: the process ends.
            raise
        except SplitserveError as error:
            self._reply(order, error)
        except Exception as error:
            logger.exception("memory order %s failed", order.step)
            self._reply(order, WorkerUnavailableError(f"{type(error).__name__}: {error}"))
        return role

    def close(self) -> None:
        """Close a role that was opened and is not installed. Call when the role's thread has ended."""
        running, self._running = self._running, None
        if running is None or running[1].cancelled() or running[1].exception() is not None:
            return
        if (prepared := running[1].result()) is not None:
            prepared.closing.close()

    def _check(self, order: MemoryRequest) -> EngineMemory:
        engine = self._parts.engine.engine_memory
        if engine is None:
            raise InvalidRequestError("this engine can neither release memory nor replace its weights")
        if self._running is not None:
            running = self._running[0].step
            # Ranks of a group load and discard together.
            can_discard = running is MemoryStep.LOAD and not engine.closes_role
            if not (order.step is MemoryStep.DISCARD and can_discard):
                raise WorkerUnavailableError(f"another change of memory is in progress ({running}): wait for its end")
        needs_drain = order.step in (MemoryStep.UPDATE, MemoryStep.RELEASE)
        needs_drain |= order.step is MemoryStep.LOAD and engine.closes_role
        if needs_drain and not self._role_switch.is_drained:
            raise WorkerUnavailableError("memory cannot change before the scheduler is drained: begin anew")
        return engine

    def _begin(self, order: MemoryRequest, run: Callable[[], PreparedRole | None]) -> None:
        ports = self._parts.ports
        future = ports.role_thread.submit(run)
        self._running = order, future
        future.add_done_callback(lambda _: ports.wake())

    def _load(self, engine: EngineMemory, order: MemoryRequest) -> None:
        if order.source is None:
            raise InvalidRequestError("the order to load weights has no source")
        engine.load(order.source)

    def _update(self, engine: EngineMemory, mode: DisaggregationMode, order: MemoryRequest) -> PreparedRole | None:
        try:
            engine.use()
            return None if engine.released else self._parts.prepare(mode, order.bootstrap_url)
        except BaseException as error:
            _undo(engine, error)
            raise

    def _resume(self, engine: EngineMemory, mode: DisaggregationMode, order: MemoryRequest) -> PreparedRole | None:
        engine.resume(order.tags)
        return None if engine.released else self._parts.prepare(mode, order.bootstrap_url)

    def _park(self, role: Role) -> Role:
        """Close the role, and return the one that replaces it until RESUME."""
        if self._parked is not None:
            return role
        self._parked = role.mode
        # Before memory is released: transports may have registered it.
        self._role_switch.park()
        return Role(role.running, self._parts.outbox, self._parts.ports.clock)

    def _release(self, engine: EngineMemory, order: MemoryRequest) -> None:
        if MemoryTag.KV_CACHE in order.tags:
            self._parts.cache.flush()
        if MemoryTag.WEIGHTS in order.tags:
            engine.discard()
        engine.release(order.tags)
        logger.info("memory released tags=%s", ",".join(sorted(engine.released)))

    def _take_result(
        self, order: MemoryRequest, prepared: PreparedRole | None, role: Role, *, is_discarded: bool
    ) -> Role:
        engine = self._parts.engine.engine_memory
        assert engine is not None
        if is_discarded:
            engine.discard()
            logger.info("weights of a failed update discarded when their load ended")
        if prepared is not None:
            try:
                role = self._role_switch.install(prepared)
            except BaseException as error:
                prepared.closing.close()
                _undo(engine, error)
                raise
            self._parked = None
        if order.step is MemoryStep.UPDATE:
            engine.confirm()
        if order.step is not MemoryStep.LOAD and engine.fingerprint != self._fingerprint:
            # The cached KV was computed with other weights.
            self._parts.cache.flush()
            self._fingerprint = engine.fingerprint
            logger.info("weights replaced fingerprint=%s", self._fingerprint)
        self._reply(order)
        return role

    def _reply(self, order: MemoryRequest, error: SplitserveError | None = None) -> None:
        # The fingerprint of a draft model follows.
        self._parts.outbox.reply(role_reply(order.call_id, error, self._fingerprint.partition(" ")[0]))


def _undo(engine: EngineMemory, error: BaseException) -> None:
    """Use the old weights again. Raises RanksLostError if the old role is closed already."""
    if engine.closes_role:
        raise RanksLostError(f"this worker's ranks could not serve with the new weights: {clause(error)}") from error
    engine.undo()
