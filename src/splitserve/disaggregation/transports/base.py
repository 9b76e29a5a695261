"""The contract of a transport: raw memory regions and copy lists, nothing of heads, pages or requests.

Five verbs: register, write, poll, drain, close. `tests/contract/test_transports.py` runs against every implementation.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from splitserve.core.layout import Copy, Region


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a peer's transport is reached. Travels in the handshake as plain data."""

    # Unique to one life of one process: a restarted peer has another.
    session_id: str
    # What the backend needs to connect, e.g. "127.0.0.1:41235".
    endpoint: str


class WriteState(enum.IntEnum):
    PENDING = 0
    # Every byte is in the peer's memory, proven by the peer or the hardware.
    DONE = 1
    # Nothing of this write will touch the peer's memory any more.
    FAILED = 2


@dataclass(frozen=True, slots=True)
class Ticket:
    """One write, to be polled. `id` is unique in its transport."""

    id: int


@dataclass(frozen=True, slots=True)
class WriteStatus:
    state: WriteState
    # Why it failed; None otherwise.
    error: str | None = None


class Transport(Protocol):
    def register(self, regions: Sequence[Region]) -> None:
        """Make these regions known; copies name them by their index in registration order. Call before anything else.

        The memory must stay valid until `close` has returned.
        """
        ...

    @property
    def address(self) -> PeerAddress:
        """Where peers reach this transport."""
        ...

    def write(self, peer: PeerAddress, copies: Sequence[Copy]) -> Ticket:
        """Begin to copy from our regions into the peer's. Never blocks on the peer. Writes to one peer land in order.

        The source bytes must not change until the ticket is DONE or FAILED.
        """
        ...

    def poll(self, ticket: Ticket) -> WriteStatus:
        """State of a write. DONE and FAILED are final, and asking once they are reached forgets the ticket."""
        ...

    def drain(self, session_id: str) -> None:
        """Cut the peer off: when this returns, no write from or to that session is under way or can begin.

        Its pending tickets are FAILED. Later writes to the same session fail.
        """
        ...

    def close(self) -> None:
        """Stop everything; idempotent. After return no thread of the transport touches the registered memory."""
        ...


# A transport calls this, from any thread, when a ticket became final, so that a waiting poller wakes up.
ProgressCallback = Callable[[], None]
