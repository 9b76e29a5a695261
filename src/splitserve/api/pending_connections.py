"""Bounded table of connections without a complete request, by client address. The oldest is closed first."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Protocol


class Closable(Protocol):
    def close_pending(self) -> None:
        """Close the connection, which waits for a request or reads one."""
        ...


class PendingConnections:
    """Connections without a complete request. `max_per_address`: limit for each client address."""

    def __init__(self, max_per_address: int) -> None:
        self._max_per_address = max_per_address
        self._by_address: defaultdict[str, OrderedDict[Closable, None]] = defaultdict(OrderedDict)

    def add(self, address: str, connection: Closable) -> None:
        """Add a connection that waits for its next request. If its address has too many, close the oldest one."""
        pending = self._by_address[address]
        pending[connection] = None
        if len(pending) > self._max_per_address:
            oldest, _ = pending.popitem(last=False)
            oldest.close_pending()

    def remove(self, address: str, connection: Closable) -> None:
        """Remove a connection: its request is complete, or it is closed. Idempotent."""
        pending = self._by_address.get(address)
        if pending is not None:
            pending.pop(connection, None)
            if not pending:
                del self._by_address[address]

    def __len__(self) -> int:
        return sum(map(len, self._by_address.values()))
