"""A model served together with a small one, the draft model, which proposes its next tokens.

Both compute the same tokens on the same pages, each in layers of its own: computed tokens of a request are computed for
both, and every copy or transfer of a page includes the KV of both.

1. `propose` lets the draft model generate some tokens for each request. It samples them with the request's own
   parameters and variates, so a proposal is wrong only if the distributions of the two models differ at its position.
2. `execute` runs the model's step, proposals included.
3. Then the draft model computes what it has not computed yet: prompts, and the last proposal if all were accepted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from splitserve.core.batch import RequestResult, RequestStep, StepPlan, StepResult
from splitserve.core.errors import EngineError
from splitserve.engine.runner import ModelRunner


class DraftingRunner:
    """Engine over both models. It is also the Proposer of its draft tokens (scheduler/speculation.py)."""

    def __init__(self, target: ModelRunner, draft: ModelRunner) -> None:
        self.target = target
        self._draft = draft

    def propose(self, steps: Sequence[RequestStep], rooms: Sequence[int]) -> list[list[int]]:
        """Return `rooms[i]` proposals that follow steps[i], and store the draft's KV of all but the last."""
        proposals: list[list[int]] = [[] for _ in steps]
        for count in range(max(rooms, default=0)):
            asked = [i for i, room in enumerate(rooms) if room > count]
            plan = StepPlan(tuple(_next_step(steps[i], proposals[i]) for i in asked))
            for i, result in zip(asked, self._draft.execute(plan).requests, strict=True):
                if result.token_id is None:
                    raise EngineError(
                        f"the draft model has no proposal for request {plan.requests[i].rid}: {result.error}"
                    )
                proposals[i].append(result.token_id)
        return proposals

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Return `execute` for this plan, without reading in advance: steps with proposals do not overlap."""
        return functools.partial(self.execute, plan)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step in both models. Raises EngineError."""
        result = self.target.execute(plan)
        unseen = [_unseen(step, outcome) for step, outcome in zip(plan.requests, result.requests, strict=True)]
        self._draft.execute(StepPlan(tuple(step for step in unseen if step is not None)))
        return result


def _next_step(step: RequestStep, proposals: list[int]) -> RequestStep:
    """Return the draft model's own step, after the given proposals."""
    spec = step.sample
    assert spec is not None
    output_ids = [*spec.output_ids, *proposals]
    spec = replace(spec, position=spec.position + len(proposals), output_ids=output_ids, return_logprob=False)
    token_ids = proposals[-1:] or step.token_ids
    return RequestStep(step.rid, step.row, token_ids, step.start + len(proposals), spec)


def _unseen(step: RequestStep, outcome: RequestResult) -> RequestStep | None:
    """Return the part of a step that the draft model must still compute. None: no part will be needed."""
    num_proposals = len(step.sample.proposals) if step.sample else 0
    if num_proposals == 0:
        return RequestStep(step.rid, step.row, step.token_ids, step.start)
    if outcome.num_accepted < num_proposals:
        return None
    return RequestStep(step.rid, step.row, step.token_ids[-1:], step.start + num_proposals)
