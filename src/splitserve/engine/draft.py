"""A model served together with a small one, the draft model, which proposes its next tokens.

Both compute the same tokens on the same pages, each in layers of its own: computed tokens of a request are computed for
both, and every copy or transfer of a page includes the KV of both.

1. `propose` lets the draft model generate some tokens for each request. It samples them with the request's own
   parameters and variates, so a proposal is wrong only if the distributions of the two models differ at its position.
2. `execute` runs the model's step, proposals included.
3. Then the draft model computes what it has not computed yet: prompts, and the last proposal if all were accepted.

If the served model is sharded over ranks, this runs on the driver. `draft_model.py` defines which ranks have the draft
model. All sampled tokens are the driver's, so ranks that share it need not agree on them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from splitserve.core.batch import RequestResult, RequestStep, StepPlan, StepResult
from splitserve.core.errors import EngineError
from splitserve.engine.runner import ModelRunner

# Prepares a step that needs the number of tokens of each rank to run (`engine/parallel/dp_attention.py`).
PrepareJointly = Callable[[StepPlan], Callable[[tuple[int, ...]], StepResult]]


class ProposingRunner:
    """Engine over a model and what proposes its next tokens. It is also the Proposer (scheduler/speculation.py)."""

    def __init__(self, target: ModelRunner) -> None:
        self.target = target

    def propose(self, steps: Sequence[RequestStep], rooms: Sequence[int]) -> list[list[int]]:
        """Return at most `rooms[i]` proposals that follow steps[i]. Raises EngineError."""
        raise NotImplementedError

    def prepare(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Return `execute` for this plan, without reading in advance: steps with proposals do not overlap."""
        return functools.partial(self.execute, plan)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step in the model, and then the proposer's part. Raises EngineError."""
        return self._catch_up(plan, self.target.execute(plan))

    def after(self, prepare: PrepareJointly) -> PrepareJointly:
        """Return `prepare` with the proposer's part after each step.

        `prepare` is for steps that the ranks of data parallel attention compute together. The proposer exchanges
        nothing with other ranks: it computes this rank's requests alone.
        """

        def prepare_both(plan: StepPlan) -> Callable[[tuple[int, ...]], StepResult]:
            run = prepare(plan)
            return lambda num_tokens: self._catch_up(plan, run(num_tokens))

        return prepare_both

    def _catch_up(self, plan: StepPlan, result: StepResult) -> StepResult:
        """Run the proposer's part of a step that the served model has computed. Return the result with its own."""
        raise NotImplementedError


class DraftingRunner(ProposingRunner):
    """Engine over a model and its draft model."""

    def __init__(self, target: ModelRunner, draft: ModelRunner) -> None:
        super().__init__(target)
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

    def _catch_up(self, plan: StepPlan, result: StepResult) -> StepResult:
        unseen = [_unseen(step, outcome) for step, outcome in zip(plan.requests, result.requests, strict=True)]
        self._draft.execute(StepPlan(tuple(step for step in unseen if step is not None)))
        return result


class PipelinedDraftingRunner(DraftingRunner):
    """DraftingRunner of a model with pipeline stages. The draft model is whole in this process.

    The scheduler's thread proposes for some requests while the engine's thread runs steps of others.
    """

    def __init__(self, target: ModelRunner, draft: ModelRunner) -> None:
        super().__init__(target, draft)
        # One thread at a time uses the draft model.
        self._lock = threading.Lock()

    def propose(self, steps: Sequence[RequestStep], rooms: Sequence[int]) -> list[list[int]]:
        with self._lock:
            return super().propose(steps, rooms)

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step in the served model's stages (`PipelinedEngine`). The draft model's part follows the last stage.

        It is prepared now, because the rows of the page table may change before it runs. So it is not known yet which
        proposals are accepted, and the last one of each request is computed in any case.
        """
        catch_up = self._draft.prepare(StepPlan(tuple(_rest_of(step) for step in plan.requests)))
        run = self.target.begin(plan)

        def compute() -> StepResult:
            result = run()
            with self._lock:
                catch_up()
            return result

        return compute


def _next_step(step: RequestStep, proposals: list[int]) -> RequestStep:
    """Return the draft model's own step, after the given proposals."""
    spec = step.sample
    assert spec is not None
    output_ids = [*spec.output_ids, *proposals]
    spec = replace(
        spec,
        position=spec.position + len(proposals),
        output_ids=output_ids,
        return_logprob=False,
        return_hidden_state=False,
    )
    token_ids = proposals[-1:] or step.token_ids
    return RequestStep(step.rid, step.row, token_ids, step.start + len(proposals), spec)


def _unseen(step: RequestStep, outcome: RequestResult) -> RequestStep | None:
    """Return the part of a step that the draft model must still compute. None: no part will be needed."""
    num_proposals = len(step.sample.proposals) if step.sample else 0
    return None if outcome.num_accepted < num_proposals else _rest_of(step)


def _rest_of(step: RequestStep) -> RequestStep:
    """Return the part of a step that the draft model did not compute when it proposed."""
    num_proposals = len(step.sample.proposals) if step.sample else 0
    if num_proposals == 0:
        return RequestStep(step.rid, step.row, step.token_ids, step.start)
    return RequestStep(step.rid, step.row, step.token_ids[-1:], step.start + num_proposals)
