"""Table of ended requests that keep their pages because a peer may still read or write them.

1. A request ends while its KV transfer is not quiescent. Its queue adds the entry with the room's end to the table.
2. The table polls that end and keeps the entry until the end is quiescent. That is a proof from the writer or a fence
   that keeps the writer out, never a timeout.
3. `reclaim` returns the entry, once. The caller owns it again and frees its pages, row and slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Entry = TypeVar("Entry")


class RoomEnd(Protocol):
    """Sender or receiver of a room, which reports whether a peer can still access the room's pages."""

    def quiescent(self) -> bool: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Lease(Generic[Entry]):
    entry: Entry
    end: RoomEnd
    num_pages: int


class LeaseTable(Generic[Entry]):
    """Owner of the entries given to it, and so of their pages, until `reclaim` returns them."""

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
        """Take ownership of an entry that holds `num_pages` pages of the room `end`."""
        self._leases.append(_Lease(entry, end, num_pages))

    def reclaim(self) -> list[Entry]:
        """End every lease of a quiescent room. Return their entries."""
        over = [lease for lease in self._leases if lease.end.quiescent()]
        if over:
            self._leases = [lease for lease in self._leases if lease not in over]
        return [lease.entry for lease in over]
