"""KV pages over plain TCP sockets, scattered straight from one registered memory into the other.

1. A peer that was handed one of our sessions connects and names it; an unknown or drained session is refused.
2. Each write is one frame: a header, the table of its target ranges, and then the bytes. The receiver checks every
   range against its regions before it takes a byte of them, and reads straight into place.
3. The receiver acknowledges the frame; only that makes the ticket DONE.

One thread and one connection for each session, on either side, so a slow peer holds up no other. The sockets block and
the lists of buffers are long: the time goes by inside the kernel, where Python's lock is free. `tcp_wire.py` has the
frames.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import socket
import threading
from collections import deque
from collections.abc import Sequence

from splitserve.core.layout import Copy, Region
from splitserve.disaggregation.transports import tcp_wire as wire
from splitserve.disaggregation.transports.base import (
    PeerAddress,
    ProgressCallback,
    Ticket,
    WriteState,
    WriteStatus,
    ignore_progress,
)
from splitserve.errors import CapacityError

logger = logging.getLogger(__name__)

# Writes to one session that may wait for their turn.
MAX_PENDING_WRITES = 1024
# Peers' sessions we remember to have drained. They are drawn at random and never come back, so this is only hygiene.
MAX_REMEMBERED_DRAINS = 4096


class TcpTransport:
    """`write_timeout` is the deadline of one write from its turn to its acknowledgement, in seconds."""

    def __init__(
        self,
        host: str,
        *,
        on_progress: ProgressCallback = ignore_progress,
        write_timeout: float = 60.0,
        connect_timeout: float = 5.0,
    ) -> None:
        self._on_progress = on_progress
        self._write_timeout = write_timeout
        self._connect_timeout = connect_timeout
        self._memory = wire.Memory()
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._statuses: dict[Ticket, WriteStatus] = {}
        self._senders: dict[str, _Sender] = {}
        self._drained: dict[str, None] = {}
        self._listener = _Listener(host, self._memory)
        self._closed = False

    def register(self, regions: Sequence[Region]) -> None:
        self._memory.add(regions)

    def open_session(self) -> PeerAddress:
        session_id = secrets.token_hex(16)
        self._listener.admit(session_id)
        return PeerAddress(session_id, self._listener.endpoint)

    def write(self, peer: PeerAddress, copies: Sequence[Copy]) -> Ticket:
        frame = wire.WriteFrame(next(self._ids), copies, self._memory)
        ticket = Ticket(frame.ticket_id)
        with self._lock:
            if self._closed or peer.session_id in self._drained:
                self._statuses[ticket] = WriteStatus(WriteState.FAILED, f"session {peer.session_id} was drained")
                return ticket
            sender = self._senders.get(peer.session_id)
            if sender is None:
                sender = self._senders[peer.session_id] = _Sender(self, peer)
            self._statuses[ticket] = WriteStatus(WriteState.PENDING)
            if not sender.offer(frame):
                del self._statuses[ticket]
                raise CapacityError(f"{MAX_PENDING_WRITES} writes to {peer.endpoint} are pending")
        return ticket

    def poll(self, ticket: Ticket) -> WriteStatus:
        with self._lock:
            status = self._statuses[ticket]
            if status.is_final:
                del self._statuses[ticket]
            return status

    def drain(self, session_id: str) -> None:
        self._listener.dismiss(session_id)
        with self._lock:
            self._drained[session_id] = None
            while len(self._drained) > MAX_REMEMBERED_DRAINS:
                del self._drained[next(iter(self._drained))]
            sender = self._senders.pop(session_id, None)
        if sender is not None:
            sender.stop(f"session {session_id} was drained")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            senders = list(self._senders.values())
            self._senders.clear()
        for sender in senders:
            sender.stop("the transport was closed")
        self._listener.close()

    @property
    def write_timeout(self) -> float:
        return self._write_timeout

    @property
    def connect_timeout(self) -> float:
        return self._connect_timeout

    def finish(self, ticket_id: int, status: WriteStatus) -> None:
        with self._lock:
            self._statuses[Ticket(ticket_id)] = status
        self._on_progress()


class _Sender:
    """The writes to one session: a bounded queue, a connection made when it is needed, one thread for both."""

    def __init__(self, transport: TcpTransport, peer: PeerAddress) -> None:
        self._transport = transport
        self._peer = peer
        self._ready = threading.Condition()
        self._queue: deque[wire.WriteFrame] = deque()
        self._socket: socket.socket | None = None
        self._stopped: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"kv-send-{peer.endpoint}", daemon=True)
        self._thread.start()

    def offer(self, frame: wire.WriteFrame) -> bool:
        with self._ready:
            if len(self._queue) >= MAX_PENDING_WRITES:
                return False
            self._queue.append(frame)
            self._ready.notify()
            return True

    def stop(self, why: str) -> None:
        """Break the connection, end the thread, fail what is pending."""
        with self._ready:
            self._stopped = why
            self._ready.notify()
            if self._socket is not None:
                wire.shut(self._socket)
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._queue or self._stopped)
                if self._stopped:
                    break
                frame = self._queue.popleft()
            self._transport.finish(frame.ticket_id, self._carry_out(frame))
        self._disconnect()
        for frame in self._queue:
            self._transport.finish(frame.ticket_id, WriteStatus(WriteState.FAILED, self._stopped))

    def _carry_out(self, frame: wire.WriteFrame) -> WriteStatus:
        deadline = wire.Deadline(self._transport.write_timeout)
        where = f"session {self._peer.session_id} at {self._peer.endpoint}"
        try:
            sock = self._connect()
        except (OSError, wire.ProtocolError) as error:
            # Not a byte of this write was sent.
            self._disconnect()
            return WriteStatus(WriteState.FAILED, self._stopped or f"cannot connect to {where}: {error}")
        try:
            frame.send(sock, deadline)
            refusal = wire.receive_reply(sock, frame.ticket_id, deadline)
        except TimeoutError:
            self._disconnect()
            late = f"{where} did not take a write of {frame.num_bytes} bytes within {deadline.seconds:g} s"
            return WriteStatus(WriteState.LOST, self._stopped or late)
        except (OSError, wire.ProtocolError) as error:
            self._disconnect()
            return WriteStatus(WriteState.LOST, self._stopped or f"connection to {where} broke: {error}")
        if refusal is not None:
            self._disconnect()
            return WriteStatus(WriteState.FAILED, f"{where} refused the write: {refusal}")
        return WriteStatus(WriteState.DONE)

    def _connect(self) -> socket.socket:
        if self._socket is not None and not wire.is_broken(self._socket):
            return self._socket
        self._disconnect()
        deadline = wire.Deadline(self._transport.connect_timeout)
        sock = wire.connect(self._peer.endpoint, deadline, lambda: self._stopped is not None)
        with self._ready:
            self._socket = sock
            if self._stopped:
                wire.shut(sock)
        wire.send_hello(sock, self._peer.session_id, deadline)
        return sock

    def _disconnect(self) -> None:
        with self._ready:
            sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()


class _Listener:
    """Takes connections for the sessions we opened, one at a time for each, and reads into our memory."""

    def __init__(self, host: str, memory: wire.Memory) -> None:
        self._memory = memory
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=128)
        name = f"[{host}]" if ":" in host else host
        self.endpoint = f"{name}:{self._socket.getsockname()[1]}"
        self._lock = threading.Lock()
        # Session -> its connection, if there is one. Only sessions in here are let in.
        self._sessions: dict[str, _Incoming | None] = {}
        self._unnamed: set[_Incoming] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-accept", daemon=True)
        self._thread.start()

    def admit(self, session_id: str) -> None:
        with self._lock:
            self._sessions[session_id] = None

    def dismiss(self, session_id: str) -> None:
        with self._lock:
            incoming = self._sessions.pop(session_id, None)
        if incoming is not None:
            incoming.stop()

    def enter(self, incoming: _Incoming, session_id: str) -> bool:
        """Let a connection in under a session. An older one of the same session ends first: one writer at a time."""
        while True:
            with self._lock:
                self._unnamed.discard(incoming)
                if session_id not in self._sessions or self._closed:
                    return False
                older = self._sessions[session_id]
                if older is None or older.is_over:
                    self._sessions[session_id] = incoming
                    return True
            older.stop()

    def leave(self, incoming: _Incoming) -> None:
        with self._lock:
            self._unnamed.discard(incoming)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            incoming = [i for i in self._sessions.values() if i is not None] + list(self._unnamed)
            self._sessions.clear()
        wire.shut(self._socket)
        self._thread.join()
        self._socket.close()
        for connection in incoming:
            connection.stop()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                logger.warning("cannot take a data connection: %s", error)
                continue
            incoming = _Incoming(self, sock, self._memory)
            with self._lock:
                self._unnamed.add(incoming)
            incoming.start()


class _Incoming:
    """One connection that writes into our memory, and its thread."""

    def __init__(self, listener: _Listener, sock: socket.socket, memory: wire.Memory) -> None:
        self._listener = listener
        self._socket = sock
        self._memory = memory
        self._thread = threading.Thread(target=self._run, name="kv-receive", daemon=True)

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """When this returns, the connection writes nothing any more."""
        wire.shut(self._socket)
        self._thread.join()

    def _run(self) -> None:
        try:
            session_id = wire.receive_hello(self._socket)
            if not self._listener.enter(self, session_id):
                wire.send_reply(self._socket, wire.HELLO_ID, "the session is unknown or drained: shake hands again")
                return
            wire.send_reply(self._socket, wire.HELLO_ID, None)
            while wire.receive_write(self._socket, self._memory):
                pass
        except (OSError, wire.ProtocolError) as error:
            logger.info("data connection ended: %s", error)
        finally:
            self._listener.leave(self)
            self._socket.close()
