"""Which rank is which, and which layers a stage has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.parallel import ParallelRank, stage_layers


def test_a_group_is_numbered_stage_by_stage_and_has_one_driver() -> None:
    rank = ParallelRank(tp_rank=1, tp_size=2, pp_rank=0, pp_size=3, dp_rank=1, dp_size=2)
    group = list(rank.group())
    assert [r.index for r in group] == list(range(rank.group_size)) == list(range(6))
    assert [(r.pp_rank, r.tp_rank) for r in group if r.is_driver] == [(2, 0)]
    assert rank in group
    assert {r.dp_rank for r in group} == {1}


@given(st.integers(1, 100), st.integers(1, 16))
def test_stages_share_the_layers_evenly_in_order(num_layers: int, pp_size: int) -> None:
    if pp_size > num_layers:
        with pytest.raises(ValueError, match=f"{num_layers} layers cannot be divided into {pp_size}"):
            stage_layers(num_layers, pp_size)
        return
    stages = stage_layers(num_layers, pp_size)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert len(sizes) == pp_size
    assert max(sizes) - min(sizes) <= 1
    # The ends get remainders last, because they have more work.
    assert min(sizes[0], sizes[-1]) == min(sizes)


def test_stages_may_be_uneven() -> None:
    assert stage_layers(30, 3, [8, 12, 10]) == [range(8), range(8, 20), range(20, 30)]


@pytest.mark.parametrize("sizes", [[30], [10, 10], [0, 30], [29, 2]])
def test_sizes_that_do_not_fit_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="2 stages must have 30 layers"):
        stage_layers(30, 2, sizes)
