"""Requests that ended while somebody may still touch their pages: they keep what they hold until nobody can.

1. A request ends while its hand-over is not quiescent; its queue puts the entry into the table with the room's end.
2. The table asks that end again and again, and keeps the entry until the end says quiescent: a proof from the writer,
   or a fence that keeps the writer out. Never a timeout.
3. `reclaim` returns the entry, once. The caller owns it again and gives its pages, row and slot back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Entry = TypeVar("Entry")


class RoomEnd(Protocol):
    """What knows whether anyone can still touch a room's pages. Senders and receivers are such."""

    def quiescent(self) -> bool: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Lease(Generic[Entry]):
    entry: Entry
    end: RoomEnd
    num_pages: int


class LeaseTable(Generic[Entry]):
    """Owns the entries given to it, and so their pages, until `reclaim` hands them back."""

    def __init__(self) -> None:
        self._leases: list[_Lease[Entry]] = []

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_pages(self) -> int:
        return sum(lease.num_pages for lease in self._leases)

    def items(self) -> list[Entry]:
        return [lease.entry for lease in self._leases]

    def hold(self, entry: Entry, end: RoomEnd, num_pages: int) -> None:
        """Take over an entry that holds `num_pages` pages of the room `end`."""
        self._leases.append(_Lease(entry, end, num_pages))

    def reclaim(self) -> list[Entry]:
        """End every lease whose room is quiescent; their entries."""
        over = [lease for lease in self._leases if lease.end.quiescent()]
        if over:
            self._leases = [lease for lease in self._leases if lease not in over]
        return [lease.entry for lease in over]
