"""The host ("node") of each rank of a worker. Every node computes it by itself, from the sizes.

Ranks are distributed in blocks, in the order of `ParallelRank.index`: whole pipeline stages to a node if there are
enough, so that the ranks that exchange data in every layer are on one host; else an even part of one stage. Node 0,
which has the front end, gets the driver's block; the other blocks follow in order, around the end, so that neighbours
in the pipeline are on neighbouring nodes.
"""

from __future__ import annotations

from splitserve.core.parallel import ParallelRank


def misfit(tp_size: int, pp_size: int, num_nodes: int) -> str | None:
    """Return why ranks of these sizes cannot be distributed to `num_nodes` nodes. None: they can."""
    num_ranks = tp_size * pp_size
    if _fits(tp_size, pp_size, num_nodes):
        return None
    fitting = [str(n) for n in range(1, num_ranks + 1) if _fits(tp_size, pp_size, n)]
    return (
        f"a node has whole pipeline stages, or an even part of one: {num_ranks} ranks (tp {tp_size}, pp {pp_size}) "
        f"cannot be dealt out to {num_nodes} nodes, but to {' or '.join(fitting)}"
    )


def _fits(tp_size: int, pp_size: int, num_nodes: int) -> bool:
    each, rest = divmod(tp_size * pp_size, num_nodes)
    return each > 0 and rest == 0 and (each % tp_size == 0 or tp_size % each == 0)


def node_of(rank: ParallelRank, num_nodes: int) -> int:
    each = rank.group_size // num_nodes
    drivers_block = (rank.pp_size - 1) * rank.tp_size // each
    return (rank.index // each - drivers_block) % num_nodes


def place_on_node(rank: ParallelRank, num_nodes: int) -> int:
    """Return the index of this rank among the ranks of its worker on its node."""
    each = rank.group_size // num_nodes
    return rank.dp_rank * each + rank.index % each
