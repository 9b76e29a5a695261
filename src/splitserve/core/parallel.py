"""The ranks of a worker, as data: tensor parallel shards of pipeline stages, and the hosts ("nodes") that have them.

A worker's ranks are numbered stage by stage. One of them, the driver, has the scheduler: tensor parallel rank 0 of the
last stage, because tokens are sampled there. The others are followers: they run the driver's steps over their own shard
and KV pool, and transfer the KV they hold (ADR 16).

Every node computes the node of each rank by itself, from the sizes. Ranks are distributed in blocks, in the order of
`ParallelRank.index`: whole pipeline stages to a node if there are enough, so that the ranks that exchange data in every
layer are on one host; else an even part of one stage. Node 0, which has the front end, gets the driver's block; the
other blocks follow in order, around the end, so that neighbours in the pipeline are on neighbouring nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import msgspec

from splitserve.core.errors import OptionError
from splitserve.core.options import Config, option, stage_sizes

# Maximum number of data parallel ranks of a worker.
MAX_DP_SIZE = 1024


class ParallelConfig(Config, frozen=True, kw_only=True):
    """How a model is split over ranks."""

    tp_size: int = option(
        1,
        "Tensor parallel ranks: processes that each hold a shard of every matrix.",
        ge=1,
        aliases="--tp --tensor-parallel-size",
    )
    pp_size: int = option(
        1, "Pipeline stages: processes that each hold some layers.", ge=1, aliases="--pp --pipeline-parallel-size"
    )
    # Empty: as even as possible.
    pp_layers: tuple[int, ...] = option(
        (), "Layers per pipeline stage. Default: as even as possible.", parse=stage_sizes, metavar="N,N,..."
    )
    nnodes: int = option(1, "Number of hosts for the ranks. Run serve on each host with the same options.", ge=1)
    node_rank: int = option(0, "Index of this host. Host 0 serves requests.", ge=0)
    # Empty: there are no other hosts.
    dist_init_addr: str = option(
        "",
        "Address of host 0 with a free port, for the other hosts.",
        kind=str | None,
        metavar="HOST:PORT",
        aliases="--nccl-init-addr",
    )
    # Address at which ranks on other hosts reach the ranks of this one.
    node_host: str = ""

    @property
    def group_size(self) -> int:
        """Ranks that compute one step together."""
        return self.tp_size * self.pp_size


class ParallelRank(msgspec.Struct, frozen=True, kw_only=True):
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1

    @property
    def group_size(self) -> int:
        """Ranks that compute one step together: those of one scheduler."""
        return self.tp_size * self.pp_size

    @property
    def index(self) -> int:
        """Index of this rank among the ranks of `group`."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def name(self) -> str:
        """Its position in the group, for logs and errors."""
        return f"tp {self.tp_rank} of {self.tp_size}, pp {self.pp_rank} of {self.pp_size}"

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def is_driver(self) -> bool:
        """Whether it has the scheduler, samples the tokens, and writes and reads metadata rows."""
        return self.is_last_stage and self.tp_rank == 0

    def group(self) -> Iterator[ParallelRank]:
        """Return all ranks that compute with this one, itself included, in the order of `index`."""
        for pp_rank in range(self.pp_size):
            for tp_rank in range(self.tp_size):
                yield msgspec.structs.replace(self, tp_rank=tp_rank, pp_rank=pp_rank)


def stage_layers(num_layers: int, pp_size: int, sizes: Sequence[int] = ()) -> list[range]:
    """Return the layers of each pipeline stage: `sizes` of them if given, else as even as possible.

    A remainder goes to the middle stages first: the first stage embeds and the last one has the head. Raises ValueError
    if a stage would be empty or `sizes` do not add up.
    """
    if sizes:
        if len(sizes) != pp_size or sum(sizes) != num_layers or min(sizes) < 1:
            raise ValueError(
                f"layers {list(sizes)} of the pipeline stages do not fit: {pp_size} stages must have {num_layers} "
                "layers together, each at least one"
            )
    elif pp_size > num_layers:
        raise ValueError(f"{num_layers} layers cannot be divided into {pp_size} pipeline stages: {num_layers} at most")
    else:
        least, rest = divmod(num_layers, pp_size)
        from_the_middle = sorted(range(pp_size), key=lambda stage: abs(2 * stage - pp_size + 1))
        sizes = [least + (stage in from_the_middle[:rest]) for stage in range(pp_size)]
    stops = [sum(sizes[: stage + 1]) for stage in range(pp_size)]
    return [range(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


def misfit(tp_size: int, pp_size: int, num_nodes: int) -> str | None:
    """Return why ranks of these sizes cannot be distributed to `num_nodes` nodes. None: they can."""
    num_ranks = tp_size * pp_size
    if _fits(tp_size, pp_size, num_nodes):
        return None
    fitting = [str(n) for n in range(1, num_ranks + 1) if _fits(tp_size, pp_size, n)]
    return (
        f"{num_ranks} ranks (tp {tp_size}, pp {pp_size}) "
        f"cannot be distributed to {num_nodes} nodes, but to {' or '.join(fitting)}"
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


@dataclass(frozen=True, slots=True)
class WorkerShape:
    # Ranks that share each matrix, stages that share the layers, and schedulers that have a model each.
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1

    @classmethod
    def of(cls, role: str, tp_size: int, pp_size: int, dp_size: int) -> Self:
        """Return the shape given by options `--ROLE-tp-size` and so on. Raises ConfigError."""
        for name, size in (("tp", tp_size), ("pp", pp_size), ("dp", dp_size)):
            if size < 1:
                raise OptionError(f"--{role}-{name}-size", f"{size}: it must be at least 1")
        return cls(tp_size, pp_size, dp_size)

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute."""
        return self.tp_size * self.pp_size * self.dp_size

    @property
    def args(self) -> list[str]:
        """Options of `splitserve serve` for this shape."""
        sizes = {"--tp-size": self.tp_size, "--pp-size": self.pp_size, "--dp-size": self.dp_size}
        return [word for name, size in sizes.items() for word in (name, str(size))]

    def __str__(self) -> str:
        return f"tp {self.tp_size} x pp {self.pp_size} x dp {self.dp_size}"
