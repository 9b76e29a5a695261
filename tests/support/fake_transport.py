"""Transport inside one process with real memory copies, and with faults for tests.

By default a write is performed at once. In step mode it waits in its session's queue, and `FakeNetwork.run_one` moves
one copy of one write, so that a seeded test decides the order. A broken session behaves like a broken connection: the
sender's write is LOST and its rest may still land, until the receiver drains the session or the sender reconnects.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from splitserve.core.errors import CapacityError
from splitserve.core.layout import Region
from splitserve.transfer.copies import Copies, copy_table
from splitserve.transfer.transports.backend import Memory
from splitserve.transfer.transports.base import (
    PeerAddress,
    ProgressCallback,
    Ticket,
    WriteState,
    WriteStatus,
    ignore_progress,
)

MAX_PENDING_WRITES = 1024


@dataclass(slots=True)
class _Write:
    source: FakeTransport
    ticket: Ticket
    copies: Copies
    next_copy: int = 0
    # Called instead of copying anything.
    action: Callable[[], None] | None = None


@dataclass(slots=True)
class _Session:
    owner: FakeTransport
    queue: deque[_Write] = field(default_factory=deque)
    # A write that its sender has given up, with bytes still in flight.
    orphan: _Write | None = None
    # False after a drain by its owner.
    is_open: bool = True

    def leave_behind(self, write: _Write) -> None:
        """Let the rest of a write continue after its sender has died. Drop an action: it needs its sender."""
        self.orphan = None if write.action else write


class FakeNetwork:
    """All sessions of all fake transports that can reach each other.

    `late_fences`: a receiver's drain does not stop the write in flight, as with senders that write to shared memory
    directly. The session is fenced when that write has ended.
    """

    def __init__(self, *, step: bool = False, late_fences: bool = False) -> None:
        self.step = step
        self.late_fences = late_fences
        self.lock = threading.RLock()
        self.sessions: dict[str, _Session] = {}
        self.ids = itertools.count()

    def busy_sessions(self) -> list[str]:
        return [s for s, session in self.sessions.items() if session.queue or session.orphan]

    def run_one(self, session_id: str) -> None:
        """Move one copy of the oldest write of a session."""
        with self.lock:
            session = self.sessions[session_id]
            write = session.orphan or session.queue[0]
            error = None
            try:
                self._advance(write, session.owner)
            except Exception as failure:
                error = str(failure)
            if error is None and write.next_copy < len(write.copies):
                return
            if write is session.orphan:
                session.orphan = None
                if not session.is_open:
                    del self.sessions[session_id]
                return
            session.queue.popleft()
            state = WriteState.DONE if error is None else WriteState.FAILED
            write.source.finish(write.ticket, WriteStatus(state, error, "in_process"))

    def _advance(self, write: _Write, owner: FakeTransport) -> None:
        if write.next_copy == 0:
            owner.memory.check_targets(write.copies)
        if write.action is not None:
            write.action()
        if len(write.copies):
            owner.land(write.source, write.copies[write.next_copy : write.next_copy + 1])
        write.next_copy += 1

    def break_session(self, session_id: str) -> None:
        """Break the connection: the write in flight is LOST, those behind it FAILED; the next write reconnects."""
        with self.lock:
            session = self.sessions[session_id]
            for i, write in enumerate(session.queue):
                state = WriteState.LOST if i == 0 else WriteState.FAILED
                write.source.finish(write.ticket, WriteStatus(state, f"connection to {session_id} broke"))
            if session.queue:
                session.leave_behind(session.queue[0])
            session.queue.clear()


# Network of transports made without one.
SHARED_NETWORK = FakeNetwork()


class FakeTransport:
    def __init__(self, network: FakeNetwork | None = None, *, on_progress: ProgressCallback = ignore_progress) -> None:
        self._network = network or SHARED_NETWORK
        self._on_progress = on_progress
        self.memory = Memory()
        self._statuses: dict[Ticket, WriteStatus] = {}
        # Sessions of peers that were drained here. No write to them follows.
        self._drained: set[str] = set()
        self._closed = False

    def register(self, regions: Sequence[Region]) -> None:
        self.memory.add(regions)

    def open_session(self) -> PeerAddress:
        with self._network.lock:
            session_id = f"fake-{next(self._network.ids)}"
            self._network.sessions[session_id] = _Session(self)
            return PeerAddress(session_id, "in-process")

    def write(self, peer: PeerAddress, copies: Copies) -> Ticket:
        self.memory.check_sources(copies)
        return self._begin(peer, copies)

    def call(self, peer: PeerAddress, action: Callable[[], None]) -> Ticket:
        return self._begin(peer, copy_table([]), action)

    def _begin(self, peer: PeerAddress, copies: Copies, action: Callable[[], None] | None = None) -> Ticket:
        with self._network.lock:
            ticket = Ticket(next(self._network.ids))
            session = self._network.sessions.get(peer.session_id)
            if session is None or not session.is_open or self._closed or peer.session_id in self._drained:
                self.finish(ticket, WriteStatus(WriteState.FAILED, f"session {peer.session_id} is unknown or drained"))
                return ticket
            if len(session.queue) >= MAX_PENDING_WRITES:
                raise CapacityError(f"{MAX_PENDING_WRITES} writes to session {peer.session_id} are pending")
            session.orphan = None
            self._statuses[ticket] = WriteStatus(WriteState.PENDING)
            session.queue.append(_Write(self, ticket, copies, action=action))
            while session.queue and not self._network.step:
                self._network.run_one(peer.session_id)
            return ticket

    def poll(self, ticket: Ticket) -> WriteStatus:
        with self._network.lock:
            status = self._statuses[ticket]
            if status.is_final:
                del self._statuses[ticket]
            return status

    def drain(self, session_id: str) -> None:
        with self._network.lock:
            session = self._network.sessions.get(session_id)
            if session is None:
                return
            if session.owner is self:
                self._fail_pending(session_id, lambda write: True)
                session.is_open = False
                if session.orphan is None or not self._network.late_fences:
                    del self._network.sessions[session_id]
            else:
                self._drained.add(session_id)
                self._fail_pending(session_id, lambda write: write.source is self)

    def close(self) -> None:
        with self._network.lock:
            self._closed = True
            for session_id, session in list(self._network.sessions.items()):
                self._fail_pending(session_id, lambda write: write.source is self)
                if session.owner is self:
                    self.drain(session_id)

    def is_fenced(self, session_id: str) -> bool:
        with self._network.lock:
            return session_id not in self._network.sessions

    def land(self, source: FakeTransport, copy: Copies) -> None:
        """Copy one row, given as a table, from `source` into our memory."""
        ctypes.memmove(int(self.memory.targets(copy)[0]), int(source.memory.sources(copy)[0]), int(copy["length"][0]))

    def finish(self, ticket: Ticket, status: WriteStatus) -> None:
        self._statuses[ticket] = status
        self._on_progress()

    def _fail_pending(self, session_id: str, mine: Callable[[_Write], bool]) -> None:
        """End the session's writes that are `mine`. The rest of a write in flight stays on the network."""
        session = self._network.sessions[session_id]
        for i, write in enumerate(list(session.queue)):
            if mine(write):
                session.queue.remove(write)
                if i == 0:
                    session.leave_behind(write)
                state = WriteState.LOST if i == 0 else WriteState.FAILED
                write.source.finish(write.ticket, WriteStatus(state, f"session {session_id} was drained"))
