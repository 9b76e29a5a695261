"""Loops that drive a scheduler, each for all roles. The loop of pipelines is in pipeline.py.

normal       one action after the other: receive, plan, run the step, commit its result.
overlapped   the step runs in the engine's thread while the scheduler works:

    engine's thread   |--------- step n ----------|--------- step n+1 --------|
    scheduler         | commit n-1 | plan n+1 | wait | commit n | plan n+2 | wait

Between two steps only their results are exchanged: step n+1 was planned before the tokens of step n were known, and the
engine fills them in (LAST_SAMPLED). Messages are received while a step runs, and the next step is planned anew after
each. A request that step n finished is still in step n+1: the token sampled for it there is dropped, and its pages are
set aside until n+1 has ended (PagedKVCache). If the plan needs the result of step n, the two steps do not overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Protocol

from splitserve.core.batch import ModelEngine, StepResult
from splitserve.core.errors import EngineError
from splitserve.scheduler.running import ScheduledBatch
from splitserve.scheduler.scheduler import Scheduler

# Maximum seconds an idle loop waits if nothing wakes it.
IDLE_WAIT = 1.0
# Maximum seconds of a wait while KV transfers or leases are in flight, in case a wake-up is lost.
BUSY_WAIT = 0.02
# Maximum seconds of a wait while a step runs. The end of the step wakes the loop.
STEP_WAIT = 0.1


class Loop(Protocol):
    def run(self, is_stopping: Callable[[], bool]) -> None: ...


class NormalLoop:
    """A loop that runs one step after the other: receive, plan, execute, commit."""

    def __init__(self, scheduler: Scheduler, engine: ModelEngine) -> None:
        self._scheduler = scheduler
        self._engine = engine

    def run(self, is_stopping: Callable[[], bool]) -> None:
        while not is_stopping():
            if not self.run_once():
                self._scheduler.rest(patience(self._scheduler))

    def run_once(self) -> bool:
        """Run one turn. Return False if there was nothing to compute."""
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


@dataclass(frozen=True, slots=True)
class PreparedStep:
    batch: ScheduledBatch
    run: Callable[[], StepResult]


@dataclass(frozen=True, slots=True)
class StepInFlight:
    batch: ScheduledBatch
    result: Future[StepResult]


class OverlappedLoop:
    """A loop with steps in `engine_thread`, one at a time. `wake` ends the scheduler's wait, from any thread."""

    def __init__(
        self, scheduler: Scheduler, engine: ModelEngine, engine_thread: Executor, wake: Callable[[], None]
    ) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._engine_thread = engine_thread
        self._wake = wake

    def run(self, is_stopping: Callable[[], bool]) -> None:
        now: StepInFlight | None = None
        while not is_stopping():
            now = self.turn(now)

    def turn(self, now: StepInFlight | None) -> StepInFlight | None:
        """Run one turn while the step `now` runs. Return the step in flight after it, which may be the same."""
        self._scheduler.receive()
        following = self._prepare(now)
        if now is None:
            if following is None:
                self._scheduler.rest(patience(self._scheduler))
            return self._begin(following)
        if not now.result.done():
            self._scheduler.wait(STEP_WAIT)
        return self._exchange(now, following) if now.result.done() else now

    def _prepare(self, now: StepInFlight | None) -> PreparedStep | None:
        """Return the step after `now`; None if there is none, or none that can be planned yet."""
        batch = self._scheduler.plan([now.batch] if now else [])
        if batch is None:
            return None
        try:
            return PreparedStep(batch, self._engine.prepare(batch.plan))
        except EngineError as error:
            self._scheduler.fail_step(batch, error)
            return None

    def _exchange(self, now: StepInFlight, following: PreparedStep | None) -> StepInFlight | None:
        """Begin the step after `now`, which has ended. Commit the result of `now` while the new step runs."""
        self._scheduler.step_ended()
        try:
            result = now.result.result()
        except EngineError as error:
            # The next step would continue from tokens that were never sampled.
            self._scheduler.fail_step(now.batch, error)
            return None
        begun = self._begin(following)
        self._scheduler.commit(now.batch, result)
        return begun

    def _begin(self, step: PreparedStep | None) -> StepInFlight | None:
        if step is None:
            return None
        self._scheduler.step_began(step.batch)
        result = self._engine_thread.submit(step.run)
        result.add_done_callback(lambda _: self._wake())
        return StepInFlight(step.batch, result)


def patience(scheduler: Scheduler) -> float:
    return IDLE_WAIT if scheduler.role.is_idle() else BUSY_WAIT
