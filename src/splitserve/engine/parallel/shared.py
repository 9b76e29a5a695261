"""The engine of one of several data parallel ranks that compute their steps together (`meeting.py`).

A rank without a request in a step computes one padding token, which other ranks never receive: it sends no token to the
experts and stores nothing. So the ranks' collectives are the same whatever work each rank has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from splitserve.core.batch import StepPlan, StepResult
from splitserve.core.errors import EngineError, RanksLostError
from splitserve.engine.parallel.meeting import Meeting, NoAttention
from splitserve.engine.runner import ModelRunner


class SharedRunner:
    """A runner with steps that all ranks compute together: SharedEngine of the scheduler."""

    def __init__(self, runner: ModelRunner, model: Any, meeting: Meeting) -> None:
        self._runner = runner
        self._model = model.base_model
        self._device = model.device
        self._meeting = meeting

    def prepare(self, plan: StepPlan) -> Callable[[tuple[int, ...]], StepResult]:
        """Read the page table and return a function that runs the step, given the number of tokens of each rank.

        Every rank calls its own, with the same numbers. Both raise EngineError, which fails only the plan's requests.
        The function raises RanksLostError if the ranks are out of step.
        """
        # The loop runs one step after the other, so no token is still to be sampled.
        run = self._runner.begin(plan) if plan.requests else self._take_part
        return functools.partial(self._step, run)

    def _step(self, run: Callable[[], StepResult], num_tokens: tuple[int, ...]) -> StepResult:
        try:
            self._meeting.begin(num_tokens)
        except EngineError as error:
            raise RanksLostError(error.message) from error
        return run()

    def _take_part(self) -> StepResult:
        nothing = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        try:
            with torch.inference_mode():
                self._model(input_ids=nothing, position_ids=nothing, use_cache=False, step_attention=NoAttention())
        except Exception as error:
            raise RanksLostError(
                f"A step of other ranks failed on this one: {type(error).__name__}: {error}"
            ) from error
        return StepResult()
