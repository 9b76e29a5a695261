from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from splitserve.core.parallel import ParallelRank, misfit, node_of, place_on_node

SIZES = st.integers(1, 8)


@given(tp_size=SIZES, pp_size=SIZES, num_nodes=st.integers(1, 16), dp_size=st.integers(1, 3))
def test_ranks_are_dealt_out_evenly_and_the_driver_is_on_node_0(tp_size, pp_size, num_nodes, dp_size):
    assume(misfit(tp_size, pp_size, num_nodes) is None)
    ones = [ParallelRank(tp_size=tp_size, pp_size=pp_size, dp_rank=i, dp_size=dp_size) for i in range(dp_size)]
    ranks = [rank for one in ones for rank in one.group()]
    nodes = Counter(node_of(rank, num_nodes) for rank in ranks)
    assert nodes == dict.fromkeys(range(num_nodes), len(ranks) // num_nodes)
    assert all(node_of(rank, num_nodes) == 0 for rank in ranks if rank.is_driver)
    # Each has a place of its own among those of its node.
    places = {(node_of(rank, num_nodes), place_on_node(rank, num_nodes)) for rank in ranks}
    assert len(places) == len(ranks)
    assert max(place for _, place in places) == len(ranks) // num_nodes - 1


@given(tp_size=SIZES, pp_size=SIZES, num_nodes=st.integers(1, 8))
def test_a_stage_is_on_one_node_where_there_are_stages_enough(tp_size, pp_size, num_nodes):
    assume(pp_size % num_nodes == 0)
    assert misfit(tp_size, pp_size, num_nodes) is None
    for stage in range(pp_size):
        ranks = [ParallelRank(tp_size=tp_size, pp_size=pp_size, pp_rank=stage, tp_rank=i) for i in range(tp_size)]
        assert len({node_of(rank, num_nodes) for rank in ranks}) == 1


def test_the_stages_go_around_the_nodes_in_their_order():
    assert [node_of(rank, 3) for rank in ParallelRank(pp_size=3).group()] == [1, 2, 0]
    assert [node_of(rank, 2) for rank in ParallelRank(pp_size=4, tp_size=2).group()] == [1] * 4 + [0] * 4
    # Fewer stages than nodes: a stage's ranks are on several.
    assert [node_of(rank, 4) for rank in ParallelRank(pp_size=2, tp_size=2).group()] == [2, 3, 0, 1]
    assert [node_of(rank, 1) for rank in ParallelRank(pp_size=2, tp_size=2).group()] == [0] * 4


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "num_nodes", "fitting"),
    [
        (2, 3, 2, "1 or 3 or 6"),
        (3, 1, 2, "1 or 3"),
        (2, 1, 4, "1 or 2"),
        (1, 1, 2, "1"),
        (4, 3, 2, "1 or 3 or 6 or 12"),
    ],
)
def test_what_does_not_divide_is_refused_with_what_does(tp_size, pp_size, num_nodes, fitting):
    problem = misfit(tp_size, pp_size, num_nodes)
    assert problem is not None
    assert problem.startswith(f"{tp_size * pp_size} ranks")
    assert problem.endswith(f"cannot be distributed to {num_nodes} nodes, but to {fitting}")
