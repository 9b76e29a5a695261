"""When a scheduler does what. Three loops, each for all roles; that of pipelines is in pipeline.py.

normal       one thing after the other: receive, plan, run the step, commit its result.
overlapped   the step runs in the engine's thread, and the scheduler works meanwhile:

    engine's thread   |--------- step n ----------|--------- step n+1 --------|
    scheduler         | commit n-1 | plan n+1 | wait | commit n | plan n+2 | wait

Between two steps lies only their exchange: step n+1 was planned before the tokens of step n were known, which the
engine puts into it (LAST_DRAWN). Messages are heard while a step runs, and the next one is planned anew after each. A
request that step n finished is in step n+1 all the same; what that draws for it is thrown away, and what it held is set
aside until n+1 has ended (PagedKVCache). Where the plan needs the result, the two steps do not overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Protocol

from splitserve.core.batch import Engine, StepResult
from splitserve.errors import EngineError
from splitserve.scheduler.running import Batch
from splitserve.scheduler.scheduler import Scheduler

# Seconds an idle loop sleeps at most when nothing wakes it.
IDLE_WAIT = 1.0
# The same while hand-overs or leases are under way, as a net under the wake-ups.
BUSY_WAIT = 0.02
# The same beside a step, whose end wakes it.
STEP_WAIT = 0.1


class Loop(Protocol):
    def run(self, is_stopping: Callable[[], bool]) -> None: ...


class NormalLoop:
    """One step after the other: receive, plan, execute, commit."""

    def __init__(self, scheduler: Scheduler, engine: Engine) -> None:
        self._scheduler = scheduler
        self._engine = engine

    def run(self, is_stopping: Callable[[], bool]) -> None:
        while not is_stopping():
            if not self.run_once():
                self._scheduler.rest(patience(self._scheduler))

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


@dataclass(frozen=True, slots=True)
class PreparedStep:
    batch: Batch
    run: Callable[[], StepResult]


@dataclass(frozen=True, slots=True)
class StepUnderWay:
    batch: Batch
    result: Future[StepResult]


class OverlappedLoop:
    """Steps run in `engine_thread`, one at a time. `wake` ends the scheduler's waiting, from any thread."""

    def __init__(self, scheduler: Scheduler, engine: Engine, engine_thread: Executor, wake: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._engine_thread = engine_thread
        self._wake = wake

    def run(self, is_stopping: Callable[[], bool]) -> None:
        now: StepUnderWay | None = None
        while not is_stopping():
            now = self.turn(now)

    def turn(self, now: StepUnderWay | None) -> StepUnderWay | None:
        """One turn beside the step `now`; the step that is under way after it, which may be the same."""
        self._scheduler.receive()
        following = self._prepare(now)
        if now is None:
            if following is None:
                self._scheduler.rest(patience(self._scheduler))
            return self._begin(following)
        if not now.result.done():
            self._scheduler.wait(STEP_WAIT)
        return self._exchange(now, following) if now.result.done() else now

    def _prepare(self, now: StepUnderWay | None) -> PreparedStep | None:
        """The step after `now`; None where there is none, or none that can be planned yet."""
        batch = self._scheduler.plan([now.batch] if now else [])
        if batch is None:
            return None
        try:
            return PreparedStep(batch, self._engine.prepare(batch.plan))
        except EngineError as error:
            self._scheduler.fail_step(batch, error)
            return None

    def _exchange(self, now: StepUnderWay, following: PreparedStep | None) -> StepUnderWay | None:
        """`now` has ended: begin the step that follows, and commit the result of `now` while that one runs."""
        self._scheduler.step_ended()
        try:
            result = now.result.result()
        except EngineError as error:
            # The step that was to follow would go on from tokens that were never drawn.
            self._scheduler.fail_step(now.batch, error)
            return None
        begun = self._begin(following)
        self._scheduler.commit(now.batch, result)
        return begun

    def _begin(self, step: PreparedStep | None) -> StepUnderWay | None:
        if step is None:
            return None
        self._scheduler.step_began(step.batch)
        result = self._engine_thread.submit(step.run)
        result.add_done_callback(lambda _: self._wake())
        return StepUnderWay(step.batch, result)


def patience(scheduler: Scheduler) -> float:
    return IDLE_WAIT if scheduler.role.is_idle() else BUSY_WAIT
