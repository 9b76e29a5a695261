"""Interfaces that a backend implements for `session.py`: both ends of a connection, and their factory.

1. `ConnectionBackend.receive` makes the `Incoming` of a session we open. Its `session_info` is the data for a sender.
2. `ConnectionBackend.connect` makes the `SendingEnd` of a connection to a peer's session. Its `write` blocks until the
   write is proven, or returns a Proof that blocks until then.
3. The exception of a failed write shows whether bytes may have landed: none with `WriteRefused`, else perhaps some.

The caller is responsible for authentication, turns, deadlines and threads.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol

from splitserve.transfer.copies import Copies
from splitserve.transfer.transports.memory import Memory
from splitserve.transfer.transports.sockets import Deadline

# Waits until a write is proven to be in the peer's memory. Raises as `SendingEnd.write` does.
Proof = Callable[[], None]


class SendingEnd(Protocol):
    """Sending end of one connection. Used by one thread, except for `interrupt`."""

    def write(self, ticket_id: int, copies: Copies, deadline: Deadline) -> Proof | None:
        """Write the copies. Return None once all bytes are proven in the peer's memory, or a Proof once they are sent.

        Other writes may follow before the proof is called. Writes are proven in order. A proof that has already arrived
        is valid after the deadline too. Raises WriteRefused if nothing of the write lands any more; after any other
        error it may be half-way (LOST). A receiver that refuses a write reads nothing that follows on the same
        connection. A backend with brief writes returns no proofs.
        """
        ...

    def is_alive(self) -> bool:
        """Return whether another write may be attempted. If not, this end is closed and a new connection made."""
        ...

    def interrupt(self) -> None:
        """Make the write in progress end soon. From any thread, after its socket was shut."""
        ...

    def close(self) -> None:
        """Stop reading our memory. On return it is not read any more. The caller closes the socket."""
        ...


class LocalOutgoing(SendingEnd, Protocol):
    """Sending end of a LocalTransport."""

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` while the receiver cannot be fenced. Raises WriteRefused if it is, or on failure."""
        ...


class Incoming(Protocol):
    """Receiving end of one session. It outlives its connections: a sender may connect again."""

    def session_info(self) -> bytes:
        """Return the data that a sender needs to write to us. Called for each connection, in its thread."""
        ...

    def serve(self, sock: socket.socket) -> None:
        """Receive until the connection ends. Raises OSError or ProtocolError."""
        ...

    def revoke(self) -> None:
        """Let no write begin any more: the session has ended. Called after the last `serve` returned. Idempotent."""
        ...

    def is_fenced(self) -> bool:
        """Return whether no write can be in flight. Called after `revoke`."""
        ...


class ConnectionBackend(Protocol):
    # Writes up to this size never wait for the peer, once there is a connection. 0: every write may wait.
    brief_bytes: int
    # Maximum size of small writes joined into one. A round trip is short compared with a write of this size.
    joined_bytes: int

    def register(self, memory: Memory) -> None:
        """Use `memory`. Called whenever regions were added to it; it stays the same object."""
        ...

    def receive(self) -> Incoming:
        """Return the receiving end of a new session."""
        ...

    def connect(self, sock: socket.socket, session_info: bytes, deadline: Deadline) -> SendingEnd:
        """Return the sending end over an authenticated connection. Raises OSError, ProtocolError."""
        ...

    def close(self) -> None:
        """Close the backend, after all sessions have ended. Idempotent."""
        ...
