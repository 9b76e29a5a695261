"""Which part of a tensor one rank holds, and how much of what each rank gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Sliceable(Protocol):
    """A tensor, or one in a file of which only what is asked for is read."""

    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Cut:
    """Of dimension `dim` (negative: from the end) the ranges `parts`, one after the other; of the others all."""

    dim: int
    parts: tuple[range, ...]

    def of(self, whole: Sliceable, num_dims: int) -> torch.Tensor:
        """That part of a tensor of so many dimensions."""
        ahead = (slice(None),) * (num_dims + self.dim)
        pieces = [whole[(*ahead, slice(part.start, part.stop))] for part in self.parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Its shape, where the tensor's is `whole`."""
        sizes = list(whole)
        sizes[self.dim] = sum(len(part) for part in self.parts)
        return tuple(sizes)

    def of_source(self, number: int, size: int) -> Cut:
        """The same of one of several tensors of this `size` that lie one after the other in `dim`."""
        source = range(number * size, (number + 1) * size)
        found = [range(max(p.start, source.start), min(p.stop, source.stop)) for p in self.parts]
        return Cut(self.dim, tuple(range(p.start - source.start, p.stop - source.start) for p in found if p))


def even_range(size: int, rank: int, num_ranks: int) -> range:
    """Rank's share of `size`, as even as can be."""
    return range(size * rank // num_ranks, size * (rank + 1) // num_ranks)


def even_sizes(size: int, num_ranks: int) -> list[int]:
    """Of all ranks' shares."""
    return [len(even_range(size, rank, num_ranks)) for rank in range(num_ranks)]
