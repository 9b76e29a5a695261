"""Pipeline of fake stages under a manual clock, which measures the busy and idle time of each stage.

A step passes the stages in order. A stage begins it when the stage before has finished it and its own last step is
done. The fake engine computes the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from splitserve.core.batch import StepPlan, StepResult
from splitserve.core.clock import ManualClock
from splitserve.scheduler.loops import PipelinedLoop
from support.fake_engine import FakeEngine
from support.fake_grammar import HeldPool
from support.sim import ColocatedWorld


class StagedEngine(FakeEngine):
    """Fake engine with stages. `seconds`: for each stage, the duration of a step."""

    def __init__(self, *args: Any, clock: ManualClock, seconds: list[Callable[[StepPlan], float]]) -> None:
        super().__init__(*args)
        self._clock = clock
        self._seconds = seconds
        # Time when each stage finishes its last step, and its total busy time.
        self._done_at = [0.0] * len(seconds)
        self.busy = [0.0] * len(seconds)
        # End times of the steps in flight.
        self.ends: deque[float] = deque()
        self.plans: list[StepPlan] = []

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        at = self._clock.now()
        for stage, seconds in enumerate(self._seconds):
            cost = seconds(plan)
            at = self._done_at[stage] = max(at, self._done_at[stage]) + cost
            self.busy[stage] += cost
        self.ends.append(at)
        self.plans.append(plan)
        return super().begin(plan)


class PipelineWorld(ColocatedWorld):
    """Null worker of several stages. Time advances from the end of one step to the end of the next."""

    def __init__(self, seconds: list[Callable[[StepPlan], float]], **settings: Any) -> None:
        def make_engine(*args: Any) -> StagedEngine:
            return StagedEngine(*args, clock=self.clock, seconds=seconds)

        super().__init__(make_engine=make_engine, pp_size=len(seconds), **settings)
        self._engine_thread = HeldPool()
        self.pipeline = PipelinedLoop(self.scheduler, self.stages, self._engine_thread, lambda: None, len(seconds))

    @property
    def stages(self) -> StagedEngine:
        assert isinstance(self.engine, StagedEngine)
        return self.engine

    def end_step(self) -> None:
        """Advance the clock to the end of the first step in flight, and end it."""
        self.clock.advance(max(0.0, self.stages.ends.popleft() - self.clock.now()))
        self._engine_thread.finish_next()

    def run_to_the_end(self) -> float:
        """Run until nothing is left. Return the seconds that it took."""
        began = self.clock.now()
        for _ in range(100_000):
            self.pipeline.turn()
            if self.stages.ends:
                self.end_step()
            elif self.role.is_idle() and not (self.inbox.messages or self.pipeline.in_flight):
                return self.clock.now() - began
        raise AssertionError("still busy")
