"""Agents of NIXL that send to one peer, and the transfer requests that they make from copy lists.

`requests_of` divides a list into parts that fit one request. `Lane.post` makes a request from each. Pieces of one size
at multiples of that size, as pages are, are selected by index from lists prepared once. Other pieces are described one
by one.

Lists are prepared for the whole memory of both ends, as blocks of one size. That costs nothing for any memory size.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitserve._native.library import Int64Array
from splitserve._native.tables import blocks_of, in_source_order
from splitserve.transfer.copies import Copies, coalesce, parts_of
from splitserve.transfer.transports.backend import Memory

# Maximum size of one request: it occupies the library for some 10 to 100 ms, without a way to interrupt it.
MAX_BATCH_BYTES = 64 << 20
MAX_BATCH_PIECES = 8192
# Maximum number of piece sizes with prepared lists: a pool has a few kinds of components.
MAX_GRIDS = 8
# Maximum number of blocks: they are numbered with 32 bits.
MAX_BLOCKS = 1 << 30

_LOCAL = "NIXL_INIT_AGENT"


@dataclass(frozen=True, slots=True)
class _Grid:
    """Prepared lists of both ends' memory in blocks of one size, numbered across all regions."""

    ours: Any
    theirs: Any
    # Number of each region's first block.
    our_firsts: Int64Array
    their_firsts: Int64Array

    def release(self) -> None:
        self.ours.release()
        self.theirs.release()


def requests_of(copies: Copies, num_bytes: int, sources: Memory, num_lanes: int) -> list[Copies]:
    """Coalesce the copies, `num_bytes` in all, and divide them into requests, at least one for each lane.

    They are sorted by source: the library copies small pages faster if neighbours at the source are consecutive.
    """
    if num_bytes == 0:
        return []
    ordered = in_source_order(coalesce(copies), num_bytes, sources.bases)
    return parts_of(ordered, min(MAX_BATCH_BYTES, -(-num_bytes // num_lanes)), MAX_BATCH_PIECES)


class Lane:
    """A sending agent with its current transfer. It owns `agent`, which has `sources` registered. One thread at a time.

    `metadata` is that of the peer's agent, which registered `targets`.
    """

    def __init__(self, agent: Any, metadata: bytes, sources: Memory, targets: Memory) -> None:
        self._agent = agent
        self._peer: str = agent.add_remote_agent(metadata)
        self._sources = sources
        self._targets = targets
        # Prepared lists by block size.
        self._grids: dict[int, _Grid] = {}
        self._under_way: Any = None

    def post(self, part: Copies, note: bytes) -> str:
        """Start to transfer a part of `requests_of`. Return the library's state of it."""
        self._under_way = self.make(part, note)
        state: str = self._agent.transfer(self._under_way)
        return state

    def state(self) -> str:
        """Return the state of the posted transfer. Without a thread of the agent, only this call advances it."""
        state: str = self._agent.check_xfer_state(self._under_way)
        return state

    def release(self) -> None:
        """Release the posted transfer, which has ended."""
        request, self._under_way = self._under_way, None
        if request is not None:
            request.release()

    def close(self) -> None:
        """Destroy the agent. On return, our memory is not read any more."""
        # Each call may fail if the peer or the request is broken. The agent is destroyed with all of them.
        for let_go in (self.release, self._release_grids, lambda: self._agent.remove_remote_agent(self._peer)):
            with contextlib.suppress(Exception):
                let_go()
        self._grids.clear()
        self._agent = None

    def make(self, batch: Copies, note: bytes) -> Any:
        """Make a request to be posted and released. The peer receives `note` after all of its bytes.

        The batch has at least one piece, and no empty piece.
        """
        size = int(batch["length"][0])
        grid = self._grid(batch, size) if len(batch) > 1 else None
        if grid is not None:
            our_blocks = blocks_of(batch, size, grid.our_firsts, is_target=False)
            their_blocks = blocks_of(batch, size, grid.their_firsts, is_target=True)
            if our_blocks is not None and their_blocks is not None:
                return self._agent.make_prepped_xfer("WRITE", grid.ours, our_blocks, grid.theirs, their_blocks, note)
        ours = self._agent.get_xfer_descs(_descriptors(self._sources.sources(batch), batch), "DRAM")
        theirs = self._agent.get_xfer_descs(_descriptors(self._targets.targets(batch), batch), "DRAM")
        return self._agent.initialize_xfer("WRITE", ours, theirs, self._peer, note)

    def _grid(self, batch: Copies, size: int) -> _Grid | None:
        """Return the lists for blocks of this size. None if there are none and the batch does not consist of blocks."""
        if size in self._grids:
            return self._grids[size]
        if not _are_blocks(batch, size):
            return None
        our_blocks, their_blocks = _num_blocks(self._sources, size), _num_blocks(self._targets, size)
        if max(our_blocks.sum(), their_blocks.sum()) > MAX_BLOCKS:
            return None
        if len(self._grids) == MAX_GRIDS:
            self._grids.pop(next(iter(self._grids))).release()
        ours = self._prepare(_LOCAL, self._sources, our_blocks, size)
        theirs = self._prepare(self._peer, self._targets, their_blocks, size)
        self._grids[size] = _Grid(ours, theirs, _firsts(our_blocks), _firsts(their_blocks))
        return self._grids[size]

    def _prepare(self, agent_name: str, memory: Memory, counts: NDArray[np.uint64], size: int) -> Any:
        rows = [(r.address, size, 0, size, n) for r, n in zip(memory.regions, counts, strict=True) if n]
        return self._agent.prep_xfer_dlist(agent_name, np.array(rows, dtype=np.uint64), "DRAM")

    def _release_grids(self) -> None:
        for grid in self._grids.values():
            grid.release()


def _are_blocks(batch: Copies, size: int) -> bool:
    offsets = (batch["src_offset"] % size, batch["dst_offset"] % size)
    return bool((batch["length"] == size).all()) and not any(rest.any() for rest in offsets)


def _firsts(counts: NDArray[np.uint64]) -> Int64Array:
    """Return the number of each region's first block."""
    return Int64Array((np.cumsum(counts) - counts).tolist())


def _num_blocks(memory: Memory, size: int) -> NDArray[np.uint64]:
    return np.array([region.length // size for region in memory.regions], dtype=np.uint64)


def _descriptors(addresses: NDArray[np.uint64], batch: Copies) -> NDArray[np.uint64]:
    """Return rows of address, length, device 0, as the library expects."""
    table = np.zeros((len(batch), 3), dtype=np.uint64)
    table[:, 0], table[:, 1] = addresses, batch["length"]
    return table
