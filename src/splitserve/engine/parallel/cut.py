"""The part of a tensor that one rank holds, and the size of each rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Sliceable(Protocol):
    """A tensor, or a tensor in a file that is read only in part."""

    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class WeightShard:
    """Shard of a tensor: the ranges `parts`, in order, of dimension `dim` (negative: from the end)."""

    dim: int
    parts: tuple[range, ...]

    def of(self, whole: Sliceable, num_dims: int) -> torch.Tensor:
        """Return that part of a tensor with `num_dims` dimensions."""
        ahead = (slice(None),) * (num_dims + self.dim)
        pieces = [whole[(*ahead, slice(part.start, part.stop))] for part in self.parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the part of a tensor with shape `whole`."""
        sizes = list(whole)
        sizes[self.dim] = sum(len(part) for part in self.parts)
        return tuple(sizes)

    def of_source(self, number: int, size: int) -> WeightShard:
        """Return the shard of one of several tensors of this `size` that are joined in `dim`."""
        source = range(number * size, (number + 1) * size)
        found = [range(max(p.start, source.start), min(p.stop, source.stop)) for p in self.parts]
        return WeightShard(self.dim, tuple(range(p.start - source.start, p.stop - source.start) for p in found if p))


def even_range(size: int, rank: int, num_ranks: int) -> range:
    """Return the rank's share of `size`, as even as possible."""
    return range(size * rank // num_ranks, size * (rank + 1) // num_ranks)


def even_sizes(size: int, num_ranks: int) -> list[int]:
    """Return the sizes of all ranks' shares."""
    return [len(even_range(size, rank, num_ranks)) for rank in range(num_ranks)]
