"""Loops that drive a scheduler, each for all roles.

normal       one action after the other: receive, plan, run the step, commit its result.
overlapped   the step runs in the engine's thread while the scheduler works:

    engine's thread   |--------- step n ----------|--------- step n+1 --------|
    scheduler         | commit n-1 | plan n+1 | wait | commit n | plan n+2 | wait

Between two steps only their results are exchanged: step n+1 was planned before the tokens of step n were known, and the
engine fills them in (LAST_SAMPLED). Messages are received while a step runs, and the next step is planned anew after
each. A request that step n finished is still in step n+1: the token sampled for it there is dropped, and its pages are
set aside until n+1 has ended (PagedKVCache). If the plan needs the result of step n, the two steps do not overlap.

pipelined    each pipeline stage computes a micro-batch:

    first stage    | step 1 | step 2 | step 3 | step 4 | ...
    last stage              | step 1 | step 2 | step 3 | ...
    scheduler                        ^ commit 1, plan 3, begin it

Up to as many steps are in flight as there are stages, and they end in the order in which they began. This process is
the last stage: its share of each step runs in the engine's thread, one after the other, while the scheduler works.
Steps in flight are of different requests, because each continues from known tokens; only chunks of a prompt follow each
other. So one request alone advances one stage at a time, and as many requests as stages keep all stages busy. Before a
request is retracted, all steps in flight end.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from splitserve.core.batch import ModelEngine, PipelinedEngine, StepResult
from splitserve.core.clock import Clock
from splitserve.core.errors import EngineError
from splitserve.scheduler.running import ScheduledBatch, StepPeriod
from splitserve.scheduler.scheduler import Scheduler

# Maximum seconds of a wait while a step runs. The end of the step wakes the loop.
STEP_WAIT = 0.1


class NormalLoop:
    """A loop that runs one step after the other: receive, plan, execute, commit."""

    def __init__(self, scheduler: Scheduler, engine: ModelEngine) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._clock = scheduler.parts.ports.clock

    def run(self, is_stopping: Callable[[], bool]) -> None:
        while not is_stopping():
            if not self.run_once():
                self._scheduler.rest()

    def run_once(self) -> bool:
        """Run one turn. Return False if there was nothing to compute."""
        self._scheduler.receive()
        batch = self._scheduler.plan()
        if batch is None:
            return False
        try:
            around = self._scheduler.role.around_step(batch.plan)
            result, times = _timed(self._clock, around, partial(self._engine.execute, batch.plan))
        except EngineError as error:
            self._scheduler.fail_step(batch, error)
        else:
            self._scheduler.commit(batch, result, times)
        return True


# Result of a step, and the period in which the engine computed it.
TimedResult = tuple[StepResult, StepPeriod]


def _timed(clock: Clock, around: AbstractContextManager[None], run: Callable[[], StepResult]) -> TimedResult:
    with around:
        start = clock.now()
        return run(), StepPeriod(start, clock.now())


@dataclass(frozen=True, slots=True)
class StepInFlight:
    batch: ScheduledBatch
    result: Future[TimedResult]


# A planned step, and the function that runs it.
PreparedStep = tuple[ScheduledBatch, Callable[[], StepResult]]


class _ThreadedLoop:
    """Loop with steps in `engine_thread`, one at a time. `wake` ends the scheduler's wait, from any thread."""

    def __init__(self, scheduler: Scheduler, engine_thread: Executor, wake: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._inbox, self._cache = scheduler.parts.ports.inbox, scheduler.parts.cache
        self._clock = scheduler.parts.ports.clock
        self._engine_thread = engine_thread
        self._wake = wake

    def _begin(self, batch: ScheduledBatch, run: Callable[[], StepResult]) -> StepInFlight:
        self._cache.step_began(batch.requests)
        result = self._engine_thread.submit(_timed, self._clock, self._scheduler.role.around_step(batch.plan), run)
        result.add_done_callback(lambda _: self._wake())
        return StepInFlight(batch, result)

    def _end(self, step: StepInFlight) -> TimedResult | None:
        """Return the result of the oldest step in flight, which has ended. None: it failed."""
        self._cache.step_ended()
        try:
            return step.result.result()
        except EngineError as error:
            self._scheduler.fail_step(step.batch, error)
            return None


class OverlappedLoop(_ThreadedLoop):
    """A loop that plans a step while the step before it runs."""

    def __init__(
        self, scheduler: Scheduler, engine: ModelEngine, engine_thread: Executor, wake: Callable[[], None]
    ) -> None:
        super().__init__(scheduler, engine_thread, wake)
        self._engine = engine

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
                self._scheduler.rest()
                return None
            return self._begin(*following)
        if not now.result.done():
            self._inbox.wait(STEP_WAIT)
        return self._exchange(now, following) if now.result.done() else now

    def _prepare(self, now: StepInFlight | None) -> PreparedStep | None:
        """Return the step after `now`; None if there is none, or none that can be planned yet."""
        batch = self._scheduler.plan([now.batch] if now else [])
        if batch is None:
            return None
        try:
            return batch, self._engine.prepare(batch.plan)
        except EngineError as error:
            self._scheduler.fail_step(batch, error)
            return None

    def _exchange(self, now: StepInFlight, following: PreparedStep | None) -> StepInFlight | None:
        """Begin the step after `now`, which has ended. Commit the result of `now` while the new step runs."""
        ended = self._end(now)
        if ended is None:
            # The next step would continue from tokens that were never sampled.
            return None
        begun = self._begin(*following) if following is not None else None
        self._scheduler.commit(now.batch, *ended)
        return begun


class PipelinedLoop(_ThreadedLoop):
    """A loop that keeps `pp_size` steps in flight. Their last stage runs in `engine_thread`."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine: PipelinedEngine,
        engine_thread: Executor,
        wake: Callable[[], None],
        pp_size: int,
    ) -> None:
        super().__init__(scheduler, engine_thread, wake)
        self._engine = engine
        self._pp_size = pp_size
        # Steps in flight, in the order in which they end.
        self.in_flight: deque[StepInFlight] = deque()

    def run(self, is_stopping: Callable[[], bool]) -> None:
        while not is_stopping():
            self.turn()

    def turn(self) -> None:
        """Begin as many steps as possible, wait for an event, and commit steps that have ended."""
        self._scheduler.receive()
        self._fill()
        if not self.in_flight:
            self._scheduler.rest()
            return
        if not self.in_flight[0].result.done():
            self._inbox.wait(STEP_WAIT)
        # End no more steps than these in one turn, however short steps are: messages are received between turns.
        for step in tuple(self.in_flight):
            if not step.result.done():
                return
            self.in_flight.popleft()
            if (ended := self._end(step)) is not None:
                result, times = ended
                # The time includes waits for the earlier stages.
                self._scheduler.commit(step.batch, result, dataclasses.replace(times, is_shared=True))
            # Begin a new step at once, because the first stage is idle.
            self._fill()

    def _fill(self) -> None:
        while len(self.in_flight) < self._pp_size:
            batch = self._scheduler.plan([step.batch for step in self.in_flight])
            if batch is None:
                return
            try:
                run = self._engine.begin(batch.plan)
            except EngineError as error:
                self._scheduler.fail_step(batch, error)
                continue
            self.in_flight.append(self._begin(batch, run))


Loop = NormalLoop | OverlappedLoop | PipelinedLoop
