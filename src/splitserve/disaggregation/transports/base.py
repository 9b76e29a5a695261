"""The contract of a transport: raw memory regions and copy lists, nothing of heads, pages or requests.

Life of a write:
1. The receiving side opens a session for one peer and hands it over in its own handshake.
2. The sending side writes to that session; writes of one session land in order.
3. The ticket becomes DONE (proven), FAILED (proven that nothing lands any more) or LOST (no proof either way).
4. A session ends when either side drains it. On the receiving side that is the fence: once `is_fenced`, no byte lands.

`tests/contract/test_transports.py` runs against every implementation; those of GPU memory need GPUs.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from splitserve.core.layout import Region
from splitserve.disaggregation.copies import Copies


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where one peer may write to us. Travels in the handshake as plain data."""

    # Drawn anew for each handshake and never used again after a drain: a restarted or fenced peer gets another.
    session_id: str
    # What the backend needs to connect, e.g. "127.0.0.1:41235".
    endpoint: str


class WriteState(enum.IntEnum):
    PENDING = 0
    # Every byte is in the peer's memory, proven by the peer or the hardware.
    DONE = 1
    # Nothing of this write will touch the peer's memory any more.
    FAILED = 2
    # It failed half-way and nobody vouches for the rest: bytes under way may land until the peer has fenced it.
    LOST = 3


class Ticket(msgspec.Struct, frozen=True):
    """One write, to be polled. `id` is unique in its transport.

    A struct like the status below: each write makes both, and they are made in a fraction of a dataclass's microsecond.
    """

    id: int


class WriteStatus(msgspec.Struct, frozen=True):
    state: WriteState
    # Why it FAILED or was LOST; None otherwise.
    error: str | None = None

    @property
    def is_final(self) -> bool:
        return self.state is not WriteState.PENDING


class WriteRefused(Exception):
    """Nothing of a write lands any more: it FAILED. What backends tell those who keep tickets."""


class Transport(Protocol):
    def register(self, regions: Sequence[Region]) -> None:
        """Make these regions known; copies name them by their index in registration order. Call before anything else.

        The memory must stay valid until `close` has returned. Raises ConfigError for memory the backend cannot use.
        """
        ...

    def open_session(self) -> PeerAddress:
        """A fresh address for one peer to write to us through. It ends with `drain(session_id)`."""
        ...

    def write(self, peer: PeerAddress, copies: Copies) -> Ticket:
        """Begin to copy from our regions into the peer's. Never blocks on the peer.

        Writes to one session become final in order; until then their targets must not overlap, for several may go as
        one, nor may those of one write, whose bytes land in any order. The source bytes must not change until the
        ticket is final.
        Raises CapacityError while too many writes to this session are under way (try again when one of them is final)
        and ValueError for a copy outside our own regions.
        """
        ...

    def poll(self, ticket: Ticket) -> WriteStatus:
        """State of a write. Asking once a final state is reached forgets the ticket; then it is unknown: KeyError."""
        ...

    def drain(self, session_id: str) -> None:
        """End a session, ours or a peer's: its pending tickets become final, later writes to it fail.

        A session of ours lets no write begin any more; whether the last one is over, `is_fenced` tells.
        """
        ...

    def is_fenced(self, session_id: str) -> bool:
        """Whether nothing can be written any more through a drained session of ours.

        True at once for most backends. False only while a process on this host may be inside a write to shared memory
        (stopped in the middle of it, say): then it turns true when that write, or that process, ends.
        """
        ...

    def close(self) -> None:
        """Stop everything; idempotent. After return no thread of the transport touches the registered memory."""
        ...


class LocalTransport(Transport, Protocol):
    """A transport to peers on this host whose memory this process can write to by itself."""

    def call(self, peer: PeerAddress, action: Callable[[], None]) -> Ticket:
        """Run `action` in its turn among the writes to this session, and never once the session is fenced.

        The ticket is DONE when it has returned, FAILED where it raised or was never run. Raises CapacityError as
        `write` does.
        """
        ...


# A transport calls this, from any thread, when a ticket became final, so that a waiting poller wakes up.
ProgressCallback = Callable[[], None]


def ignore_progress() -> None:
    """For pollers that do not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """What every backend is told. Each takes what concerns it."""

    # Where peers reach us: an address of this machine, no name.
    host: str = "127.0.0.1"
    # Both ends of every connection prove that they hold it; empty: whoever reaches the port.
    token: bytes = field(default=b"", repr=False)
    on_progress: ProgressCallback = ignore_progress
    # Deadlines in seconds: of one write from when it begins to be sent to its proof, and of a connection.
    write_timeout: float = 60.0
    connect_timeout: float = 5.0
    # Backend's own settings, as "name=value": `options_help` says which there are.
    extra: dict[str, str] = field(default_factory=dict)
