"""Conversion of KV rows that plain copies cannot transfer: to another dtype, or from many small pieces to few large.

A row is head_dim elements of one token and one head (`core/layout.py`). Life of a CastPlan (`reshard.py` makes it):
1. `split` divides it into parts that fit the memory they are packed in.
2. `pack` gathers a part's rows from our pool, casts them, and lays them side by side in the target's order.
3. `writes` returns the copies of the packed rows to their targets: as few as the target's pages allow.
If KV travels in a narrower dtype than the target pool's, the rows of a page are written contiguously to the beginning
of that page. After all have arrived, the target's own plan widens them there: `unpack`.

A StagingArea is the registered memory in which senders pack. Life of one of its slots:
1. `StagingArea.pack` takes a free slot for a session, fills it with one part of a CastPlan and returns the copies to
   write from it.
2. The slot belongs to that write until its ticket is final, or to the room while the write is not submitted.
3. `release` frees it.

No session holds more than its share, so that a stopped peer does not block the transfers of others. Only for pools that
the CPU can read. Used under the manager's lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from splitserve.core.layout import DTYPE_BYTES, Region
from splitserve.core.machine import Arena
from splitserve.transfer.copies import COPY, Copies, coalesce, over_regions

# Memory of a region as bytes.
Bytes = NDArray[np.uint8]
Rows = NDArray[np.int64]

_NUMPY: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
# Largest finite value of dtypes with a smaller range than KV values can have. A cast saturates there. NaN stays NaN.
_LARGEST = {"float16": 65504.0, "float8_e4m3fn": 448.0}


def is_convertible(src_dtype: str, dst_dtype: str) -> bool:
    """Return whether a cast exists. None between bfloat16 and float16: neither can represent the other's values."""
    known = src_dtype in _NUMPY and dst_dtype in _NUMPY
    return src_dtype == dst_dtype or (known and {src_dtype, dst_dtype} != {"bfloat16", "float16"})


def travels_as(dst_dtype: str, wire_dtype: str | None) -> str:
    """Return the dtype in which KV travels into a pool: the wire's if narrower, so that it fits the pool's pages."""
    if wire_dtype is None or DTYPE_BYTES[wire_dtype] >= DTYPE_BYTES[dst_dtype]:
        return dst_dtype
    return wire_dtype


@dataclass(frozen=True, slots=True, eq=False)
class CastPlan:
    """Plan that casts row src_rows[i] of each source region to row dst_rows[i] of its target region."""

    # Pairs (source region, target region), [num_pairs, 2].
    regions: Rows
    # Row numbers in the source region and in the target region, in the target's order. Both [num_rows].
    src_rows: Rows
    dst_rows: Rows
    # Elements per row.
    row: int
    src_dtype: str
    dst_dtype: str

    @property
    def packed_row_bytes(self) -> int:
        return self.row * DTYPE_BYTES[self.dst_dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows when packed."""
        return len(self.regions) * len(self.src_rows) * self.packed_row_bytes

    def split(self, limit: int) -> Iterator[CastPlan]:
        """Split the rows into parts of at most `limit` packed bytes. Raises ValueError if one row is larger."""
        rows_at_most = limit // self.packed_row_bytes
        if rows_at_most == 0:
            raise ValueError(f"a row of {self.packed_row_bytes} bytes does not fit into {limit} bytes of staging")
        num_rows = max(len(self.src_rows), 1)
        pairs_at_most = max(1, rows_at_most // num_rows)
        for i in range(0, len(self.regions), pairs_at_most):
            for j in range(0, num_rows, rows_at_most):
                rows = slice(j, j + rows_at_most)
                regions = self.regions[i : i + pairs_at_most]
                yield replace(self, regions=regions, src_rows=self.src_rows[rows], dst_rows=self.dst_rows[rows])

    def writes(self, region: int, offset: int) -> Copies:
        """Return the copies from the rows packed at `offset` of our region `region` to the target's regions."""
        size = self.packed_row_bytes
        runs = np.empty(len(self.dst_rows), dtype=COPY)
        runs["src_region"] = runs["dst_region"] = 0
        runs["src_offset"] = np.arange(len(runs)) * size
        runs["dst_offset"] = self.dst_rows * size
        runs["length"] = size
        # Packed rows are contiguous, so only gaps in the target end a run.
        copies = over_regions(coalesce(runs), np.full(len(self.regions), region), self.regions[:, 1])
        num_runs = len(copies) // max(len(self.regions), 1)
        starts = offset + np.arange(len(self.regions)) * len(self.src_rows) * size
        copies["src_offset"] += np.repeat(starts, num_runs).astype(np.uint64)
        return copies


def pack(plan: CastPlan, regions: Sequence[Bytes], out: Bytes) -> None:
    """Fill out[:plan.num_bytes] with the plan's rows, pair by pair. `out` starts at a multiple of 4 bytes."""
    packed = _rows(out[: plan.num_bytes], plan.row, plan.dst_dtype).reshape(len(plan.regions), -1, plan.row)
    for i, source in enumerate(plan.regions[:, 0].tolist()):
        packed[i] = _gathered(plan, regions[source])


def unpack(plan: CastPlan, pool: Sequence[Bytes]) -> None:
    """Apply the plan inside one pool: cast its rows and write them to their targets.

    All rows of a region are read before one is written, and then cleared: a slot that keeps bytes of a narrower dtype
    might read as NaN.
    """
    for source, target in plan.regions.tolist():
        values = _gathered(plan, pool[source])
        _rows(pool[source], plan.row, plan.src_dtype)[plan.src_rows] = 0
        _rows(pool[target], plan.row, plan.dst_dtype)[plan.dst_rows] = values


def memory_of(region: Region) -> Bytes:
    """Return a view of a region that this process's CPU can read. Its owner must keep the memory valid."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * region.length).from_address(region.address))


def _gathered(plan: CastPlan, region: Bytes) -> NDArray[Any]:
    """Return the source rows in the target's dtype, [num_rows, row]."""
    # Gather rows of bytes: one memory copy per row for all dtypes.
    size = plan.row * DTYPE_BYTES[plan.src_dtype]
    values = np.take(region.reshape(-1, size), plan.src_rows, axis=0).view(_NUMPY[plan.src_dtype])
    if plan.src_dtype == plan.dst_dtype:
        return values
    largest = _LARGEST.get(plan.dst_dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        if largest is not None:
            values = np.clip(values.astype(np.float32, copy=False), -largest, largest)
        return values.astype(_NUMPY[plan.dst_dtype])


def _rows(memory: Bytes, row: int, dtype: str) -> NDArray[Any]:
    return memory.view(_NUMPY[dtype]).reshape(-1, row)


NUM_SLOTS = 16
SLOT_BYTES = 4 << 20
# Each session may hold the total number of slots divided by this.
_SHARE = 4


class StagingArea:
    """Slots of staging memory. `pool`: our transport's regions 0, 1, ...; the staging memory is region `index`."""

    def __init__(
        self,
        pool: Sequence[Region],
        index: int,
        *,
        num_slots: int = NUM_SLOTS,
        slot_bytes: int = SLOT_BYTES,
        shareable: bool = False,
    ) -> None:
        self.index = index
        self._slot_bytes = slot_bytes
        self._slots_at_most = max(1, num_slots // _SHARE)
        self._pool = [memory_of(region) for region in pool]
        self._arena = Arena(num_slots * slot_bytes, shareable=shareable)
        self._memory = np.frombuffer(self._arena.buffer, dtype=np.uint8)
        self._free = list(range(num_slots))
        # Slot -> id of the session that holds it.
        self._taken: dict[int, str] = {}

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    def region(self) -> Region:
        return self._arena.region()

    def parts(self, cast: CastPlan) -> Iterator[CastPlan]:
        """Split the plan into parts that fit a slot. Raises ValueError if a row does not fit."""
        return cast.split(self._slot_bytes)

    def pack(self, part: CastPlan, session_id: str) -> tuple[int, Copies] | None:
        """Pack a part. Return (slot, copies to write from it), or None while no slot is free for this session."""
        if not self._free or list(self._taken.values()).count(session_id) >= self._slots_at_most:
            return None
        slot = self._free.pop()
        self._taken[slot] = session_id
        offset = slot * self._slot_bytes
        pack(part, self._pool, self._memory[offset : offset + self._slot_bytes])
        return slot, part.writes(self.index, offset)

    def release(self, slot: int) -> None:
        """Free a slot. Raises KeyError if it is not taken."""
        del self._taken[slot]
        self._free.append(slot)
