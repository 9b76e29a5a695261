"""A model that is served together with a small one, the draft, which guesses its next tokens.

Both compute the same tokens on the same pages, each in layers of its own: what counts as computed of a request is so
for both, and whatever copies, keeps or sends a page does so for both.

1. `propose` lets the draft generate some tokens from where each request stands. It draws them by the request's own
   parameters and variates, so the guess at a position is wrong only where the two models' distributions differ there.
2. `execute` runs the model's step, guesses and all.
3. Then the draft catches up on what it has not seen: prompts, and the last guess where all were accepted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from splitserve.core.batch import RequestResult, RequestStep, StepPlan, StepResult
from splitserve.engine.runner import ModelRunner
from splitserve.errors import EngineError


class DraftingRunner:
    """Engine, and its own Proposer (scheduler/speculation.py)."""

    def __init__(self, target: ModelRunner, draft: ModelRunner) -> None:
        self.target = target
        self._draft = draft

    def propose(self, steps: Sequence[RequestStep], rooms: Sequence[int]) -> list[list[int]]:
        """`rooms[i]` tokens that may follow steps[i]. The draft's KV of all but the last is in place then."""
        guesses: list[list[int]] = [[] for _ in steps]
        for count in range(max(rooms, default=0)):
            asked = [i for i, room in enumerate(rooms) if room > count]
            plan = StepPlan(tuple(_next_step(steps[i], guesses[i]) for i in asked))
            for i, result in zip(asked, self._draft.execute(plan).requests, strict=True):
                if result.token_id is None:
                    raise EngineError(
                        f"the draft model has no guess for request {plan.requests[i].rid}: {result.error}"
                    )
                guesses[i].append(result.token_id)
        return guesses

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Nothing is read before its time: proposals are made step by step, so no two of them overlap."""
        return functools.partial(self.execute, plan)

    def execute(self, plan: StepPlan) -> StepResult:
        """Raises EngineError."""
        result = self.target.execute(plan)
        unseen = [_unseen(step, outcome) for step, outcome in zip(plan.requests, result.requests, strict=True)]
        self._draft.execute(StepPlan(tuple(step for step in unseen if step is not None)))
        return result


def _next_step(step: RequestStep, guesses: list[int]) -> RequestStep:
    """The draft's own step, after so many guesses."""
    spec = step.sample
    assert spec is not None
    output_ids = [*spec.output_ids, *guesses]
    spec = replace(spec, position=spec.position + len(guesses), output_ids=output_ids, return_logprob=False)
    token_ids = guesses[-1:] or step.token_ids
    return RequestStep(step.rid, step.row, token_ids, step.start + len(guesses), spec)


def _unseen(step: RequestStep, outcome: RequestResult) -> RequestStep | None:
    """What the draft has yet to compute of a step; None: nothing that will be needed."""
    num_guesses = len(step.sample.proposals) if step.sample else 0
    if num_guesses == 0:
        return RequestStep(step.rid, step.row, step.token_ids, step.start)
    if outcome.num_accepted < num_guesses:
        return None
    return RequestStep(step.rid, step.row, step.token_ids[-1:], step.start + num_guesses)
