"""Registered memory of a transport, as addresses. The caller that registered it owns the bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from splitserve._native.library import Int64Array
from splitserve._native.moves import copy_few
from splitserve._native.tables import bytes_inside
from splitserve.core.layout import Region
from splitserve.transfer.copies import Copies
from splitserve.transfer.transports.base import WriteRefused


class Memory:
    """Memory regions by index, ours or a peer's."""

    def __init__(self, regions: Sequence[Region] = ()) -> None:
        self.regions: tuple[Region, ...] = ()
        self.add(regions)

    def add(self, regions: Sequence[Region]) -> None:
        self.regions = (*self.regions, *regions)
        self.bases = Int64Array(r.address for r in self.regions)
        self._lengths = Int64Array(r.length for r in self.regions)

    def sources(self, copies: Copies) -> NDArray[np.uint64]:
        """Return the source address of each copy. `check_sources` must have accepted the copies."""
        addresses: NDArray[np.uint64] = self.bases.array[copies["src_region"]] + copies["src_offset"]
        return addresses

    def targets(self, copies: Copies) -> NDArray[np.uint64]:
        addresses: NDArray[np.uint64] = self.bases.array[copies["dst_region"]] + copies["dst_offset"]
        return addresses

    def check_sources(self, copies: Copies) -> int:
        """Return the total length of the copies. Raises ValueError unless every source lies inside its region."""
        n = bytes_inside(copies, self._lengths, is_target=False)
        if n < 0:
            raise ValueError(f"source of a copy: {self._problem(*copies[['src_region', 'src_offset', 'length']][~n])}")
        return n

    def check_targets(self, copies: Copies) -> int:
        """Return the total length of the copies. Raises WriteRefused unless every target lies inside its region."""
        return self._targets_inside(copies, bytes_inside(copies, self._lengths, is_target=True))

    def take_few(self, copies: Copies, sources: Memory, max_bytes: int) -> int:
        """Do `check_targets`. If the total length is at most `max_bytes`, also perform the copies.

        `sources`: memory of this process with checked copies. This memory must be mapped in the process too.
        """
        n = copy_few(copies, max_bytes, sources.bases, self.bases, self._lengths)
        return self._targets_inside(copies, n)

    def _targets_inside(self, copies: Copies, n: int) -> int:
        if n < 0:
            raise WriteRefused(self._problem(*copies[["dst_region", "dst_offset", "length"]][~n]))
        return n

    def _problem(self, region: int, offset: int, length: int) -> str:
        if region >= len(self.regions):
            return f"region {region} is not registered ({len(self.regions)} are)"
        end = int(offset) + int(length)
        return f"[{offset}, {end}) is out of bounds of region {region} of {self.regions[region].length} bytes"
