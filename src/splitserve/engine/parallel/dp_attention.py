"""Data parallel attention: each rank serves its own requests, and all compute the experts of every layer together.

Attention, norms and dense layers are whole on each rank and run over its own tokens, with its own KV pool. So latents,
which every tensor parallel rank would hold, are stored once. A rank has some of each layer's experts.

1. Before a step all ranks receive the number of tokens of each rank (`Meeting.begin`). A rank without a request takes
   part, too, because other ranks' tokens need its experts. It computes one padding token, which other ranks never
   receive: it sends no token to the experts and stores nothing.
2. Before a layer's experts, tokens of all ranks are sent to all, padded to the most that any rank has.
3. Each rank computes its experts for all of them.
4. The results are summed over the ranks, and each rank receives the part of its own tokens.

A rank that fails in a step leaves the others waiting in a layer: the runner of the steps must break the group then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from splitserve.core.batch import StepPlan, StepResult
from splitserve.core.errors import EngineError, RanksLostError
from splitserve.engine.parallel.ranks import Ranks
from splitserve.engine.parallel.shards import own_experts, use_own
from splitserve.engine.probe import Recorder, run_body

if TYPE_CHECKING:
    from splitserve.engine.runner import ModelRunner


class Meeting:
    """The exchange between the ranks in one step. `ranks`: one stage, in which each rank serves its own requests."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # Tokens of each rank in this step.
        self._sizes: tuple[int, ...] = ()

    def begin(self, num_tokens: Sequence[int]) -> None:
        """Set the number of tokens of each rank in the next run of the model, by rank."""
        if len(num_tokens) != self._ranks.rank.tp_size:
            raise EngineError(f"{len(num_tokens)} ranks are in a step of {self._ranks.rank.tp_size}")
        self._sizes = tuple(num_tokens)

    def of_all(self, own: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks, padded with zeros to the largest number of rows. own: [>= own size, n]."""
        most, size = max(self._sizes), self._sizes[self._ranks.rank.tp_rank]
        padded = own.new_zeros(most, own.shape[1])
        padded[:size] = own[:size]
        return self._ranks.gather(padded)

    @property
    def is_token(self) -> torch.Tensor:
        """Whether each row of `of_all` is a token's."""
        most = max(self._sizes)
        return torch.cat([torch.arange(most, device=self._ranks.device) < size for size in self._sizes])

    def sum_of_own(self, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return the sum of all ranks' results for this rank's tokens, in `num_rows` rows; others are zero."""
        own = self._ranks.sum_share(rows)
        size = self._sizes[self._ranks.rank.tp_rank]
        found = own.new_zeros(num_rows, own.shape[1])
        found[:size] = own[:size]
        return found

    def connect(self, module: Any) -> None:
        """Have `module`, a layer's experts, compute this rank's experts for the tokens of all ranks."""
        held = own_experts(module, self._ranks.rank.tp_rank, self._ranks.rank.tp_size)
        num_own = 0

        def before(_module: Any, args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            nonlocal num_own
            if len(args) != 3:
                raise EngineError(f"{type(module).__name__} is not called with states, experts and weights")
            states, experts, weights = args
            num_own, num_chosen = experts.shape
            # Numbers of experts are exact in any float dtype.
            choices = self.of_all(torch.cat((experts.float(), weights.float()), dim=1))
            chosen = choices[:, :num_chosen].long().masked_fill(~self.is_token[:, None], -1)
            return use_own(held, self.of_all(states), chosen, choices[:, num_chosen:].to(weights.dtype))

        module.register_forward_pre_hook(before)
        module.register_forward_hook(lambda _module, _args, out: self.sum_of_own(out, num_own))


class SharedRunner:
    """A runner with steps that all ranks compute together, for `LockstepEngine`."""

    def __init__(self, runner: ModelRunner, model: Any, meeting: Meeting) -> None:
        self._runner = runner
        self._model = model
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
                # A padding token belongs to no request: it stores nothing and reads nothing.
                run_body(self._model, nothing, nothing, Recorder())
        except Exception as error:
            raise RanksLostError(
                f"A step of other ranks failed on this one: {type(error).__name__}: {error}"
            ) from error
        return StepResult()
