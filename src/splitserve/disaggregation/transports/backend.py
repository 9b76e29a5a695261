"""What a backend brings to `session.py`: both ends of a connection, and who makes them.

1. `Backend.receive` makes the `Incoming` of a session we open; its `welcome` tells a sender all it must know.
2. `Backend.connect` makes the `Outgoing` of a connection to a peer's session; its `write` blocks until it is proven, or
   returns what does.
3. What fails says by its exception whether anything can have landed: `WriteRefused`, or anything else.

Who may connect, turns, deadlines and threads are the caller's business.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol

from splitserve.disaggregation.copies import Copies
from splitserve.disaggregation.transports.memory import Memory
from splitserve.disaggregation.transports.sockets import Deadline

# Waits until a write is proven in the peer's memory. Raises as `Outgoing.write` does.
Proof = Callable[[], None]


class Outgoing(Protocol):
    """The sending end of one connection. Used by one thread, but for `interrupt`."""

    def write(self, ticket_id: int, copies: Copies, deadline: Deadline) -> Proof | None:
        """Return when every byte is proven in the peer's memory, or sent: then with what waits for the proof.

        Others may be written before that is called; they are proven in their order. A proof that is there already
        counts, however late it is asked for. Raises WriteRefused where nothing of it lands any more; anything else says
        that it may be half-way (LOST). A receiver that refuses a write takes nothing of what comes behind it over the
        same connection. A backend with brief writes returns no proofs.
        """
        ...

    def is_alive(self) -> bool:
        """Whether another write may be tried; if not, it is closed and a new connection made."""
        ...

    def interrupt(self) -> None:
        """From any thread: have the write under way end soon. Its socket was shut before."""
        ...

    def close(self) -> None:
        """When this returns, our memory is not read any more. The socket is closed by the caller."""
        ...


class LocalOutgoing(Outgoing, Protocol):
    """The sending end of a LocalTransport."""

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` while the receiver cannot be fenced. Raises WriteRefused where it is, or the action failed."""
        ...


class Incoming(Protocol):
    """The receiving end of one session. Outlives its connections: a sender may come back."""

    def welcome(self) -> bytes:
        """What a sender must know to write to us. For each connection, in its thread."""
        ...

    def serve(self, sock: socket.socket) -> None:
        """Receive until the connection ends. Raises OSError or ProtocolError."""
        ...

    def revoke(self) -> None:
        """The session is over: let no write begin. After the last `serve` has returned. Idempotent."""
        ...

    def is_fenced(self) -> bool:
        """After `revoke`: whether no write can be under way."""
        ...


class Backend(Protocol):
    # Writes up to so many bytes never wait for the peer, once there is a connection. 0: every write may.
    brief_bytes: int
    # Small writes that wait behind each other go as one, of so many bytes at most: a round trip is a small part of it.
    joined_bytes: int

    def register(self, memory: Memory) -> None:
        """Called whenever regions were added to `memory`, which stays the same object."""
        ...

    def receive(self) -> Incoming:
        """The receiving end of a new session."""
        ...

    def connect(self, sock: socket.socket, welcome: bytes, deadline: Deadline) -> Outgoing:
        """The sending end over an authenticated connection. Raises OSError, ProtocolError."""
        ...

    def close(self) -> None:
        """After all sessions have ended. Idempotent."""
        ...
