"""Pause before a lost peer is contacted again. It grows with each loss and shrinks again over time.

A first loss costs nothing: most are a single broken connection. Each further loss raises the peer's level by one, and
the pause about doubles. The level halves every `half_life` seconds, so no peer is excluded for good after one bad
minute. Pure: depends on addresses and times only.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Address = TypeVar("Address", bound=Hashable)

# First and longest pause, and time in which the level halves. In seconds.
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 30.0
HALF_LIFE = 60.0
# Below this level a peer counts as healthy and is forgotten.
_FORGOTTEN_LEVEL = 0.25
# Maximum number of addresses. Beyond it, the address with the oldest loss is forgotten.
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
        # Records of lost peers, in order of their last loss.
        self._records: dict[Address, _Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def lost(self, address: Address, now: float) -> None:
        """Record a loss."""
        level = self.level(address, now) + 1.0
        # Level 1: no pause. Then 1, 3, 7, ... times the first pause.
        pause = min(self._longest_pause, self._first_pause * (2.0 ** min(level - 1.0, 64.0) - 1.0))
        self._records.pop(address, None)
        self._records[address] = _Record(level, now, now + pause)
        if len(self._records) > _MAX_ADDRESSES:
            del self._records[next(iter(self._records))]

    def level(self, address: Address, now: float) -> float:
        """Return the decayed number of losses. 0.0 for a healthy peer."""
        record = self._records.get(address)
        if record is None:
            return 0.0
        level: float = record.level * 0.5 ** ((now - record.lost_at) / self._half_life)
        if level < _FORGOTTEN_LEVEL and now >= record.retry_at:
            del self._records[address]
            return 0.0
        return level

    def retry_at(self, address: Address, now: float) -> float:
        """Return the time of the next attempt: `now` for a healthy peer."""
        self.level(address, now)
        record = self._records.get(address)
        return now if record is None else max(now, record.retry_at)
