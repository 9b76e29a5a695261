"""Tokens of several groups are gathered before a layer's experts and divided after it. Ranks are threads here."""

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
from splitserve.engine.parallel.ranks import Ranks, group_rank
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
    def __init__(self, rank: ParallelRank, table: Table) -> None:
        self.rank = rank
        self.device = torch.device("cpu")
        self._table = table

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """As `Ranks.gather`."""
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


def meeting_of(index: int, num_groups: int, group_size: int, table: Table, tables: list[Table]) -> Meeting:
    """`tables`: of each group."""
    everyone = ThreadRanks(ParallelRank(tp_rank=index, tp_size=num_groups * group_size), table)
    rank = group_rank(everyone.rank, num_groups)
    return Meeting(cast("Ranks", everyone), cast("Ranks", ThreadRanks(rank, tables[rank.dp_rank])))


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),
    group_size=st.integers(1, 3),
    num_experts=st.integers(12, 15),
    seed=st.integers(0, 99),
)
def test_each_group_gets_the_results_of_all_experts_for_its_own_tokens(
    sizes: list[int], group_size: int, num_experts: int, seed: int
) -> None:
    num_ranks = len(sizes) * group_size
    table, tables = Table(num_ranks), [Table(group_size) for _ in sizes]
    generator = torch.Generator().manual_seed(seed)
    # A group without tokens contributes a row that no rank uses.
    states = [torch.randn(max(size, 1), HIDDEN, generator=generator) for size in sizes]
    experts = [torch.randint(0, num_experts, (len(s), 2), generator=generator) for s in states]
    weights = [torch.rand(len(s), 2, generator=generator) for s in states]

    def run(rank: int) -> torch.Tensor:
        module = Experts(num_experts, even_range(num_experts, rank, num_ranks).start)
        meeting, group = meeting_of(rank, len(sizes), group_size, table, tables), rank // group_size
        meeting.connect(module)
        meeting.begin(sizes)
        out: torch.Tensor = module(states[group], experts[group], weights[group])
        return out

    with ThreadPoolExecutor(num_ranks) as pool:
        outs = list(pool.map(run, range(num_ranks)))
    for rank, out in enumerate(outs):
        group = rank // group_size
        size = sizes[group]
        assert out.shape == states[group].shape
        wanted = states[group] * ((experts[group] + 1) * weights[group]).sum(1, keepdim=True)
        torch.testing.assert_close(out[:size], wanted[:size])
        assert not out[size:].any()
        # All ranks of a group continue with the same bits.
        assert torch.equal(out, outs[group * group_size])


@pytest.mark.parametrize("call", [lambda m: m.begin([3]), lambda m: m.begin([1, 2, 3])])
def test_a_step_of_another_number_of_groups_is_an_error(call: Callable[[Any], None]) -> None:
    with pytest.raises(EngineError, match="this worker has 2"):
        call(meeting_of(0, 2, 2, Table(4), [Table(2), Table(2)]))
