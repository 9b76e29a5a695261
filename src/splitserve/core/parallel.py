"""The part of a worker's model that one rank holds, as data: tensor parallel shards of pipeline stages.

A worker's ranks are numbered stage by stage. One of them, the driver, has the scheduler: tensor parallel rank 0 of the
last stage, because tokens are sampled there. The others are followers: they run the driver's steps over their own shard
and KV pool, and transfer the KV they hold (ADR 16).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

# Maximum number of data parallel ranks of a worker.
MAX_DP_SIZE = 1024


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
