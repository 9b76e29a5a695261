"""The loop of a worker whose model is cut into pipeline stages: a micro-batch in each of them.

    first stage    | step 1 | step 2 | step 3 | step 4 | ...
    last stage              | step 1 | step 2 | step 3 | ...
    scheduler                        ^ commit 1, plan 3, begin it

Up to as many steps are under way as there are stages, and they end in the order in which they began. The last stage is
this process: each step's share of it runs in the engine's thread, one after the other, and the scheduler works beside
it. Steps under way are of different requests, for each goes on from tokens that are known; only a prompt's chunks
follow each other. So one request alone advances by a stage at a time, and with `pp` of them every stage has work.

What a step's requests hold stays theirs until none of their steps is under way (PagedKVCache). Where somebody has to
give way, the pipeline runs empty first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

from splitserve.core.batch import PipelinedEngine
from splitserve.errors import EngineError
from splitserve.scheduler.loops import STEP_WAIT, StepUnderWay, patience
from splitserve.scheduler.scheduler import Scheduler


class PipelinedLoop:
    """Keeps `pp_size` steps under way. Their last stage runs in `engine_thread`, one at a time.

    `wake` ends the scheduler's waiting, from any thread.
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
        # First the one that ends first.
        self.under_way: deque[StepUnderWay] = deque()

    def run(self, is_stopping: Callable[[], bool]) -> None:
        while not is_stopping():
            self.turn()

    def turn(self) -> None:
        """Begin what can be begun, wait for something to happen, and commit what has ended."""
        self._scheduler.receive()
        self._fill()
        if not self.under_way:
            self._scheduler.rest(patience(self._scheduler))
            return
        if not self.under_way[0].result.done():
            self._scheduler.wait(STEP_WAIT)
        # No more than these, however short steps are: messages are heard between turns.
        for step in tuple(self.under_way):
            if not step.result.done():
                return
            self.under_way.popleft()
            self._end(step)
            # At once: the first stage has nothing to do.
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
            self.under_way.append(StepUnderWay(batch, result))

    def _end(self, step: StepUnderWay) -> None:
        self._scheduler.step_ended()
        try:
            result = step.result.result()
        except EngineError as error:
            self._scheduler.fail_step(step.batch, error)
        else:
            self._scheduler.commit(step.batch, result)
