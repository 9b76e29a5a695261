"""The loop of a worker with a model that is split into pipeline stages: each stage computes a micro-batch.

    first stage    | step 1 | step 2 | step 3 | step 4 | ...
    last stage              | step 1 | step 2 | step 3 | ...
    scheduler                        ^ commit 1, plan 3, begin it

Up to as many steps are in flight as there are stages, and they end in the order in which they began. This process is
the last stage: its share of each step runs in the engine's thread, one after the other, while the scheduler works.
Steps in flight are of different requests, because each continues from known tokens; only chunks of a prompt follow each
other. So one request alone advances one stage at a time, and as many requests as stages keep all stages busy.

A request keeps what its steps hold until none of them is in flight (PagedKVCache). Before a request is retracted, all
steps in flight end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

from splitserve.core.batch import PipelinedEngine
from splitserve.core.errors import EngineError
from splitserve.scheduler.loops import STEP_WAIT, StepInFlight, patience
from splitserve.scheduler.scheduler import Scheduler


class PipelinedLoop:
    """A loop that keeps `pp_size` steps in flight. Their last stage runs in `engine_thread`, one at a time.

    `wake` ends the scheduler's wait, from any thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: PipelinedEngine,
        engine_thread: Executor,
        wake: Callable[[], None],
        pp_size: int,
    ) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._engine_thread = engine_thread
        self._wake = wake
        self._pp_size = pp_size
        # Steps in flight, in the order in which they end.
        self.under_way: deque[StepInFlight] = deque()

    def run(self, is_stopping: Callable[[], bool]) -> None:
        while not is_stopping():
            self.turn()

    def turn(self) -> None:
        """Begin as many steps as possible, wait for an event, and commit steps that have ended."""
        self._scheduler.receive()
        self._fill()
        if not self.under_way:
            self._scheduler.rest(patience(self._scheduler))
            return
        if not self.under_way[0].result.done():
            self._scheduler.wait(STEP_WAIT)
        # End no more steps than these in one turn, however short steps are: messages are received between turns.
        for step in tuple(self.under_way):
            if not step.result.done():
                return
            self.under_way.popleft()
            self._end(step)
            # Begin a new step at once, because the first stage is idle.
            self._fill()

    def _fill(self) -> None:
        while len(self.under_way) < self._pp_size:
            batch = self._scheduler.plan([step.batch for step in self.under_way])
            if batch is None:
                return
            try:
                run = self._engine.begin(batch.plan)
            except EngineError as error:
                self._scheduler.fail_step(batch, error)
                continue
            self._scheduler.step_began(batch)
            result = self._engine_thread.submit(run)
            result.add_done_callback(lambda _: self._wake())
            self.under_way.append(StepInFlight(batch, result))

    def _end(self, step: StepInFlight) -> None:
        self._scheduler.step_ended()
        try:
            result = step.result.result()
        except EngineError as error:
            self._scheduler.fail_step(step.batch, error)
        else:
            self._scheduler.commit(step.batch, result)
