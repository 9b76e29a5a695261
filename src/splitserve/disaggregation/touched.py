"""Rooms of which something may have changed since somebody last looked."""

from __future__ import annotations

import threading


class TouchedRooms:
    """By number. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: set[int] = set()

    def add(self, number: int) -> None:
        with self._lock:
            self._numbers.add(number)

    def take(self) -> list[int]:
        """In the order in which they were opened."""
        with self._lock:
            numbers, self._numbers = self._numbers, set()
        return sorted(numbers)
