"""A served model with a draft head (`head.py`), which proposes its next tokens.

The head's KV is in a further layer of the same pages, so every copy or transfer of a page includes it.

1. `execute` runs the model's step and captures the hidden states that the head reads.
2. The head then computes the slots of the same positions: each from the hidden states of its token and the embedding of
   the token that follows. That token is in the step, was just sampled, or is the next of the prompt.
3. The head's state behind the sampled token is returned with the result. It belongs to the request: the scheduler keeps
   it, sends it to a decode worker in the metadata row, and passes it to `propose`.
4. `propose` samples from that state, with the request's own parameters and variates, and continues from the head's own
   states. The slots it stores are computed again by the next `execute`.

If several ranks compute the model, this runs on the driver, which has the whole head. In a pipeline `begin` replaces
`execute`: the scheduler's thread proposes for some requests while the engine's thread runs steps of others.

So the engine has no state of requests. A request without a head's state gets no proposals. The last slot of a cached
prefix was computed with the token that followed in an earlier request. This can make a proposal wrong, but not an
output.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from msgspec.structs import replace

from splitserve.core.batch import DraftState, RequestResult, RequestStep, SampleSpec, StepPlan, StepResult
from splitserve.core.errors import EngineError
from splitserve.engine.attention.base import AttentionBackend
from splitserve.engine.draft import ProposingRunner
from splitserve.engine.heads.head import DraftHead
from splitserve.engine.inputs import PageTable, build_inputs, to_device, wait_for
from splitserve.engine.loader import LoadedModel
from splitserve.engine.runner import ModelRunner
from splitserve.engine.sampler import NO_TOKEN, sample_tokens
from splitserve.engine.whole_model import CONSTRUCTION


class HeadDraftingRunner(ProposingRunner):
    """Engine over a model and its draft head."""

    def __init__(
        self,
        target: ModelRunner,
        model: LoadedModel,
        head: LoadedModel,
        attention: AttentionBackend,
        page_size: int,
        page_table: PageTable,
    ) -> None:
        """`model` is that of `target`; `attention` is the head's."""
        super().__init__(target)
        target.computes_all_outputs = True
        self._attention = attention
        self._page_size = page_size
        self._page_table = page_table
        self._computing = contextlib.nullcontext if head.kernels is None else head.kernels.computing
        # One thread at a time uses the head.
        self._lock = threading.Lock()
        self.use(model, head)

    def use(self, model: LoadedModel, head: LoadedModel) -> None:
        """Compute later steps with another model and its head. Without a model in them, no step may run."""
        self._model = model
        self._head: DraftHead = head.model
        of_stage = model.share.stage.tap if model.share else None
        self._tap = None if model.model is None else of_stage or self._head.tap(model.model)

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step in the served model's stages (`PipelinedEngine`). The head's part follows the last stage.

        Its pages are read now, because the rows of the page table may change before it runs.
        """
        if not plan.requests:
            return StepResult
        num_pages = max(-(-step.end // self._page_size) for step in plan.requests)
        table = self._page_table[[step.row for step in plan.requests], :num_pages]
        own = StepPlan(tuple(replace(step, row=row) for row, step in enumerate(plan.requests)))
        run = self.target.begin(plan)
        return lambda: self._catch_up(own, run(), table)

    def _catch_up(self, plan: StepPlan, result: StepResult, page_table: PageTable | None = None) -> StepResult:
        """`page_table`: pages of the plan's rows. None: the scheduler's table."""
        if not plan.requests:
            return result
        table = self._page_table if page_table is None else page_table
        assert self._tap is not None
        try:
            with self._lock, torch.inference_mode(), CONSTRUCTION, self._computing():
                return self._follow(plan, result, self._tap.take(), table)
        except Exception as error:
            raise EngineError(f"The draft head failed in a step: {type(error).__name__}: {error}") from error

    def propose(self, steps: Sequence[RequestStep], rooms: Sequence[int]) -> list[list[int]]:
        """Return up to `rooms[i]` proposals that follow steps[i]. Raises EngineError."""
        proposals: list[list[int]] = [[] for _ in steps]
        active = [i for i, step in enumerate(steps) if rooms[i] > 0 and step.draft_state is not None]
        if not active:
            return proposals
        try:
            with self._lock, torch.inference_mode(), CONSTRUCTION, self._computing():
                self._chain(steps, rooms, active, proposals)
        except Exception as error:
            raise EngineError(f"the draft head failed to propose tokens: {type(error).__name__}: {error}") from error
        return proposals

    def _chain(
        self, steps: Sequence[RequestStep], rooms: Sequence[int], active: list[int], proposals: list[list[int]]
    ) -> None:
        """Extend the proposals of the requests `active`, one token at a time."""
        states = self._on_device([steps[i].draft_state for i in active])
        while True:
            specs = [_spec_after(steps[i], proposals[i]) for i in active]
            tokens = sample_tokens(self._head.logits(states), specs, self._model.eos_token_ids)
            rows = [row for row, token in enumerate(tokens) if token != NO_TOKEN]
            for row in rows:
                proposals[active[row]].append(tokens[row])
            rows = [row for row in rows if len(proposals[active[row]]) < rooms[active[row]]]
            if not rows:
                return
            active, states = [active[row] for row in rows], states[to_device(np.array(rows), states.device)]
            slots = [_slot_after(steps[i], proposals[i]) for i in active]
            states = self._run(slots, states, self._page_table)

    def _follow(self, plan: StepPlan, result: StepResult, hidden: torch.Tensor, page_table: PageTable) -> StepResult:
        """Compute the head's slots of a step. hidden [T, width]: states of all tokens of the step."""
        slots: list[RequestStep] = []
        rows: list[int] = []
        # Number of the result, and index of its last slot among all slots.
        sampled: list[tuple[int, int]] = []
        first = 0
        for i, (step, outcome) in enumerate(zip(plan.requests, result.requests, strict=True)):
            followers = _followers(step, outcome)
            if followers:
                slots.append(RequestStep(step.rid, step.row, followers, step.start))
                rows += range(first, first + len(followers))
            if followers and outcome.token_id is not None:
                sampled.append((i, len(rows) - 1))
            first += len(step.token_ids)
        if not slots:
            return result
        states = self._run(slots, self._head.fuse(hidden[to_device(np.array(rows), hidden.device)]), page_table)
        if not sampled:
            # A transport may read the KV now.
            wait_for(states.device)
            return result
        last = to_device(np.array([row for _, row in sampled]), states.device)
        found = list(result.requests)
        for (i, _), state in zip(sampled, states[last].float().cpu().numpy(), strict=True):
            found[i] = replace(found[i], draft_state=state.tobytes())
        return StepResult(tuple(found))

    def _run(self, slots: Sequence[RequestStep], states: torch.Tensor, page_table: PageTable) -> torch.Tensor:
        model = self._model
        inputs = build_inputs(StepPlan(tuple(slots)), page_table, self._page_size, model.vocab_size, model.device)
        attention = self._attention.plan(inputs.batch)
        return self._head.step(inputs.token_ids[0], states, inputs.positions[0], attention)

    def _on_device(self, states: Sequence[DraftState | None]) -> torch.Tensor:
        numbers = np.stack([np.frombuffer(state or b"", np.float32) for state in states])
        return to_device(numbers, self._model.device).to(self._model.dtype)


def _spec_after(step: RequestStep, proposals: Sequence[int]) -> SampleSpec:
    """Return how to sample the token after the step's and these proposals."""
    spec = step.sample
    assert spec is not None
    return replace(
        spec,
        position=spec.position + len(proposals),
        output_ids=[*spec.output_ids, *proposals],
        return_logprob=False,
        return_hidden_state=False,
    )


def _slot_after(step: RequestStep, proposals: Sequence[int]) -> RequestStep:
    """Return the slot that reads the last of these proposals."""
    return RequestStep(step.rid, step.row, proposals[-1:], step.start + len(proposals) - 1)


def _followers(step: RequestStep, outcome: RequestResult) -> list[int]:
    """Return the tokens that follow those of the step, as far as they are known. Rejected proposals do not count."""
    if outcome.error:
        return []
    if step.sample is None:
        return [*step.token_ids[1:], *([] if step.following is None else [step.following])]
    num_rejected = len(step.sample.proposals) - outcome.num_accepted
    valid = step.token_ids[1 : len(step.token_ids) - num_rejected]
    return [*valid, *([] if outcome.token_id is None else [outcome.token_id])]
