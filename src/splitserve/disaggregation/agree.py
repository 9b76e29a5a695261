"""One agreed state per room over all ranks of a worker: the minimum, because KVPoll only rises and Failed is lowest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from splitserve.disaggregation.state import KVPoll


class Pollable(Protocol):
    def poll(self) -> KVPoll: ...


class Reducer(Protocol):
    """The other ranks of a group, by what they said last (`group.py`), or at the same moment."""

    def all_reduce_min(self, values: list[int]) -> list[int]:
        """Element-wise minimum over all ranks, `values` being this one's."""
        ...


def poll_and_all_reduce(pollers: Sequence[Pollable], group: Reducer | None = None) -> list[KVPoll]:
    """Each poller's state as all ranks of `group` agree on it. Without a group: this rank's own."""
    states = [poller.poll() for poller in pollers]
    return states if group is None else [KVPoll(v) for v in group.all_reduce_min([int(s) for s in states])]
