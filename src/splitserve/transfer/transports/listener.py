"""Listener of a transport: the data port of a worker, the same for every backend.

1. One thread accepts connections and does their handshakes (`handshake.py`), all at once and without waiting for any.
2. Unauthenticated connections are few and short-lived (`pending.py`). Each costs a descriptor, but no thread.
3. An authenticated connection gets a thread of its own, which opens its session and serves it.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import threading
from typing import Protocol

from splitserve.core.clock import SystemClock
from splitserve.process.authentication import ResponderHandshake
from splitserve.transfer.pending import PendingHandshakes
from splitserve.transfer.transports.handshake import DATA_PROTOCOL, ProtocolError, session_info_frame
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


class SessionHost(Protocol):
    """Owner of a listener: admits connections to sessions and serves them."""

    def enter(self, connection: PeerConnection, session_id: str) -> bytes:
        """Register the connection under its session. Return the data for the sender. Raises ProtocolError to refuse."""
        ...

    def serve(self, connection: PeerConnection, session_id: str) -> None:
        """Serve the connection until it ends. Runs in the connection's own thread."""
        ...


class _PendingConnection:
    def __init__(self, sock: socket.socket, address: str, token: bytes) -> None:
        self.socket = sock
        self.address = address
        self.handshake = ResponderHandshake(DATA_PROTOCOL, token)


class DataListener:
    """Listener on a free port of `host` that admits peers with the cluster token."""

    def __init__(self, host: str, token: bytes, sessions: SessionHost) -> None:
        self._token = token
        self.sessions = sessions
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

    def close(self) -> None:
        """Stop accepting connections and close those that are open. Idempotent."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        shut(self._socket)
        self._thread.join()
        self._socket.close()
        for connection in self.connections:
            connection.stop()

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
        self._session_id = session_id
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
        try:
            self._enter()
            self._listener.sessions.serve(self, self._session_id)
        except (OSError, ProtocolError) as error:
            logger.info("data connection ended: %s", error)
        finally:
            self._listener.discard(self)
            self.socket.close()

    def _enter(self) -> None:
        sock = self.socket
        sock.setblocking(True)
        tune(sock)
        set_send_timeout(sock, GRACE_SECONDS)
        try:
            session_info = self._listener.sessions.enter(self, self._session_id)
        except ProtocolError as refusal:
            sock.sendall(session_info_frame(refusal=str(refusal)))
            raise
        sock.sendall(session_info_frame(session_info))
        # From here on the sender's deadlines count: a connection may be idle for a long time.
        set_receive_timeout(sock, 0)
