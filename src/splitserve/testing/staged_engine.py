"""A pipeline of fake stages under a manual clock: when each stage works at which step, and how long it stands idle.

A step passes the stages one after the other, each as soon as it has got it and is done with the step before. The tokens
are the fake engine's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from splitserve.clock import ManualClock
from splitserve.core.batch import StepPlan, StepResult
from splitserve.scheduler.pipeline import PipelinedLoop
from splitserve.testing.fake_engine import FakeEngine
from splitserve.testing.fake_grammar import HeldPool
from splitserve.testing.sim import ColocatedWorld


class StagedEngine(FakeEngine):
    """`seconds`: how long a step takes in each stage."""

    def __init__(self, *args: Any, clock: ManualClock, seconds: list[Callable[[StepPlan], float]]) -> None:
        super().__init__(*args)
        self._clock = clock
        self._seconds = seconds
        # When each stage is done with what it was given, and how long it has worked.
        self._done_at = [0.0] * len(seconds)
        self.busy = [0.0] * len(seconds)
        # Of the steps under way.
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
    """One null worker of some stages: time passes from one step's end to the next one's."""

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
        """Let the first of the steps under way end; it is now when it does."""
        self.clock.advance(max(0.0, self.stages.ends.popleft() - self.clock.now()))
        self._engine_thread.finish_next()

    def run_to_the_end(self) -> float:
        """Seconds until nothing is left."""
        began = self.clock.now()
        for _ in range(100_000):
            self.pipeline.turn()
            if self.stages.ends:
                self.end_step()
            elif self.role.is_idle() and not (self.inbox.messages or self.pipeline.under_way):
                return self.clock.now() - began
        raise AssertionError("still busy")
