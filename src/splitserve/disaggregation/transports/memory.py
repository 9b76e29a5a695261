"""The memory that a transport was given, as addresses. The bytes belong to whoever registered them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from splitserve.core.layout import Region
from splitserve.disaggregation.copies import Copies


class Memory:
    """Regions by index, ours or a peer's."""

    def __init__(self, regions: Sequence[Region] = ()) -> None:
        self.regions: tuple[Region, ...] = ()
        self.add(regions)

    def add(self, regions: Sequence[Region]) -> None:
        self.regions = (*self.regions, *regions)
        self._bases = np.array([r.address for r in self.regions], dtype=np.uint64)
        self._lengths = np.array([r.length for r in self.regions], dtype=np.uint64)

    def sources(self, copies: Copies) -> NDArray[np.uint64]:
        """The address of each copy's source, for copies that `check_sources` has passed."""
        addresses: NDArray[np.uint64] = self._bases[copies["src_region"]] + copies["src_offset"]
        return addresses

    def targets(self, copies: Copies) -> NDArray[np.uint64]:
        addresses: NDArray[np.uint64] = self._bases[copies["dst_region"]] + copies["dst_offset"]
        return addresses

    def check_sources(self, copies: Copies) -> None:
        """Raise ValueError unless every source lies inside its region."""
        if error := self._out_of_bounds(copies["src_region"], copies["src_offset"], copies["length"]):
            raise ValueError(f"source of a copy: {error}")

    def target_error(self, copies: Copies) -> str | None:
        """Why not every target lies inside its region; None where all do."""
        return self._out_of_bounds(copies["dst_region"], copies["dst_offset"], copies["length"])

    def _out_of_bounds(
        self, regions: NDArray[np.uint32], offsets: NDArray[np.uint64], lengths: NDArray[np.uint64]
    ) -> str | None:
        # Most tables are short: `any` alone would take as long as the comparison.
        unknown = regions >= len(self.regions)
        if np.count_nonzero(unknown):
            return f"region {int(regions[unknown][0])} is not registered ({len(self.regions)} are)"
        limits, ends = self._lengths[regions], offsets + lengths
        # A sum that has wrapped around is less than either part.
        outside = (ends > limits) | (ends < offsets)
        if not np.count_nonzero(outside):
            return None
        i = int(outside.argmax())
        first, end = int(offsets[i]), int(offsets[i]) + int(lengths[i])
        return f"[{first}, {end}) is out of bounds of region {int(regions[i])} of {int(limits[i])} bytes"


def encode_regions(regions: Sequence[Region]) -> bytes:
    """Regions as a peer on the same protocol version reads them."""
    return msgspec.msgpack.encode([(r.address, r.length) for r in regions])


def decode_regions(data: bytes) -> tuple[Region, ...]:
    """Raises msgspec.DecodeError for anything else."""
    return tuple(Region(a, n) for a, n in msgspec.msgpack.decode(data, type=list[tuple[int, int]]))
