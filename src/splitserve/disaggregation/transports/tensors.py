"""How registered memory becomes tensors that a process group carries, and how tensors become memory again.

1. `cut` divides a write into pieces of bounded size. Both ends cut alike, for they cut by the lengths alone.
2. A piece inside one range is a view of registered memory where the group can carry that; any other goes through a
   staging tensor: `gather` before it is sent, `scatter` after it came.
3. Many ranges are moved at once, as rows of one table over the whole of memory (`as_rows`), where their sizes allow.

Knows addresses and lengths that were checked before. The staging tensors belong to whoever asked for them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from splitserve.core.layout import Region
from splitserve.errors import ConfigError

# Large enough to make the per-piece overhead small, small enough to gather the next while this one is sent.
PIECE_BYTES = 4 << 20
# A range of so many bytes is worth pieces of its own, without a copy.
DIRECT_BYTES = 256 << 10
# Moving a row costs about a sixteenth of a call for a range.
MAX_ROWS_PER_RANGE = 16


@dataclass(frozen=True, slots=True)
class Ranges:
    """Where the bytes of one piece lie, in the order in which they travel."""

    addresses: NDArray[np.uint64]
    lengths: NDArray[np.uint64]

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """(address, first byte in the piece, end in the piece) of each range."""
        ends = np.cumsum(self.lengths).tolist()
        return zip(self.addresses.tolist(), [0, *ends[:-1]], ends, strict=True)


def cut(addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> Iterator[Ranges]:
    """The pieces, none empty: of at most PIECE_BYTES inside one long range, or of several short ranges as they are."""
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
class Rows:
    """Ranges as rows of `unit` bytes of a table that begins at address `base`."""

    base: int
    unit: int
    indices: NDArray[np.int64]

    @property
    def num_bytes(self) -> int:
        """Of the table: up to the last row in use. What lies between the rows is never touched."""
        return (int(self.indices.max()) + 1) * self.unit


def as_rows(ranges: Ranges) -> Rows | None:
    """None where the rows would be too small to pay."""
    base = int(ranges.addresses.min())
    offsets = (ranges.addresses - np.uint64(base)).astype(np.int64)
    lengths = ranges.lengths.astype(np.int64)
    unit = int(np.gcd(np.gcd.reduce(lengths), np.gcd.reduce(offsets)))
    counts = lengths // unit
    num_rows = int(counts.sum())
    if num_rows > MAX_ROWS_PER_RANGE * len(lengths):
        return None
    before = np.cumsum(counts) - counts
    return Rows(base, unit, np.repeat(offsets // unit - before, counts) + np.arange(num_rows))


class StagedMemory(Protocol):
    """The registered memory, as one kind of group needs it."""

    def stage(self) -> torch.Tensor:
        """A new staging tensor of PIECE_BYTES."""
        ...

    def view(self, ranges: Ranges) -> torch.Tensor | None:
        """The ranges themselves as a tensor; None where they need a staging tensor."""
        ...

    def gather(self, ranges: Ranges, stage: torch.Tensor) -> torch.Tensor:
        """The part of `stage` that now holds the bytes of `ranges`."""
        ...

    def scatter(self, stage: torch.Tensor, ranges: Ranges) -> None:
        """Back again. When this returns, it is done."""
        ...


class HostMemory:
    """Memory of this process."""

    def stage(self) -> torch.Tensor:
        return torch.empty(PIECE_BYTES, dtype=torch.uint8)

    def view(self, ranges: Ranges) -> torch.Tensor | None:
        if len(ranges.addresses) > 1:
            return None
        return torch.from_numpy(_host_bytes(int(ranges.addresses[0]), ranges.num_bytes))

    def gather(self, ranges: Ranges, stage: torch.Tensor) -> torch.Tensor:
        part = stage[: ranges.num_bytes]
        if rows := as_rows(ranges):
            table = _host_bytes(rows.base, rows.num_bytes).reshape(-1, rows.unit)
            # The indices are in bounds; "clip" spares numpy a copy of the output.
            np.take(table, rows.indices, axis=0, out=part.numpy().reshape(-1, rows.unit), mode="clip")
        else:
            for address, first, end in ranges.spans():
                ctypes.memmove(part.data_ptr() + first, address, end - first)
        return part

    def scatter(self, stage: torch.Tensor, ranges: Ranges) -> None:
        if rows := as_rows(ranges):
            table = _host_bytes(rows.base, rows.num_bytes).reshape(-1, rows.unit)
            table[rows.indices] = stage[: ranges.num_bytes].numpy().reshape(-1, rows.unit)
        else:
            for address, first, end in ranges.spans():
                ctypes.memmove(address, stage.data_ptr() + first, end - first)


class DeviceMemory:
    """Memory of one GPU, beside some of this process (the metadata rows), which is staged on the GPU.

    Everything runs on the calling thread's current stream. Raises ConfigError for memory of another GPU.
    """

    def __init__(self, device: torch.device, regions: Sequence[Region]) -> None:
        self._device = device
        ours = sorted((r.address, r.length) for r in regions if r.length and self._is_ours(r))
        self._starts = np.array([address for address, _ in ours], dtype=np.uint64)
        self._ends = np.array([address + length for address, length in ours], dtype=np.uint64)

    def stage(self) -> torch.Tensor:
        return torch.empty(PIECE_BYTES, dtype=torch.uint8, device=self._device)

    def view(self, ranges: Ranges) -> torch.Tensor | None:
        if len(ranges.addresses) > 1 or not self._on_device(ranges.addresses):
            return None
        return _device_bytes(int(ranges.addresses[0]), ranges.num_bytes)

    def gather(self, ranges: Ranges, stage: torch.Tensor) -> torch.Tensor:
        part = stage[: ranges.num_bytes]
        if self._on_device(ranges.addresses) and (rows := as_rows(ranges)):
            table = _table(_device_bytes(rows.base, rows.num_bytes), rows)
            torch.index_select(table, 0, self._indices(rows), out=_table(part, rows))
        else:
            for address, first, end in ranges.spans():
                part[first:end].copy_(self._bytes(address, end - first))
        return part

    def scatter(self, stage: torch.Tensor, ranges: Ranges) -> None:
        part = stage[: ranges.num_bytes]
        if self._on_device(ranges.addresses) and (rows := as_rows(ranges)):
            table = _table(_device_bytes(rows.base, rows.num_bytes), rows)
            table.index_copy_(0, self._indices(rows), _table(part, rows))
        else:
            for address, first, end in ranges.spans():
                self._bytes(address, end - first).copy_(part[first:end])
        torch.cuda.current_stream(self._device).synchronize()

    def _indices(self, rows: Rows) -> torch.Tensor:
        return torch.from_numpy(rows.indices).to(self._device)

    def _on_device(self, addresses: NDArray[np.uint64]) -> bool:
        """Whether all of them are. False for none at all."""
        if not len(self._starts):
            return False
        last = np.searchsorted(self._starts, addresses, side="right") - 1
        return bool(((last >= 0) & (addresses < self._ends[last])).all())

    def _bytes(self, address: int, length: int) -> torch.Tensor:
        if self._on_device(np.array([address], dtype=np.uint64)):
            return _device_bytes(address, length)
        return torch.from_numpy(_host_bytes(address, length))

    def _is_ours(self, region: Region) -> bool:
        found = device_of(region)
        if found is not None and found != self._device:
            raise ConfigError(f"memory of {found} was registered with a transport on {self._device}: name one device")
        return found is not None


def device_of(region: Region) -> torch.device | None:
    """The GPU on which a region lies; None for memory of this process."""
    try:
        return _device_bytes(region.address, region.length).device
    except RuntimeError:
        # What torch says of a pointer that no GPU knows.
        return None


class _AtAddress:
    """Memory that numpy and torch take by its address. Whoever registered it keeps it valid."""

    def __init__(self, protocol: str, address: int, length: int) -> None:
        description = {"data": (address, False), "shape": (length,), "typestr": "|u1", "version": 3}
        setattr(self, protocol, description)


def _host_bytes(address: int, length: int) -> NDArray[np.uint8]:
    return np.asarray(_AtAddress("__array_interface__", address, length))


def _device_bytes(address: int, length: int) -> torch.Tensor:
    return torch.as_tensor(_AtAddress("__cuda_array_interface__", address, length))


def _table(data: torch.Tensor, rows: Rows) -> torch.Tensor:
    """`data` as the rows' table, in words as wide as fit: indexing costs by the element."""
    width = torch.int64 if rows.unit % 8 == 0 and rows.base % 8 == 0 else torch.uint8
    return data.view(-1, rows.unit).view(width)
