"""Interface of a transport: raw memory regions and copy lists, independent of heads, pages and requests.

Life of a write:
1. The receiver opens a session for one peer and sends it in its own handshake.
2. The sender writes to that session. Writes of one session land in order.
3. The ticket becomes DONE (proven), FAILED (proven that nothing lands any more) or LOST (no proof either way).
4. A session ends when either end drains it. For the receiver the drain is the fence: once `is_fenced`, no byte lands.

`tests/contract/test_transports.py` runs against every implementation; tests of GPU memory need GPUs.
"""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from splitserve.core.errors import OptionError
from splitserve.core.layout import Region
from splitserve.transfer.copies import Copies


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Address at which one peer may write to us. Sent in the handshake as plain data."""

    # New for each handshake and never reused after a drain: a restarted or fenced peer gets another one.
    session_id: str
    # Backend's address to connect to, e.g. "127.0.0.1:41235".
    endpoint: str


class WriteState(enum.IntEnum):
    PENDING = 0
    # Every byte is in the peer's memory, proven by the peer or the hardware.
    DONE = 1
    # This write will not change the peer's memory any more.
    FAILED = 2
    # It failed half-way without proof: bytes in flight may land until the peer has fenced the session.
    LOST = 3


class Ticket(msgspec.Struct, frozen=True):
    """Handle of one write, to be polled. `id` is unique in its transport.

    Each write creates a ticket and a status. msgspec structs are much cheaper to create than dataclasses.
    """

    id: int


class WriteStatus(msgspec.Struct, frozen=True):
    state: WriteState
    # Why it FAILED or was LOST. None otherwise.
    error: str | None = None
    # How a DONE write was sent (`SendingEnd.path`).
    path: str = ""

    @property
    def is_final(self) -> bool:
        return self.state is not WriteState.PENDING


class WriteRefused(Exception):
    """Error of a backend: the write FAILED, and nothing of it lands any more."""


class Transport(Protocol):
    def register(self, regions: Sequence[Region]) -> None:
        """Register these regions; copies refer to them by index in registration order. Call before anything else.

        The memory must stay valid until `close` has returned. Raises ConfigError for memory the backend cannot use.
        """
        ...

    def open_session(self) -> PeerAddress:
        """Return a new address through which one peer may write to us, until `drain(session_id)`."""
        ...

    def write(self, peer: PeerAddress, copies: Copies) -> Ticket:
        """Begin to copy from our regions into the peer's. Never blocks on the peer.

        Writes to one session become final in order. The targets of writes that are not final must not overlap, because
        several may be sent as one. The targets within one write must not overlap, because its bytes land in any order.
        The source bytes must not change until the ticket is final.
        Raises CapacityError while too many writes to this session are in flight (retry when one of them is final),
        and ValueError for a copy outside our own regions.
        """
        ...

    def poll(self, ticket: Ticket) -> WriteStatus:
        """Return the state of a write. A final state is returned once; then the ticket is forgotten: KeyError."""
        ...

    def drain(self, session_id: str) -> None:
        """End a session, ours or a peer's: its pending tickets become final, later writes to it fail.

        A drained session of ours lets no new write begin. `is_fenced` reports whether the last one has ended.
        """
        ...

    def is_fenced(self, session_id: str) -> bool:
        """Return whether a drained session of ours can no longer write.

        True at once for most backends. False only while a process on this host may be inside a write to shared memory,
        for example because it was stopped there. It turns true when that write, or that process, ends.
        """
        ...

    def close(self) -> None:
        """Stop everything. Idempotent. After return no thread of the transport accesses the registered memory."""
        ...


class LocalTransport(Transport, Protocol):
    """Transport to peers on this host with memory that this process can write to directly."""

    def call(self, peer: PeerAddress, action: Callable[[], None]) -> Ticket:
        """Run `action` in order among the writes to this session, and never once the session is fenced.

        The ticket is DONE when it has returned, FAILED if it raised or never ran. Raises CapacityError as `write` does.
        """
        ...


# Called by a transport, from any thread, when a ticket became final, to wake a waiting poller.
ProgressCallback = Callable[[], None]


def ignore_progress() -> None:
    """Do nothing: the callback of pollers that do not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """Options common to all backends. Each backend uses those that apply to it."""

    # IP address of this machine at which peers reach us. No host name.
    host: str = "127.0.0.1"
    # Cluster token that both ends of every connection must prove to hold. Empty: no authentication.
    token: bytes = field(default=b"", repr=False)
    on_progress: ProgressCallback = ignore_progress
    # Timeouts in seconds: of one write from its first byte sent to its proof, and of a connection attempt.
    write_timeout: float = 60.0
    connect_timeout: float = 5.0
    # Settings of one backend, as "name=value". `options_help` lists them.
    extra: dict[str, str] = field(default_factory=dict)


# Default number of threads of one large write. Fewer if there are fewer cores.
NUM_THREADS = 2
MAX_THREADS = 64


def threads_of(options: TransportOptions) -> int:
    """Return the number of threads of one large write, for backends that move the bytes in the sender.

    Raises ConfigError.
    """
    wanted = options.extra.get("threads")
    return min(NUM_THREADS, len(os.sched_getaffinity(0))) if wanted is None else thread_count(wanted)


def thread_count(wanted: str) -> int:
    """Return the value of the option `threads` as a number. Raises ConfigError."""
    if not (wanted.isascii() and wanted.isdigit() and 1 <= int(wanted) <= MAX_THREADS):
        raise OptionError("--transfer-option", f"threads={wanted}: a number from 1 to {MAX_THREADS}")
    return int(wanted)


def is_direct(extra: Mapping[str, str]) -> bool:
    """Return whether the options of `tcp` let it write directly on one host. Raises OptionError."""
    return direct_option(extra.get("direct", "true")) and sys.platform == "linux"


def direct_option(text: str) -> bool:
    """Return the value of the option `direct`. Raises OptionError."""
    if text not in ("true", "false"):
        raise OptionError("--transfer-option", f"direct={text}: give true or false")
    return text == "true"
