"""Data parallel attention: each group of ranks serves its own requests, and all ranks compute the experts together.

A group is the ranks of one scheduler, in the simplest case one rank. Attention, norms and dense layers run over the
group's own tokens, with its own KV pool: whole on a group of one rank, else cut over its ranks as by tensor
parallelism. So latents, which every tensor parallel rank would hold, are stored once in a group of one. Each rank of
each group has some of each layer's experts.

1. Before a step all ranks receive the number of tokens of each group (`Meeting.begin`). A group without a request takes
   part, too, because other groups' tokens need its experts. It computes one padding token, which other groups never
   receive: it sends no token to the experts and stores nothing.
2. Before a layer's experts, tokens of all groups are sent to all ranks, padded to the most that any group has. The
   ranks of a group have the same tokens, so each sends its part of them.
3. Each rank computes its experts for all of them.
4. The results are summed over the ranks, and each rank receives its part of its group's tokens. The ranks of a group
   join these parts.

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
    from splitserve.engine.loader import LoadedModel
    from splitserve.engine.parallel.steps import JointOrders
    from splitserve.engine.runner import ModelRunner


class Meeting:
    """Exchange of tokens between ranks in one step. `ranks`: all, as one stage. `group`: those of this rank's group."""

    def __init__(self, ranks: Ranks, group: Ranks) -> None:
        self._ranks = ranks
        self.group = group
        # Tokens of each group in this step.
        self._sizes: tuple[int, ...] = ()

    @property
    def num_groups(self) -> int:
        return self.group.rank.dp_size

    @property
    def num_own(self) -> int:
        """Tokens of this rank's group in this step."""
        return self._sizes[self.group.rank.dp_rank]

    def begin(self, num_tokens: Sequence[int]) -> None:
        """Set the number of tokens of each group in the next run of the model."""
        if len(num_tokens) != self.num_groups:
            raise EngineError(f"a step has tokens of {len(num_tokens)} groups, but this worker has {self.num_groups}")
        self._sizes = tuple(num_tokens)

    @property
    def _num_part(self) -> int:
        """Rows that each rank sends: the tokens of the largest group over the ranks of a group, rounded up."""
        return -(-max(self._sizes) // self.group.rank.tp_size)

    def of_all(self, own: torch.Tensor) -> torch.Tensor:
        """Return the rows of all groups, each padded with zeros to the same number. own: [>= own size, n]."""
        first, size = self.group.rank.tp_rank * self._num_part, self.num_own
        part = own.new_zeros(self._num_part, own.shape[1])
        rows = own[:size][first : first + self._num_part]
        part[: len(rows)] = rows
        return self._ranks.gather(part)

    @property
    def is_token(self) -> torch.Tensor:
        """Whether each row of `of_all` is a token's."""
        numbers = torch.arange(self._num_part * self.group.rank.tp_size, device=self._ranks.device)
        return torch.cat([numbers < size for size in self._sizes])

    def sum_of_own(self, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return the sum of all ranks' results for this group's tokens, in `num_rows` rows; others are zero."""
        own = self.group.gather(self._ranks.sum_share(rows))
        found = own.new_zeros(num_rows, own.shape[1])
        found[: self.num_own] = own[: self.num_own]
        return found

    def connect(self, module: Any) -> None:
        """Have `module`, a layer's experts, compute this rank's experts for the tokens of all groups."""
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
    """A runner with steps that all groups compute together, for `LockstepEngine`. On the driver of each group."""

    def __init__(self, runner: ModelRunner, model: Any, meeting: Meeting, orders: JointOrders | None = None) -> None:
        """`orders`: the orders of `runner` to the followers of this group. None: the group has one rank."""
        self._runner = runner
        self._model = model
        self._meeting = meeting
        self._orders = orders

    def use(self, loaded: LoadedModel) -> None:
        """Compute later steps with `loaded`, as the runner does."""
        assert loaded.share is not None
        assert loaded.share.meeting is not None
        self._model, self._meeting = loaded.model, loaded.share.meeting

    def prepare(self, plan: StepPlan) -> Callable[[tuple[int, ...]], StepResult]:
        """Read the page table and return a function that runs the step, given the number of tokens of each group.

        Every driver calls its own, with the same numbers. Both raise EngineError, which fails only the plan's requests.
        The function raises RanksLostError if the ranks are out of step.
        """
        # The loop runs one step after the other, so no token is still to be sampled.
        run = self._runner.begin(plan) if plan.requests else self._take_part
        return functools.partial(self._step, run)

    def _step(self, run: Callable[[], StepResult], num_tokens: tuple[int, ...]) -> StepResult:
        try:
            self._meeting.begin(num_tokens)
            if self._orders is not None:
                self._orders.release(num_tokens)
        except EngineError as error:
            raise RanksLostError(error.message) from error
        return run()

    def _take_part(self) -> StepResult:
        try:
            with torch.inference_mode():
                take_part(self._model)
        except Exception as error:
            raise RanksLostError(
                f"A step of other ranks failed on this one: {type(error).__name__}: {error}"
            ) from error
        return StepResult()


def take_part(model: Any) -> None:
    """Run a step in which this rank's group has no tokens."""
    nothing = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    # A padding token belongs to no request: it stores nothing and reads nothing.
    run_body(model, nothing, nothing, Recorder())
