"""When a scheduler does what. One loop for all roles."""

from __future__ import annotations

import logging
from collections.abc import Callable

from splitserve.core.batch import Engine
from splitserve.errors import EngineError
from splitserve.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

# Seconds an idle loop sleeps at most when nothing wakes it.
IDLE_WAIT = 1.0
# The same while hand-overs or leases are under way, as a net under the wake-ups.
BUSY_WAIT = 0.02


class NormalLoop:
    """One step after the other: receive, plan, execute, commit."""

    def __init__(self, scheduler: Scheduler, engine: Engine) -> None:
        self._scheduler = scheduler
        self._engine = engine

    def run(self, is_stopping: Callable[[], bool]) -> None:
        while not is_stopping():
            if not self.run_once():
                self._scheduler.rest(IDLE_WAIT if self._scheduler.role.is_idle() else BUSY_WAIT)

    def run_once(self) -> bool:
        """One turn; False if there was nothing to compute."""
        self._scheduler.receive()
        batch = self._scheduler.plan()
        if batch is None:
            return False
        try:
            result = self._engine.execute(batch.plan)
        except EngineError as error:
            self._scheduler.fail_step(batch, error)
        else:
            self._scheduler.commit(batch, result)
        return True
