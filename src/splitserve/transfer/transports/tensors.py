"""Conversion of registered memory to tensors that a process group sends, and back.

1. `cut` divides a write into pieces of bounded size. Both ends get the same pieces, because only the lengths matter.
2. A piece inside one range is a view of registered memory if the group can send that. Any other piece uses a staging
   tensor: `gather` before it is sent, `scatter` after it is received.
3. On a GPU many ranges move at once, as rows of one table over the whole memory (`as_rows`), if their sizes allow it.

Addresses and lengths must have been checked before. The caller owns the staging tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from splitserve._native.moves import gather_pieces, iovec_table, scatter_pieces
from splitserve.core.layout import Region
from splitserve.transfer.transports.device import CudaDevice, host_bytes

# Large enough to make the per-piece overhead small, small enough to gather the next while this one is sent.
PIECE_BYTES = 4 << 20
# Minimum bytes of a range that is sent in pieces of its own, without a copy. For a quarter of that, it is faster to
# copy several ranges into one piece.
DIRECT_BYTES = 1 << 20
# Maximum rows per range: moving a row costs about a sixteenth of a call for a range.
MAX_ROWS_PER_RANGE = 16


@dataclass(frozen=True, slots=True)
class Ranges:
    """Position of the bytes of one piece, in the order in which they are sent."""

    addresses: NDArray[np.uint64]
    lengths: NDArray[np.uint64]

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Return (address, first byte in the piece, end in the piece) of each range."""
        ends = np.cumsum(self.lengths).tolist()
        return zip(self.addresses.tolist(), [0, *ends[:-1]], ends, strict=True)


def cut(addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> Iterator[Ranges]:
    """Yield non-empty pieces: at most PIECE_BYTES of one long range, or several whole short ranges."""
    addresses, lengths = addresses[lengths > 0], lengths[lengths > 0]
    ends = np.cumsum(lengths)
    first = 0
    for long in [*np.flatnonzero(lengths >= DIRECT_BYTES).tolist(), len(lengths)]:
        while first < long:
            start = int(ends[first] - lengths[first])
            end = min(int(np.searchsorted(ends, start + PIECE_BYTES, side="right")), long)
            yield Ranges(addresses[first:end], lengths[first:end])
            first = end
        if long < len(lengths):
            yield from _slices(int(addresses[long]), int(lengths[long]))
            first = long + 1


def _slices(address: int, length: int) -> Iterator[Ranges]:
    for offset in range(0, length, PIECE_BYTES):
        size = min(PIECE_BYTES, length - offset)
        yield Ranges(np.array([address + offset], dtype=np.uint64), np.array([size], dtype=np.uint64))


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Ranges as rows of `unit` bytes in a table that begins at address `base`."""

    base: int
    unit: int
    indices: NDArray[np.int64]

    @property
    def num_bytes(self) -> int:
        """Bytes of the table up to the last row in use. Bytes between the rows are never accessed."""
        return (int(self.indices.max()) + 1) * self.unit


def as_rows(ranges: Ranges) -> TensorRows | None:
    """Return the ranges as rows. None if the rows would be too small to be faster."""
    base = int(ranges.addresses.min())
    offsets = (ranges.addresses - np.uint64(base)).astype(np.int64)
    lengths = ranges.lengths.astype(np.int64)
    unit = int(np.gcd(np.gcd.reduce(lengths), np.gcd.reduce(offsets)))
    counts = lengths // unit
    num_rows = int(counts.sum())
    if num_rows > MAX_ROWS_PER_RANGE * len(lengths):
        return None
    before = np.cumsum(counts) - counts
    return TensorRows(base, unit, np.repeat(offsets // unit - before, counts) + np.arange(num_rows))


class ProcessMemory:
    """Access to memory of this process."""

    def stage(self) -> torch.Tensor:
        """Allocate a staging tensor of PIECE_BYTES."""
        return torch.empty(PIECE_BYTES, dtype=torch.uint8)

    def view(self, ranges: Ranges) -> torch.Tensor | None:
        """Return the ranges themselves as a tensor. None if they need a staging tensor."""
        if len(ranges.addresses) > 1:
            return None
        return torch.from_numpy(host_bytes(int(ranges.addresses[0]), ranges.num_bytes))

    def gather(self, ranges: Ranges, stage: torch.Tensor) -> torch.Tensor:
        """Copy the bytes of `ranges` into `stage`. Return the part of `stage` that holds them."""
        gather_pieces(iovec_table(ranges.addresses, ranges.lengths), stage.data_ptr())
        return stage[: ranges.num_bytes]

    def scatter(self, stage: torch.Tensor, ranges: Ranges) -> None:
        """Copy the bytes in `stage` back to `ranges`. Complete on return."""
        scatter_pieces(stage.data_ptr(), iovec_table(ranges.addresses, ranges.lengths))


class DeviceMemory:
    """The same for memory of one GPU, and some of this process (the metadata rows), which is staged on the GPU.

    Everything runs on the calling thread's current stream. Raises ConfigError for memory of another GPU.
    """

    def __init__(self, device: CudaDevice, regions: Sequence[Region]) -> None:
        self._device = device
        ours = sorted((r.address, r.length) for r in regions if r.length and device.holds(r))
        self._starts = np.array([address for address, _ in ours], dtype=np.uint64)
        self._ends = np.array([address + length for address, length in ours], dtype=np.uint64)

    def stage(self, num_bytes: int = PIECE_BYTES) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device.torch_device)

    def view(self, ranges: Ranges) -> torch.Tensor | None:
        if len(ranges.addresses) > 1 or not self.on_device(ranges.addresses).all():
            return None
        return self._device.bytes_at(int(ranges.addresses[0]), ranges.num_bytes)

    def gather(self, ranges: Ranges, stage: torch.Tensor) -> torch.Tensor:
        for run, is_ours, part in self._runs(ranges, stage):
            if is_ours and (rows := as_rows(run)):
                table, staged = self._tables(rows, part)
                torch.index_select(table, 0, self._indices(rows), out=staged)
            else:
                for address, first, end in run.spans():
                    part[first:end].copy_(self._bytes(address, end - first, is_ours))
        return stage[: ranges.num_bytes]

    def scatter(self, stage: torch.Tensor, ranges: Ranges) -> None:
        for run, is_ours, part in self._runs(ranges, stage):
            if is_ours and (rows := as_rows(run)):
                table, staged = self._tables(rows, part)
                table.index_copy_(0, self._indices(rows), staged)
            else:
                for address, first, end in run.spans():
                    self._bytes(address, end - first, is_ours).copy_(part[first:end])
        self._device.synchronize()

    def on_device(self, addresses: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which of the addresses are on the GPU."""
        if not len(self._starts):
            return np.zeros(len(addresses), dtype=bool)
        last = np.searchsorted(self._starts, addresses, side="right") - 1
        inside: NDArray[np.bool_] = (last >= 0) & (addresses < self._ends[last])
        return inside

    def _runs(self, ranges: Ranges, stage: torch.Tensor) -> Iterator[tuple[Ranges, bool, torch.Tensor]]:
        """Yield runs of ranges that are all on the GPU or all not: run, whether on the GPU, and its part of `stage`."""
        # Empty ranges have no kind.
        addresses, lengths = ranges.addresses[ranges.lengths > 0], ranges.lengths[ranges.lengths > 0]
        kinds = self.on_device(addresses)
        limits = [*np.flatnonzero(np.diff(kinds, prepend=~kinds[:1])).tolist(), len(kinds)]
        first = 0
        for i, j in pairwise(limits):
            run = Ranges(addresses[i:j], lengths[i:j])
            yield run, bool(kinds[i]), stage[first : first + run.num_bytes]
            first += run.num_bytes

    def _tables(self, rows: TensorRows, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory and a part of a stage as tables of rows, in the widest word to which both are aligned.

        Indexing costs per element.
        """
        is_aligned = rows.unit % 8 == 0 and rows.base % 8 == 0 and part.storage_offset() % 8 == 0
        width = torch.int64 if is_aligned else torch.uint8
        memory = self._device.bytes_at(rows.base, rows.num_bytes)
        return memory.view(-1, rows.unit).view(width), part.view(-1, rows.unit).view(width)

    def _indices(self, rows: TensorRows) -> torch.Tensor:
        return torch.from_numpy(rows.indices).to(self._device.torch_device)

    def _bytes(self, address: int, length: int, is_ours: bool) -> torch.Tensor:
        return self._device.bytes_at(address, length) if is_ours else torch.from_numpy(host_bytes(address, length))
