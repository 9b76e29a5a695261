"""Registered memory, and base classes of a backend for `session.py`: both ends of a connection, and their factory.

1. `ConnectionBackend.receive` makes the `Incoming` of a session we open. Its `session_info` is the data for a sender.
2. `ConnectionBackend.connect` makes the `SendingEnd` of a connection to a peer's session. Its `write` blocks until the
   write is proven, or returns a Proof that blocks until then.
3. The exception of a failed write shows whether bytes may have landed: none with `WriteRefused`, else perhaps some.

The caller is responsible for authentication, turns, deadlines and threads.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from splitserve._native.library import Int64Array
from splitserve._native.moves import copy_few
from splitserve._native.tables import bytes_inside
from splitserve.core.layout import Region
from splitserve.transfer.copies import Copies
from splitserve.transfer.transports import sockets
from splitserve.transfer.transports.base import WriteRefused
from splitserve.transfer.transports.frames import ProtocolError
from splitserve.transfer.transports.sockets import Deadline

# Waits until a write is proven to be in the peer's memory. Raises as `SendingEnd.write` does.
Proof = Callable[[], None]
T = TypeVar("T")


def decode_session_info(decoder: msgspec.msgpack.Decoder[T], session_info: bytes) -> T:
    """Decode the data for a sender. Raises ProtocolError.

    Create the decoder on import. Sessions open in threads, and two threads that create it at once crash the process.
    """
    try:
        return decoder.decode(session_info)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"malformed session info, use one transfer backend on both sides: {error}") from error


class Memory:
    """Memory regions by index, ours or a peer's. The caller that registered them owns the bytes."""

    def __init__(self, regions: Sequence[Region] = ()) -> None:
        self.regions: tuple[Region, ...] = ()
        self.add(regions)

    def add(self, regions: Sequence[Region]) -> None:
        self.regions = (*self.regions, *regions)
        self.bases = Int64Array(r.address for r in self.regions)
        self._lengths = Int64Array(r.length for r in self.regions)

    def sources(self, copies: Copies) -> NDArray[np.uint64]:
        """Return the source address of each copy. `check_sources` must have accepted the copies."""
        addresses: NDArray[np.uint64] = self.bases.array[copies["src_region"]] + copies["src_offset"]
        return addresses

    def targets(self, copies: Copies) -> NDArray[np.uint64]:
        addresses: NDArray[np.uint64] = self.bases.array[copies["dst_region"]] + copies["dst_offset"]
        return addresses

    def check_sources(self, copies: Copies) -> int:
        """Return the total length of the copies. Raises ValueError unless every source lies inside its region."""
        n = bytes_inside(copies, self._lengths, is_target=False)
        if n < 0:
            raise ValueError(f"source of a copy: {self._problem(*copies[['src_region', 'src_offset', 'length']][~n])}")
        return n

    def check_targets(self, copies: Copies) -> int:
        """Return the total length of the copies. Raises WriteRefused unless every target lies inside its region."""
        return self._targets_inside(copies, bytes_inside(copies, self._lengths, is_target=True))

    def refusal(self, targets: Copies, length: int) -> str | None:
        """Return why a peer that announced `length` bytes cannot write to these targets. None: it can."""
        try:
            expected = self.check_targets(targets)
        except WriteRefused as refusal:
            return str(refusal)
        return None if expected == length else f"{length} bytes announced for ranges of {expected}"

    def take_few(self, copies: Copies, sources: Memory, max_bytes: int) -> int:
        """Do `check_targets`. If the total length is at most `max_bytes`, also perform the copies.

        `sources`: memory of this process with checked copies. This memory must be mapped in the process too.
        """
        n = copy_few(copies, max_bytes, sources.bases, self.bases, self._lengths)
        return self._targets_inside(copies, n)

    def _targets_inside(self, copies: Copies, n: int) -> int:
        if n < 0:
            raise WriteRefused(self._problem(*copies[["dst_region", "dst_offset", "length"]][~n]))
        return n

    def _problem(self, region: int, offset: int, length: int) -> str:
        if region >= len(self.regions):
            return f"region {region} is not registered ({len(self.regions)} are)"
        end = int(offset) + int(length)
        return f"[{offset}, {end}) is out of bounds of region {region} of {self.regions[region].length} bytes"


class SendingEnd:
    """Sending end of one connection. Used by one thread, except for `interrupt`."""

    # Name of the data path, for traces. Empty: the backend has only one.
    path = ""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def write(self, ticket_id: int, copies: Copies, deadline: Deadline) -> Proof | None:
        """Write the copies. Return None once all bytes are proven in the peer's memory, or a Proof once they are sent.

        Other writes may follow before the proof is called. Writes are proven in order. A proof that has already arrived
        is valid after the deadline too. Raises WriteRefused if nothing of the write lands any more; after any other
        error it may be half-way (LOST). A receiver that refuses a write reads nothing that follows on the same
        connection. A backend with brief writes returns no proofs.
        """
        raise NotImplementedError

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` while the receiver cannot be fenced. Raises WriteRefused if it is, or on failure.

        Only for a LocalTransport.
        """
        raise NotImplementedError

    def is_alive(self) -> bool:
        """Return whether another write may be attempted. If not, this end is closed and a new connection made."""
        return not sockets.has_data(self._socket)

    def interrupt(self) -> None:
        """Make the write in progress end soon. From any thread, after its socket was shut, which may be enough."""

    def close(self) -> None:
        """Stop reading our memory. On return it is not read any more. The caller closes the socket."""


class Incoming:
    """Receiving end of one session. It outlives its connections: a sender may connect again.

    By default only the thread inside `serve` writes to our memory, so nothing is left to fence once it has ended.
    """

    def session_info(self) -> bytes:
        """Return the data that a sender needs to write to us. Called for each connection, in its thread."""
        raise NotImplementedError

    def serve(self, sock: socket.socket) -> None:
        """Receive until the connection ends. Raises OSError or ProtocolError."""
        raise NotImplementedError

    def revoke(self) -> None:
        """Let no write begin any more: the session has ended. Called after the last `serve` returned. Idempotent."""

    def is_fenced(self) -> bool:
        """Return whether no write can be in flight. Called after `revoke`."""
        return True


class ConnectionBackend:
    # Writes up to this size never wait for the peer, once there is a connection. 0: every write may wait.
    brief_bytes = 0
    # Maximum size of small writes joined into one. A round trip is short compared with a write of this size.
    joined_bytes = 8 << 20

    def __init__(self) -> None:
        self.memory = Memory()

    def register(self, memory: Memory) -> None:
        """Use `memory`. Called whenever regions were added to it; it stays the same object."""
        self.memory = memory

    def receive(self) -> Incoming:
        """Return the receiving end of a new session."""
        raise NotImplementedError

    def connect(self, sock: socket.socket, session_info: bytes, deadline: Deadline) -> SendingEnd:
        """Return the sending end over an authenticated connection. Raises OSError, ProtocolError."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what the backend itself holds, after all sessions have ended. Idempotent."""
