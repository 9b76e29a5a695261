"""Listener of a transport: the data port of a worker and its sessions, the same for every backend.

1. One thread accepts connections and does their handshakes (`frames.py`), all at once and without waiting for any.
2. Unauthenticated connections are few and short-lived (`pending.py`). Each costs a descriptor, but no thread.
3. An authenticated connection gets a thread of its own, which enters its session and serves it.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import threading
from dataclasses import dataclass

from splitserve.core.clock import SystemClock
from splitserve.process.authentication import ResponderHandshake
from splitserve.transfer.pending import PendingHandshakes
from splitserve.transfer.transports.backend import Incoming
from splitserve.transfer.transports.frames import DATA_PROTOCOL, ProtocolError, session_info_frame
from splitserve.transfer.transports.sockets import abort, set_receive_timeout, set_send_timeout, shut, tune

logger = logging.getLogger(__name__)

# Seconds that an authenticated peer may take to read its session info or a refusal.
GRACE_SECONDS = 10.0
# Size of the kernel's queue of connections that are not accepted yet.
BACKLOG = 1024
# Connections accepted in a row, before handshakes continue.
_MAX_ACCEPTS = 32
# Seconds until the next attempt after a connection could not be accepted, for example because memory is short.
_PAUSE_SECONDS = 0.1
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


@dataclass(slots=True)
class _Session:
    incoming: Incoming
    # The connection that entered last.
    connection: PeerConnection | None = None
    is_open: bool = True
    # Whether the connection was closed and `incoming` revoked.
    is_over: bool = False


class _PendingConnection:
    def __init__(self, sock: socket.socket, address: str, token: bytes) -> None:
        self.socket = sock
        self.address = address
        self.handshake = ResponderHandshake(DATA_PROTOCOL, token)


class DataListener:
    """Listener on a free port of `host` that admits peers with the cluster token to the open sessions."""

    def __init__(self, host: str, token: bytes) -> None:
        self._token = token
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        # Set options before a peer connects: the first packets of a connection fix the scale of its window.
        tune(self._socket)
        self._socket.setblocking(False)
        name = f"[{host}]" if ":" in host else host
        self.endpoint = f"{name}:{self._socket.getsockname()[1]}"
        self.pending: PendingHandshakes[_PendingConnection] = PendingHandshakes(
            f"data port {self.endpoint}", SystemClock()
        )
        self._lock = threading.Lock()
        self._connections: set[PeerConnection] = set()
        # Sessions by id until they are fenced.
        self._sessions: dict[str, _Session] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-accept", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> list[PeerConnection]:
        """Return the connections that have authenticated."""
        with self._lock:
            return list(self._connections)

    def discard(self, connection: PeerConnection) -> None:
        with self._lock:
            self._connections.discard(connection)

    def open(self, session_id: str, incoming: Incoming) -> None:
        with self._lock:
            self._sessions[session_id] = _Session(incoming)

    def enter(self, connection: PeerConnection) -> _Session:
        """Enter the connection's session. First end an older connection: one writer at a time. Raises ProtocolError."""
        while True:
            with self._lock:
                session = self._sessions.get(connection.session_id)
                if session is None or not session.is_open or self._closed.is_set():
                    raise ProtocolError("the session is unknown or drained: shake hands again")
                older = session.connection
                if older is None or older.is_over:
                    session.connection = connection
                    return session
            older.stop()

    def end(self, session_id: str) -> None:
        """End a session, if it is open: close its connection and prevent further writes."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None or not session.is_open:
                return
            session.is_open = False
        try:
            if session.connection is not None:
                session.connection.stop()
            session.incoming.revoke()
        finally:
            # Set it after an error, too: `is_fenced` also requires that no write of `incoming` can be in flight.
            session.is_over = True
        self.is_fenced(session_id)

    def is_fenced(self, session_id: str) -> bool:
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None:
                return True
            if not session.is_over or not session.incoming.is_fenced():
                return False
            del self._sessions[session_id]
            return True

    def close(self) -> None:
        """Stop accepting connections, close those that are open and end all sessions. Idempotent."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        shut(self._socket)
        self._thread.join()
        self._socket.close()
        for connection in self.connections:
            connection.stop()
        for session_id in list(self._sessions):
            self.end(session_id)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while not self._closed.is_set():
                events = selector.select(self.pending.seconds_left())
                # Handshakes come before new connections and before deadlines, so bytes that have arrived count as in
                # time.
                for key, _ in events:
                    if key.data is not None:
                        self._advance(selector, key.data)
                if any(key.data is None for key, _ in events):
                    self._accept(selector)
                for late in self.pending.expire():
                    self._close(selector, late)
            for key in list(selector.get_map().values()):
                if key.data is not None:
                    key.data.socket.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        for _ in range(_MAX_ACCEPTS):
            try:
                sock, peer = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if not self._closed.is_set():
                    self._make_room(selector, error)
                return
            connection = _PendingConnection(sock, str(peer[0]), self._token)
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_READ, connection)
            if dropped := self.pending.add(connection, connection.address):
                self._close(selector, dropped)

    def _make_room(self, selector: selectors.BaseSelector, error: OSError) -> None:
        oldest = self.pending.drop_oldest("no descriptors are left") if error.errno in _NO_DESCRIPTORS else None
        if oldest is not None:
            self._close(selector, oldest)
            return
        logger.warning("cannot accept a data connection: %s", error)
        self._closed.wait(_PAUSE_SECONDS)

    def _advance(self, selector: selectors.BaseSelector, connection: _PendingConnection) -> None:
        """Continue a handshake with the bytes that its peer has sent so far."""
        handshake = connection.handshake
        try:
            data = connection.socket.recv(handshake.wanted)
            reply = handshake.feed(data)
            # The frame has few bytes and the connection is new, so its buffer has room.
            if reply and connection.socket.send(reply) < len(reply):
                handshake.problem = "it did not read its challenge"
        except BlockingIOError:
            return
        except OSError as error:
            data, handshake.problem = b"", str(error)
        if not data:
            self.pending.remove(connection)
            self._close(selector, connection)
        elif handshake.problem is not None:
            self.pending.reject(connection, handshake.problem)
            self._close(selector, connection)
        elif handshake.peer_name is not None:
            self.pending.remove(connection)
            selector.unregister(connection.socket)
            self._begin(connection.socket, handshake.peer_name)

    def _begin(self, sock: socket.socket, session_id: str) -> None:
        connection = PeerConnection(self, sock, session_id)
        with self._lock:
            self._connections.add(connection)
        try:
            connection.start()
        except RuntimeError as error:
            # No more threads are available.
            logger.warning("a data connection was closed: %s", error)
            self.discard(connection)
            sock.close()

    def _close(self, selector: selectors.BaseSelector, connection: _PendingConnection) -> None:
        selector.unregister(connection.socket)
        connection.socket.close()


class PeerConnection:
    """One connection from an authenticated sender, and its thread."""

    def __init__(self, listener: DataListener, sock: socket.socket, session_id: str) -> None:
        self._listener = listener
        self.session_id = session_id
        self.socket = sock
        self._thread = threading.Thread(target=self._run, name="kv-receive", daemon=True)

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close the connection. On return, its thread has ended and the sender has been notified."""
        abort(self.socket)
        self._thread.join()

    def _run(self) -> None:
        sock = self.socket
        try:
            sock.setblocking(True)
            tune(sock)
            set_send_timeout(sock, GRACE_SECONDS)
            session = self._enter()
            # From here on the sender's deadlines count: a connection may be idle for a long time.
            set_receive_timeout(sock, 0)
            if session.is_open:
                session.incoming.serve(sock)
        except (OSError, ProtocolError) as error:
            logger.info("data connection ended: %s", error)
        finally:
            self._listener.discard(self)
            sock.close()

    def _enter(self) -> _Session:
        """Enter the session and send its info, or a refusal. Raises OSError, ProtocolError."""
        try:
            session = self._listener.enter(self)
            session_info = session.incoming.session_info()
        except ProtocolError as refusal:
            self.socket.sendall(session_info_frame(refusal=str(refusal)))
            raise
        self.socket.sendall(session_info_frame(session_info))
        return session
