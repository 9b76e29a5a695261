"""Set of changed rooms that still have to be polled."""

from __future__ import annotations

import threading


class TouchedRooms:
    """Numbers of changed rooms. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: set[int] = set()

    def add(self, number: int) -> None:
        with self._lock:
            self._numbers.add(number)

    def take(self) -> list[int]:
        """Remove all numbers and return them in the order in which the rooms were opened."""
        with self._lock:
            numbers, self._numbers = self._numbers, set()
        return sorted(numbers)
