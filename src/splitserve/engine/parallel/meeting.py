"""Data parallel attention: each rank serves requests of its own, and all meet for the experts of every layer.

Attention, norms and dense layers are whole on each rank and run over its own tokens, with its own KV pool; so latents,
which every tensor parallel rank would hold, are held once. A rank has some of each layer's experts.

1. Before a step all ranks learn how many tokens each of them has (`Meeting.begin`). Who has none takes part all the
   same (`shared.py`), because others' tokens need its experts.
2. Before a layer's experts, tokens of all ranks go to all, padded to the most that any rank has.
3. Each rank computes its experts for all of them.
4. What the ranks computed is summed, and each gets the part that is its own tokens'.

A rank that fails in a step leaves the others waiting in a layer: whoever runs the steps has to break the group then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from splitserve.engine.attention.base import AttentionParams
from splitserve.engine.parallel.experts import own_experts, use_own
from splitserve.engine.parallel.ranks import Ranks
from splitserve.errors import EngineError


class Meeting:
    """What the ranks agree on in one step. `ranks`: one stage, of which each serves requests of its own."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # Tokens of each rank in this step.
        self._sizes: tuple[int, ...] = ()

    def begin(self, num_tokens: Sequence[int]) -> None:
        """All ranks run the model next, over so many tokens each, by rank."""
        if len(num_tokens) != self._ranks.rank.tp_size:
            raise EngineError(f"{len(num_tokens)} ranks are in a step of {self._ranks.rank.tp_size}")
        self._sizes = tuple(num_tokens)

    def begin_alike(self, num_tokens: int) -> None:
        """The same where all have as many."""
        self.begin([num_tokens] * self._ranks.rank.tp_size)

    def of_all(self, own: torch.Tensor) -> torch.Tensor:
        """Rows of all ranks, each rank's padded with zeros to as many as the largest has. own [at least own size, n]"""
        most, size = max(self._sizes), self._sizes[self._ranks.rank.tp_rank]
        padded = own.new_zeros(most, own.shape[1])
        padded[:size] = own[:size]
        return self._ranks.gather(padded)

    @property
    def is_token(self) -> torch.Tensor:
        """Of the rows of `of_all`: whether it is a token's."""
        most = max(self._sizes)
        return torch.cat([torch.arange(most, device=self._ranks.device) < size for size in self._sizes])

    def sum_of_own(self, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        """The sum over the ranks of what each has for this rank's tokens, in `num_rows` rows; others are zero."""
        own = self._ranks.sum_share(rows)
        size = self._sizes[self._ranks.rank.tp_rank]
        found = own.new_zeros(num_rows, own.shape[1])
        found[:size] = own[:size]
        return found


def meet(module: Any, meeting: Meeting, ranks: Ranks) -> None:
    """Have `module`, a layer's experts of which this rank has some, compute those for the tokens of all ranks."""
    held = own_experts(module, ranks.rank.tp_rank, ranks.rank.tp_size)
    num_own = 0

    def before(_module: Any, args: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        nonlocal num_own
        if len(args) != 3:
            raise EngineError(f"{type(module).__name__} is not called with states, experts and weights")
        states, experts, weights = args
        num_own, num_chosen = experts.shape
        # Numbers of experts are small enough for any float.
        choices = meeting.of_all(torch.cat((experts.float(), weights.float()), dim=1))
        chosen = choices[:, :num_chosen].long().masked_fill(~meeting.is_token[:, None], -1)
        return use_own(held, meeting.of_all(states), chosen, choices[:, num_chosen:].to(weights.dtype))

    def after(_module: Any, _args: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
        return meeting.sum_of_own(out, num_own)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


class NoAttention:
    """StepAttention of a token that is nobody's: nothing is stored, nothing is read."""

    def forward(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        return query.new_zeros(len(query), query.shape[1], value.shape[2])
