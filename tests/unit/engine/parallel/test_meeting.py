"""Tokens of several ranks come together before a layer's experts and part behind it; ranks are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.core.errors import EngineError
from splitserve.core.parallel import ParallelRank
from splitserve.engine.parallel.dp_attention import Meeting
from splitserve.engine.parallel.ranks import Ranks
from splitserve.engine.parallel.shards import even_range

HIDDEN = 4


class Table:
    """Where threads lay down what they bring and read what all have brought."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=20)
        self._brought: list[torch.Tensor] = [torch.empty(0)] * num_ranks

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._brought[rank] = tensor
        self._barrier.wait()
        found = list(self._brought)
        self._barrier.wait()
        return found


class ThreadRanks:
    def __init__(self, rank: int, num_ranks: int, table: Table) -> None:
        self.rank = ParallelRank(tp_rank=rank, tp_size=num_ranks)
        self.device = torch.device("cpu")
        self._table = table

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._table.exchange(self.rank.tp_rank, rows))

    def sum_share(self, rows: torch.Tensor) -> torch.Tensor:
        total = torch.stack(self._table.exchange(self.rank.tp_rank, rows)).sum(0)
        return total.chunk(self.rank.tp_size)[self.rank.tp_rank]


class Experts(torch.nn.Module):
    """Expert e multiplies by e + 1. Those that are not here have a number that is not."""

    def __init__(self, num_experts: int, first: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.first = first

    def forward(self, states: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert ((experts >= 0) & (experts <= self.num_experts)).all()
        is_here = experts < self.num_experts
        assert (weights[~is_here] == 0).all()
        factors = (experts + self.first + 1) * weights * is_here
        return states * factors.sum(1, keepdim=True)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),
    num_experts=st.integers(4, 9),
    seed=st.integers(0, 99),
)
def test_each_gets_what_all_experts_make_of_its_own_tokens(sizes: list[int], num_experts: int, seed: int) -> None:
    table, generator = Table(len(sizes)), torch.Generator().manual_seed(seed)
    # A rank without tokens contributes a row that no rank uses.
    states = [torch.randn(max(size, 1), HIDDEN, generator=generator) for size in sizes]
    experts = [torch.randint(0, num_experts, (len(s), 2), generator=generator) for s in states]
    weights = [torch.rand(len(s), 2, generator=generator) for s in states]

    def run(rank: int) -> torch.Tensor:
        ranks = cast("Ranks", ThreadRanks(rank, len(sizes), table))
        module = Experts(num_experts, even_range(num_experts, rank, len(sizes)).start)
        meeting = Meeting(ranks)
        meeting.connect(module)
        meeting.begin(sizes)
        out: torch.Tensor = module(states[rank], experts[rank], weights[rank])
        return out

    with ThreadPoolExecutor(len(sizes)) as pool:
        outs = list(pool.map(run, range(len(sizes))))
    for rank, (size, out) in enumerate(zip(sizes, outs, strict=True)):
        assert out.shape == states[rank].shape
        wanted = states[rank] * ((experts[rank] + 1) * weights[rank]).sum(1, keepdim=True)
        torch.testing.assert_close(out[:size], wanted[:size])
        assert not out[size:].any()


@pytest.mark.parametrize("call", [lambda m: m.begin([3]), lambda m: m.begin([1, 2, 3])])
def test_a_step_of_another_number_of_ranks_is_an_error(call: Callable[[Any], None]) -> None:
    with pytest.raises(EngineError, match="ranks are in a step of 2"):
        call(Meeting(cast("Ranks", ThreadRanks(0, 2, Table(2)))))
