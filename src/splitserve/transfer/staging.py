"""Registered memory in which senders pack KV that cannot be written straight from its pages (`convert.py`).

Life of a slot:
1. `pack` takes a free slot for a session, fills it with one part of a CastPlan and returns the copies to write from it.
2. The slot belongs to that write until its ticket is final, or to the room while the write is not submitted.
3. `release` frees it.

No session holds more than its share, so that a stopped peer does not block the transfers of others. Only for pools that
the CPU can read. Used under the manager's lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from splitserve.core.layout import Region
from splitserve.core.machine import Arena
from splitserve.transfer.convert import CastPlan, memory_of, pack
from splitserve.transfer.copies import Copies

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
