"""How long to leave a peer alone after it was lost: longer with each loss, and forgotten again as time goes by.

A first loss costs nothing: most are a single broken connection. Each further one raises the peer's level by one, and
the pause about doubles with it. The level halves with every `half_life` seconds, so one bad minute is no verdict:
nobody is ever excluded for good. Pure: knows addresses and times.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Address = TypeVar("Address", bound=Hashable)

# Seconds.
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 30.0
HALF_LIFE = 60.0
# Below this a peer counts as healthy and is forgotten.
_FORGOTTEN_LEVEL = 0.25
# Addresses remembered; the one lost longest ago makes room for another.
_MAX_ADDRESSES = 4096


@dataclass(slots=True)
class _Record:
    level: float
    lost_at: float
    retry_at: float


class Backoff(Generic[Address]):
    def __init__(
        self, *, first_pause: float = FIRST_PAUSE, longest_pause: float = LONGEST_PAUSE, half_life: float = HALF_LIFE
    ) -> None:
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._half_life = half_life
        # In order of the last loss.
        self._records: dict[Address, _Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def lost(self, address: Address, now: float) -> None:
        """Account for a loss."""
        level = self.level(address, now) + 1.0
        # None at level 1, then 1, 3, 7, ... times the first pause.
        pause = min(self._longest_pause, self._first_pause * (2.0 ** min(level - 1.0, 64.0) - 1.0))
        self._records.pop(address, None)
        self._records[address] = _Record(level, now, now + pause)
        if len(self._records) > _MAX_ADDRESSES:
            del self._records[next(iter(self._records))]

    def level(self, address: Address, now: float) -> float:
        """Losses not forgotten yet; 0.0 for a healthy peer."""
        record = self._records.get(address)
        if record is None:
            return 0.0
        level: float = record.level * 0.5 ** ((now - record.lost_at) / self._half_life)
        if level < _FORGOTTEN_LEVEL and now >= record.retry_at:
            del self._records[address]
            return 0.0
        return level

    def retry_at(self, address: Address, now: float) -> float:
        """When it may be tried again: `now` for a healthy peer."""
        self.level(address, now)
        record = self._records.get(address)
        return now if record is None else max(now, record.retry_at)
