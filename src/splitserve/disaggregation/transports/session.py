"""What all transports between processes have in common: tickets, sessions, a queue and a thread for each peer.

A backend brings two small things, made by its `Backend`:
- `Outgoing`: the sending end of one connection; its `write` blocks until the write is proven;
- `Incoming`: the receiving end of one session, whoever connects to it.
Everything else is here: who may come in (`door.py`), the order of writes, deadlines, what a failure proves, the drain.
One thread and one connection for each session, on either side, so a slow or stopped peer holds up no other. Waking the
thread takes longer than a small write to shared memory: where a backend says that such a write never waits for the
peer, the caller carries it out itself, if it is its turn. One turn at a time, whoever has it.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from splitserve.core.layout import Region
from splitserve.disaggregation.copies import Copies, copy_table, num_bytes
from splitserve.disaggregation.transports.base import PeerAddress, Ticket, TransportOptions, WriteState, WriteStatus
from splitserve.disaggregation.transports.door import Door, Guest, ProtocolError, knock
from splitserve.disaggregation.transports.memory import Memory
from splitserve.disaggregation.transports.sockets import Deadline, shut
from splitserve.errors import CapacityError

logger = logging.getLogger(__name__)

# Writes to one session that may wait for their turn.
MAX_PENDING_WRITES = 1024
# Sessions we remember to have drained. They are drawn at random and never come back, so this is only hygiene.
MAX_REMEMBERED_DRAINS = 4096

_NOTHING = copy_table([])


class WriteRefused(Exception):
    """A write of which nothing landed and nothing will land."""


class Outgoing(Protocol):
    """The sending end of one connection. Used by one thread, but for `interrupt`."""

    def write(self, ticket_id: int, copies: Copies, deadline: Deadline) -> None:
        """Return when every byte is proven in the peer's memory.

        Raises WriteRefused where nothing of it landed or will; anything else says that it may be half-way (LOST).
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


class SessionTransport:
    """A Transport over one Backend."""

    def __init__(self, backend: Backend, options: TransportOptions) -> None:
        self.backend = backend
        self.options = options
        self._memory = Memory()
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._statuses: dict[Ticket, WriteStatus] = {}
        self._senders: dict[str, _Sender] = {}
        self._drained: dict[str, None] = {}
        self._sessions = _Sessions()
        self._door = Door(options.host, options.token, self._sessions)
        self._closed = False

    def register(self, regions: Sequence[Region]) -> None:
        self._memory.add(regions)
        self.backend.register(self._memory)

    def open_session(self) -> PeerAddress:
        session_id = secrets.token_hex(16)
        self._sessions.open(session_id, self.backend.receive())
        return PeerAddress(session_id, self._door.endpoint)

    def write(self, peer: PeerAddress, copies: Copies) -> Ticket:
        self._memory.check_sources(copies)
        return self._enqueue(peer, _Write(Ticket(next(self._ids)), copies))

    def call(self, peer: PeerAddress, action: Callable[[], None]) -> Ticket:
        """See LocalTransport; only where the backend's sending end is a LocalOutgoing."""
        return self._enqueue(peer, _Write(Ticket(next(self._ids)), _NOTHING, action))

    def poll(self, ticket: Ticket) -> WriteStatus:
        with self._lock:
            status = self._statuses[ticket]
            if status.is_final:
                del self._statuses[ticket]
            return status

    def drain(self, session_id: str) -> None:
        self._sessions.end(session_id)
        with self._lock:
            self._drained[session_id] = None
            while len(self._drained) > MAX_REMEMBERED_DRAINS:
                del self._drained[next(iter(self._drained))]
            sender = self._senders.pop(session_id, None)
        if sender is not None:
            sender.stop(f"session {session_id} was drained")

    def is_fenced(self, session_id: str) -> bool:
        return self._sessions.is_fenced(session_id)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            senders = list(self._senders.values())
            self._senders.clear()
        for sender in senders:
            sender.stop("the transport was closed")
        self._door.close()
        self._sessions.end_all()
        self.backend.close()

    def finish(self, ticket: Ticket, status: WriteStatus) -> None:
        with self._lock:
            self._statuses[ticket] = status
        self.options.on_progress()

    def _enqueue(self, peer: PeerAddress, write: _Write) -> Ticket:
        ticket = write.ticket
        with self._lock:
            if self._closed or peer.session_id in self._drained:
                self._statuses[ticket] = WriteStatus(WriteState.FAILED, f"session {peer.session_id} was drained")
                return ticket
            sender = self._senders.get(peer.session_id)
            if sender is None:
                sender = self._senders[peer.session_id] = _Sender(self, peer)
            self._statuses[ticket] = WriteStatus(WriteState.PENDING)
            if not sender.offer(write):
                del self._statuses[ticket]
                raise CapacityError(f"{MAX_PENDING_WRITES} writes to {peer.endpoint} are pending")
        sender.go_on()
        return ticket


@dataclass(frozen=True, slots=True)
class _Write:
    ticket: Ticket
    copies: Copies
    # To be called instead of copying anything.
    action: Callable[[], None] | None = None

    def is_brief(self, brief_bytes: int) -> bool:
        return brief_bytes > 0 and self.action is None and num_bytes(self.copies) <= brief_bytes

    def carry_out(self, outgoing: Outgoing, deadline: Deadline) -> None:
        if self.action is None:
            outgoing.write(self.ticket.id, self.copies, deadline)
        else:
            cast(LocalOutgoing, outgoing).call(self.action)


class _Sender:
    """The writes to one session: a bounded queue, a connection made when it is needed, one thread for both.

    1. `offer` queues a write. `go_on` carries it out at once where it is brief, else it wakes the thread.
    2. Who takes a write from the queue has the turn until the write is final; it alone uses the connection.
    3. `stop` wakes the thread, which waits for the turn a last time: then nobody writes, and nobody will.
    """

    def __init__(self, transport: SessionTransport, peer: PeerAddress) -> None:
        self._transport = transport
        self._peer = peer
        self._ready = threading.Condition()
        self._queue: deque[_Write] = deque()
        self._is_taken = False
        self._socket: socket.socket | None = None
        self._outgoing: Outgoing | None = None
        self._stopped: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"kv-send-{peer.endpoint}", daemon=True)
        self._thread.start()

    def offer(self, write: _Write) -> bool:
        with self._ready:
            if len(self._queue) >= MAX_PENDING_WRITES:
                return False
            self._queue.append(write)
            return True

    def go_on(self) -> None:
        """After an `offer`, and without its caller's locks."""
        with self._ready:
            # Who has the turn looks into the queue again.
            if self._is_taken or self._stopped or not self._queue:
                return
            outgoing = self._outgoing
            is_brief = self._queue[0].is_brief(self._transport.backend.brief_bytes)
            if not is_brief or outgoing is None or not outgoing.is_alive():
                self._ready.notify()
                return
            write = self._take()
        self._carry_out(write, outgoing)

    def stop(self, why: str) -> None:
        """Break the connection, end the thread, fail what is pending."""
        with self._ready:
            self._stopped = why
            self._ready.notify()
            if self._socket is not None:
                shut(self._socket)
            if self._outgoing is not None:
                self._outgoing.interrupt()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: not self._is_taken and (self._queue or self._stopped))
                if self._stopped:
                    break
                write = self._take()
            self._carry_out(write)
        self._disconnect()
        for write in self._queue:
            self._transport.finish(write.ticket, WriteStatus(WriteState.FAILED, self._stopped))

    def _take(self) -> _Write:
        """The next write, and with it the turn. With the lock held."""
        self._is_taken = True
        return self._queue.popleft()

    def _carry_out(self, write: _Write, outgoing: Outgoing | None = None) -> None:
        """Have the turn until the write is final. Without a live connection, make one."""
        try:
            status = self._outcome(write, outgoing)
            if status.state is not WriteState.DONE:
                self._disconnect()
            self._transport.finish(write.ticket, status)
        finally:
            with self._ready:
                self._is_taken = False
                if self._queue or self._stopped:
                    self._ready.notify()

    def _outcome(self, write: _Write, outgoing: Outgoing | None) -> WriteStatus:
        deadline = Deadline(self._transport.options.write_timeout)
        where = f"session {self._peer.session_id} at {self._peer.endpoint}"
        try:
            outgoing = outgoing or self._connect()
        except Exception as error:
            # Not a byte of this write was sent.
            return WriteStatus(WriteState.FAILED, self._stopped or f"cannot connect to {where}: {_text(error)}")
        try:
            write.carry_out(outgoing, deadline)
        except WriteRefused as refusal:
            return WriteStatus(WriteState.FAILED, self._stopped or f"{where} refused the write: {refusal}")
        except TimeoutError:
            late = f"{where} did not take a write of {num_bytes(write.copies)} bytes within {deadline.seconds:g} s"
            return WriteStatus(WriteState.LOST, self._stopped or late)
        except Exception as error:
            # Also of a library: whatever it was, nobody vouches for the rest of the write.
            return WriteStatus(WriteState.LOST, self._stopped or f"connection to {where} broke: {_text(error)}")
        return WriteStatus(WriteState.DONE)

    def _connect(self) -> Outgoing:
        if self._outgoing is not None and self._outgoing.is_alive():
            return self._outgoing
        self._disconnect()
        options = self._transport.options
        deadline = Deadline(options.connect_timeout)
        sock, welcome = knock(
            self._peer.endpoint, self._peer.session_id, options.token, deadline, lambda: self._stopped is not None
        )
        with self._ready:
            self._socket = sock
            if self._stopped:
                shut(sock)
        outgoing = self._transport.backend.connect(sock, welcome, deadline)
        with self._ready:
            self._outgoing = outgoing
            if self._stopped:
                outgoing.interrupt()
        return outgoing

    def _disconnect(self) -> None:
        with self._ready:
            outgoing, self._outgoing = self._outgoing, None
            sock, self._socket = self._socket, None
        if outgoing is not None:
            outgoing.close()
        if sock is not None:
            sock.close()


def _text(error: Exception) -> str:
    return str(error) or repr(error)


class _Sessions:
    """The sessions we opened, each with the connection that uses it. Host of the door."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, Incoming] = {}
        self._guests: dict[str, Guest] = {}
        # Ended, but not fenced yet.
        self._ending: dict[str, Incoming] = {}
        self._closed = False

    def open(self, session_id: str, incoming: Incoming) -> None:
        with self._lock:
            self._open[session_id] = incoming

    def enter(self, guest: Guest, session_id: str) -> bytes:
        """An older connection of the same session ends first: one writer at a time."""
        while True:
            with self._lock:
                incoming = self._open.get(session_id)
                if incoming is None or self._closed:
                    raise ProtocolError("the session is unknown or drained: shake hands again")
                older = self._guests.get(session_id)
                if older is None or older.is_over:
                    self._guests[session_id] = guest
                    break
            older.stop()
        return incoming.welcome()

    def serve(self, guest: Guest, session_id: str) -> None:
        incoming = self._open.get(session_id)
        if incoming is not None:
            incoming.serve(guest.socket)

    def end(self, session_id: str) -> None:
        with self._lock:
            incoming = self._open.pop(session_id, None)
            guest = self._guests.pop(session_id, None)
        if incoming is None:
            return
        if guest is not None:
            guest.stop()
        incoming.revoke()
        if not incoming.is_fenced():
            with self._lock:
                self._ending[session_id] = incoming

    def is_fenced(self, session_id: str) -> bool:
        with self._lock:
            if session_id in self._open:
                return False
            incoming = self._ending.get(session_id)
            if incoming is not None and incoming.is_fenced():
                del self._ending[session_id]
                return True
            return incoming is None

    def end_all(self) -> None:
        with self._lock:
            self._closed = True
            sessions = list(self._open)
        for session_id in sessions:
            self.end(session_id)
