"""Common part of all transports between processes: tickets, sessions, the drain.

A backend implements the two ends of a connection (`backend.py`). `listener.py` admits connections to the sessions that
we open. `sending.py` defines the order of writes and what a failure proves. Each session has one thread and one
connection at each end, so a slow or stopped peer does not delay another.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Sequence

from splitserve.core.errors import CapacityError
from splitserve.core.layout import Region
from splitserve.transfer.copies import Copies
from splitserve.transfer.transports.backend import ConnectionBackend, Memory
from splitserve.transfer.transports.base import PeerAddress, Ticket, TransportOptions, WriteState, WriteStatus
from splitserve.transfer.transports.listener import DataListener
from splitserve.transfer.transports.sending import MAX_PENDING_WRITES, NOTHING, Sender, Write

logger = logging.getLogger(__name__)

# Drained sessions to remember. Ids are random and never reused, so forgetting old ones is harmless.
MAX_REMEMBERED_DRAINS = 4096
_PENDING = WriteStatus(WriteState.PENDING)


class SessionTransport:
    """A Transport over one Backend."""

    def __init__(self, backend: ConnectionBackend, options: TransportOptions) -> None:
        self.backend = backend
        self.options = options
        self._memory = Memory()
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._statuses: dict[Ticket, WriteStatus] = {}
        self._senders: dict[str, Sender] = {}
        self._drained: dict[str, None] = {}
        self._listener = DataListener(options.host, options.token)
        self._closed = False

    def register(self, regions: Sequence[Region]) -> None:
        self._memory.add(regions)
        self.backend.register(self._memory)

    def open_session(self) -> PeerAddress:
        session_id = secrets.token_hex(16)
        self._listener.open(session_id, self.backend.receive())
        return PeerAddress(session_id, self._listener.endpoint)

    def write(self, peer: PeerAddress, copies: Copies) -> Ticket:
        num_bytes = self._memory.check_sources(copies)
        return self._enqueue(peer, Write(Ticket(next(self._ids)), copies, num_bytes))

    def call(self, peer: PeerAddress, action: Callable[[], None]) -> Ticket:
        """See LocalTransport. Only if the backend's sending end has `call`."""
        return self._enqueue(peer, Write(Ticket(next(self._ids)), NOTHING, 0, action))

    def poll(self, ticket: Ticket) -> WriteStatus:
        with self._lock:
            status = self._statuses[ticket]
            if status is not _PENDING:
                del self._statuses[ticket]
            return status

    def drain(self, session_id: str) -> None:
        self._listener.end(session_id)
        with self._lock:
            self._drained[session_id] = None
            while len(self._drained) > MAX_REMEMBERED_DRAINS:
                del self._drained[next(iter(self._drained))]
            sender = self._senders.pop(session_id, None)
        if sender is not None:
            sender.stop(f"session {session_id} was drained")

    def is_fenced(self, session_id: str) -> bool:
        return self._listener.is_fenced(session_id)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            senders = list(self._senders.values())
            self._senders.clear()
        for sender in senders:
            sender.stop("the transport was closed")
        self._listener.close()
        self.backend.close()

    def finish(self, tickets: Sequence[Ticket], status: WriteStatus) -> None:
        with self._lock:
            for ticket in tickets:
                self._statuses[ticket] = status
        try:
            self.options.on_progress()
        except Exception:
            # The callback failed, but the calling thread has other tickets to finish.
            logger.exception("the end of writes was not reported")

    def _enqueue(self, peer: PeerAddress, write: Write) -> Ticket:
        ticket = write.ticket
        with self._lock:
            if self._closed or peer.session_id in self._drained:
                self._statuses[ticket] = WriteStatus(WriteState.FAILED, f"session {peer.session_id} was drained")
                return ticket
            sender = self._senders.get(peer.session_id)
            if sender is None:
                sender = self._senders[peer.session_id] = Sender(self.backend, self.options, peer, self.finish)
            self._statuses[ticket] = _PENDING
            if not sender.offer(write):
                del self._statuses[ticket]
                raise CapacityError(f"{MAX_PENDING_WRITES} writes to {peer.endpoint} are pending")
        sender.go_on()
        return ticket
