"""From copy lists to the transfer requests of NIXL, for one connection.

`Requests.make` turns a list, or a part of it, into a request. Pieces of one size at multiples of it, which is what
pages are, are picked by index from lists that were prepared once; anything else is described piece by piece.

Lists are prepared for the whole memory of both sides, as "every so many bytes": that costs nothing, whatever its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitserve.disaggregation.copies import Copies
from splitserve.disaggregation.transports.memory import Memory

# Of one request: it keeps the library busy for some 10 to 100 ms, in which nothing can interrupt it.
MAX_BATCH_BYTES = 64 << 20
MAX_BATCH_PIECES = 8192
# Piece sizes for which lists are kept: a pool has a few kinds of components.
MAX_GRIDS = 8
# Blocks are numbered with 32 bits.
MAX_BLOCKS = 1 << 30

_LOCAL = "NIXL_INIT_AGENT"


@dataclass(frozen=True, slots=True)
class _Grid:
    """Prepared lists of both sides' memory in blocks of one size, numbered through all regions."""

    ours: Any
    theirs: Any
    # The number of each region's first block.
    our_firsts: NDArray[np.uint64]
    their_firsts: NDArray[np.uint64]

    def release(self) -> None:
        self.ours.release()
        self.theirs.release()


class Requests:
    """Makes the requests from our memory to one peer's. The agent belongs to the caller."""

    def __init__(self, agent: Any, peer: str, sources: Memory, targets: Memory) -> None:
        self._agent = agent
        self._peer = peer
        self._sources = sources
        self._targets = targets
        self._grids: dict[int, _Grid] = {}

    def make(self, batch: Copies, note: bytes) -> Any:
        """A request to be posted and released. The peer is notified of `note` when all of it has arrived."""
        if grid := self._grid(batch):
            ours = grid.our_firsts[batch["src_region"]] + batch["src_offset"] // batch["length"]
            theirs = grid.their_firsts[batch["dst_region"]] + batch["dst_offset"] // batch["length"]
            return self._agent.make_prepped_xfer(
                "WRITE", grid.ours, ours.astype(np.int32), grid.theirs, theirs.astype(np.int32), note
            )
        ours = self._agent.get_xfer_descs(_descriptors(self._sources.sources(batch), batch), "DRAM")
        theirs = self._agent.get_xfer_descs(_descriptors(self._targets.targets(batch), batch), "DRAM")
        return self._agent.initialize_xfer("WRITE", ours, theirs, self._peer, note)

    def release(self) -> None:
        """Let go of the prepared lists."""
        for grid in self._grids.values():
            grid.release()
        self._grids.clear()

    def _grid(self, batch: Copies) -> _Grid | None:
        """The lists to pick this batch from; None where its pieces are no blocks of one size."""
        lengths = batch["length"]
        block = lengths[0]
        if len(batch) == 1 or (lengths != block).any():
            return None
        if (batch["src_offset"] % block).any() or (batch["dst_offset"] % block).any():
            return None
        size = int(block)
        if max(_num_blocks(memory, size).sum() for memory in (self._sources, self._targets)) > MAX_BLOCKS:
            return None
        if size not in self._grids:
            if len(self._grids) == MAX_GRIDS:
                self._grids.pop(next(iter(self._grids))).release()
            ours, our_firsts = self._prepare(_LOCAL, self._sources, size)
            theirs, their_firsts = self._prepare(self._peer, self._targets, size)
            self._grids[size] = _Grid(ours, theirs, our_firsts, their_firsts)
        return self._grids[size]

    def _prepare(self, agent_name: str, memory: Memory, size: int) -> tuple[Any, NDArray[np.uint64]]:
        counts = _num_blocks(memory, size)
        rows = [(r.address, size, 0, size, n) for r, n in zip(memory.regions, counts, strict=True) if n]
        prepared = self._agent.prep_xfer_dlist(agent_name, np.array(rows, dtype=np.uint64), "DRAM")
        return prepared, np.cumsum(counts) - counts


def _num_blocks(memory: Memory, size: int) -> NDArray[np.uint64]:
    return np.array([region.length // size for region in memory.regions], dtype=np.uint64)


def _descriptors(addresses: NDArray[np.uint64], batch: Copies) -> NDArray[np.uint64]:
    """As the library takes them: address, length, device 0."""
    return np.stack([addresses, batch["length"], np.zeros(len(batch), dtype=np.uint64)], axis=1)
