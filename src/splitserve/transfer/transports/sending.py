"""Writes to one session: their order, their connection, and what a failure proves.

1. `offer` queues a write. `go_on` performs it at once if it is brief, else it wakes the session's thread.
2. A thread that takes writes from the queue has the turn until they are final. Only it uses the connection.
3. Small writes that wait behind each other are sent as one: their bytes take less time than a round trip. If one of
   them is refused, each is sent alone.
4. A backend may send a write and prove it later. Then the next writes are sent without waiting for that proof.
5. `stop` wakes the thread, which waits for the turn a last time. After that no thread writes any more.

A brief write never waits for the peer (shared memory). Waking a thread and being woken by it would take longer.
The owner of `finish` keeps the tickets and their states.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from splitserve.transfer.copies import Copies, copy_table, joined
from splitserve.transfer.transports.backend import ConnectionBackend, Proof, SendingEnd
from splitserve.transfer.transports.base import (
    PeerAddress,
    Ticket,
    TransportOptions,
    WriteRefused,
    WriteState,
    WriteStatus,
)
from splitserve.transfer.transports.frames import initiate
from splitserve.transfer.transports.sockets import Deadline, connect, shut

logger = logging.getLogger(__name__)

# Maximum number of queued writes to one session.
MAX_PENDING_WRITES = 1024
# Maximum number of sent but unproven writes: the receiver takes one while the next is sent. Each may be several writes
# joined into one.
MAX_UNPROVEN_WRITES = 2
# Attempts at the handshake of one connection if the receiver closes it, and seconds between two attempts.
MAX_HANDSHAKES = 5
HANDSHAKE_PAUSE = 0.05
# Copies of a write that only calls an action.
NOTHING = copy_table([])

# Called once with the final status of each write, from any thread. Writes sent as one are passed together.
Finish = Callable[[Sequence[Ticket], WriteStatus], None]


class Write(msgspec.Struct, frozen=True):
    ticket: Ticket
    copies: Copies
    # Total length of all copies.
    num_bytes: int
    # Called instead of copying anything.
    action: Callable[[], None] | None = None


def _joined(writes: Sequence[Write]) -> Write:
    """Return one write of all their bytes, with the first one's ticket."""
    if len(writes) == 1:
        return writes[0]
    copies = joined([write.copies for write in writes])
    return Write(writes[0].ticket, copies, sum(write.num_bytes for write in writes))


class _Batch:
    """Writes that are sent as one. The deadline starts with their turn."""

    def __init__(self, writes: Sequence[Write], timeout: float) -> None:
        self.writes = writes
        self.joined = _joined(writes)
        self.deadline = Deadline(timeout)
        self.proof: Proof | None = None
        self.path = ""

    def send(self, outgoing: SendingEnd) -> None:
        self.path = outgoing.path
        if self.joined.action is None:
            self.proof = outgoing.write(self.joined.ticket.id, self.joined.copies, self.deadline)
        else:
            outgoing.call(self.joined.action)


class Sender:
    """Bounded queue of writes, a connection made on demand, and one thread for both."""

    def __init__(
        self, backend: ConnectionBackend, options: TransportOptions, peer: PeerAddress, finish: Finish
    ) -> None:
        self._backend = backend
        self._options = options
        self._peer = peer
        self._where = f"session {peer.session_id} at {peer.endpoint}"
        self._finish = finish
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._queue: deque[Write] = deque()
        self._is_taken = False
        # Used only by the thread that has the turn.
        self._unproven: deque[_Batch] = deque()
        self._socket: socket.socket | None = None
        self._outgoing: SendingEnd | None = None
        self._stopped: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"kv-send-{peer.endpoint}", daemon=True)
        self._thread.start()

    def offer(self, write: Write) -> bool:
        with self._lock:
            if len(self._queue) >= MAX_PENDING_WRITES:
                return False
            self._queue.append(write)
            return True

    def go_on(self) -> None:
        """Start the next writes. Call it after an `offer`, without holding the caller's locks."""
        with self._lock:
            # The thread that has the turn checks the queue again.
            if self._is_taken or self._stopped or not self._queue:
                return
            outgoing, write, most = self._outgoing, self._queue[0], self._backend.brief_bytes
            is_brief = most > 0 and write.action is None and write.num_bytes <= most
            if not is_brief or outgoing is None or not outgoing.is_alive():
                self._ready.notify()
                return
            writes = self._take(most)
        self._carry_out(writes, outgoing)

    def stop(self, why: str) -> None:
        """Break the connection, end the thread, and fail pending writes."""
        with self._lock:
            self._stopped = why
            self._ready.notify()
            if self._socket is not None:
                shut(self._socket)
            if self._outgoing is not None:
                self._outgoing.interrupt()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._ready.wait_for(lambda: not self._is_taken and (self._queue or self._stopped))
                if self._stopped:
                    break
                writes = self._take(self._backend.joined_bytes)
            self._carry_out(writes)
        self._disconnect()
        if self._queue:
            self._finish([write.ticket for write in self._queue], WriteStatus(WriteState.FAILED, self._stopped))

    def _take(self, max_bytes: int) -> list[Write]:
        """Take the next writes that may be sent as one, and the turn. Call with the lock held."""
        self._is_taken = True
        writes = [self._queue.popleft()]
        total = writes[0].num_bytes
        while self._queue and writes[0].action is None and self._queue[0].action is None:
            total += self._queue[0].num_bytes
            if total > max_bytes:
                break
            writes.append(self._queue.popleft())
        return writes

    def _carry_out(self, writes: Sequence[Write], outgoing: SendingEnd | None = None) -> None:
        """Keep the turn until the writes, and those sent behind them, are final.

        `outgoing`: live connection. None: use the current one or connect.
        """
        try:
            while writes:
                self._send(writes, outgoing)
                writes, outgoing = self._take_behind(), None
                while self._unproven and not writes:
                    self._prove()
                    writes = self._take_behind()
        finally:
            with self._lock:
                self._is_taken = False
                if self._queue or self._stopped:
                    self._ready.notify()

    def _take_behind(self) -> Sequence[Write]:
        """Take the next writes if they may be sent before the writes in flight are proven.

        Large writes may not: a round trip is short compared with them, and they would delay the proofs of the writes in
        flight.
        """
        if not 0 < len(self._unproven) < MAX_UNPROVEN_WRITES:
            return ()
        with self._lock:
            if not self._queue or self._stopped:
                return ()
            following, most = self._queue[0], self._backend.joined_bytes
            return self._take(most) if following.action is None and following.num_bytes <= most else ()

    def _send(self, writes: Sequence[Write], outgoing: SendingEnd | None = None) -> None:
        """Send writes as one batch. A batch that is not final afterwards is in `_unproven`."""
        batch = _Batch(writes, self._options.write_timeout)
        try:
            if self._stopped:
                raise ConnectionAbortedError(self._stopped)
            outgoing = outgoing or self._connect()
        except Exception as error:
            # No byte of these writes was sent. Earlier writes end first.
            self._settle()
            why = self._stopped or f"cannot connect to {self._where}: {_text(error)}"
            self._end(batch, WriteStatus(WriteState.FAILED, why))
            return
        try:
            batch.send(outgoing)
        except WriteRefused as refusal:
            # The refusal does not concern writes sent earlier.
            self._settle()
            self._end_refused(batch, refusal)
        except Exception as error:
            # The proof of an earlier write may already have arrived.
            if self._settle():
                self._send_each(writes)
            else:
                self._lose([batch], error)
        else:
            if batch.proof is None:
                self._end(batch, WriteStatus(WriteState.DONE, path=batch.path))
            else:
                self._unproven.append(batch)

    def _prove(self) -> bool:
        """Wait for the proof of the oldest unproven batch. Return True if it was refused.

        A refusal ends the connection, and nothing sent behind it was received. Those writes are sent again.
        """
        batch = self._unproven[0]
        try:
            assert batch.proof is not None
            batch.proof()
        except WriteRefused as refusal:
            behind = [write for other in list(self._unproven)[1:] for write in other.writes]
            self._unproven.clear()
            self._end_refused(batch, refusal)
            self._send_each(behind)
            return True
        except Exception as error:
            self._lose(list(self._unproven), error)
        else:
            self._unproven.popleft()
            self._end(batch, WriteStatus(WriteState.DONE, path=batch.path))
        return False

    def _settle(self) -> bool:
        """Wait for the proofs of all unproven batches. Return True if any was refused."""
        was_refused = False
        while self._unproven:
            was_refused = self._prove() or was_refused
        return was_refused

    def _send_each(self, writes: Sequence[Write]) -> None:
        for write in writes:
            self._send([write])
            self._settle()

    def _end_refused(self, batch: _Batch, refusal: WriteRefused) -> None:
        """Fail a refused write. Of several joined writes, it is not known which was refused: send each alone."""
        if len(batch.writes) == 1:
            why = self._stopped or f"{self._where} refused the write: {refusal}"
            self._end(batch, WriteStatus(WriteState.FAILED, why))
        else:
            self._disconnect()
            self._send_each(batch.writes)

    def _lose(self, batches: Sequence[_Batch], error: Exception) -> None:
        """Mark batches LOST after any other error, including a library's. A timeout is the fault of the first batch."""
        _release_frames(error)
        self._unproven.clear()
        for batch in batches:
            if isinstance(error, TimeoutError) and batch is batches[0]:
                seconds = batch.deadline.seconds
                why = f"{self._where} did not take a write of {batch.joined.num_bytes} bytes within {seconds:g} s"
            else:
                why = f"connection to {self._where} broke: {_text(error)}"
            self._end(batch, WriteStatus(WriteState.LOST, self._stopped or why))

    def _end(self, batch: _Batch, status: WriteStatus) -> None:
        if status.state is not WriteState.DONE:
            self._disconnect()
        self._finish([write.ticket for write in batch.writes], status)

    def _connect(self) -> SendingEnd:
        # Unproven writes tie the next ones to their connection: their proofs arrive there, or all are lost together.
        if self._outgoing is not None and (self._unproven or self._outgoing.is_alive()):
            return self._outgoing
        self._disconnect()
        deadline = Deadline(self._options.connect_timeout)
        sock, session_info = self._connect_as_sender(deadline)
        outgoing = self._backend.connect(sock, session_info, deadline)
        with self._lock:
            self._outgoing = outgoing
            if self._stopped:
                outgoing.interrupt()
        return outgoing

    def _connect_as_sender(self, deadline: Deadline) -> tuple[socket.socket, bytes]:
        """Connect and authenticate. Return the connection and its session info. Raises OSError, ProtocolError."""
        for attempts_left in reversed(range(MAX_HANDSHAKES)):
            sock = connect(self._peer.endpoint, deadline, lambda: self._stopped is not None)
            with self._lock:
                # From here on `stop` ends every wait.
                self._socket = sock
                if self._stopped:
                    shut(sock)
            try:
                return sock, initiate(sock, self._peer.session_id, self._options.token, deadline)
            except ConnectionError:
                # Under a flood of connections, the receiver may have dropped this one for a newer one.
                if self._stopped or not attempts_left:
                    raise
            self._disconnect()
            time.sleep(HANDSHAKE_PAUSE)
        raise AssertionError("unreachable")

    def _disconnect(self) -> None:
        with self._lock:
            outgoing, self._outgoing = self._outgoing, None
            sock, self._socket = self._socket, None
        if outgoing is not None:
            try:
                outgoing.close()
            except Exception:
                # A transport library raised. Continue, because tickets wait for this thread.
                logger.exception("a connection to %s ended badly", self._where)
        if sock is not None:
            sock.close()


def _release_frames(error: BaseException | None) -> None:
    """Drop an error's frames. They keep objects alive, such as a library's agent that must end with its connection."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def _text(error: Exception) -> str:
    return str(error) or repr(error)
