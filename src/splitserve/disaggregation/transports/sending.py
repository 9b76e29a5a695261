"""The writes to one session: their order, the connection they go over, and what a failure proves.

1. `offer` queues a write. `go_on` carries it out at once where it is brief, else it wakes the session's thread.
2. Who takes writes from the queue has the turn until they are final; it alone uses the connection.
3. Small writes that wait behind each other go as one: their bytes take less time than a write's round trip. Where one
   of them is refused, each goes alone.
4. `stop` wakes the thread, which waits for the turn a last time: then nobody writes, and nobody will.

A brief write is one that never waits for the peer (shared memory): waking a thread and being woken by it takes longer.
Tickets and their states are kept by whoever gave `finish`.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from splitserve.disaggregation.copies import Copies, copy_table, num_bytes
from splitserve.disaggregation.transports.backend import Backend, LocalOutgoing, Outgoing, WriteRefused
from splitserve.disaggregation.transports.base import PeerAddress, Ticket, TransportOptions, WriteState, WriteStatus
from splitserve.disaggregation.transports.door import knock
from splitserve.disaggregation.transports.sockets import Deadline, shut

# Writes to one session that may wait for their turn.
MAX_PENDING_WRITES = 1024
_NOTHING = copy_table([])

# Told once, from any thread, how a write ended.
Finish = Callable[[Ticket, WriteStatus], None]


@dataclass(frozen=True, slots=True)
class Write:
    ticket: Ticket
    copies: Copies
    # Of all copies.
    num_bytes: int
    # To be called instead of copying anything.
    action: Callable[[], None] | None = None

    @classmethod
    def of(cls, ticket: Ticket, copies: Copies) -> Write:
        return cls(ticket, copies, num_bytes(copies))

    @classmethod
    def of_action(cls, ticket: Ticket, action: Callable[[], None]) -> Write:
        return cls(ticket, _NOTHING, 0, action)

    def is_brief(self, brief_bytes: int) -> bool:
        return brief_bytes > 0 and self.action is None and self.num_bytes <= brief_bytes

    def carry_out(self, outgoing: Outgoing, deadline: Deadline) -> None:
        if self.action is None:
            outgoing.write(self.ticket.id, self.copies, deadline)
        else:
            cast(LocalOutgoing, outgoing).call(self.action)


def _joined(writes: Sequence[Write]) -> Write:
    """One write of all their bytes, under the first one's name."""
    if len(writes) == 1:
        return writes[0]
    return Write.of(writes[0].ticket, np.concatenate([write.copies for write in writes]))


class Sender:
    """A bounded queue, a connection made when it is needed, one thread for both."""

    def __init__(self, backend: Backend, options: TransportOptions, peer: PeerAddress, finish: Finish) -> None:
        self._backend = backend
        self._options = options
        self._peer = peer
        self._finish = finish
        self._ready = threading.Condition()
        self._queue: deque[Write] = deque()
        self._is_taken = False
        self._socket: socket.socket | None = None
        self._outgoing: Outgoing | None = None
        self._stopped: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"kv-send-{peer.endpoint}", daemon=True)
        self._thread.start()

    def offer(self, write: Write) -> bool:
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
            is_brief = self._queue[0].is_brief(self._backend.brief_bytes)
            if not is_brief or outgoing is None or not outgoing.is_alive():
                self._ready.notify()
                return
            writes = self._take(self._backend.brief_bytes)
        self._carry_out(writes, outgoing)

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
                writes = self._take(self._backend.joined_bytes)
            self._carry_out(writes)
        self._disconnect()
        for write in self._queue:
            self._finish(write.ticket, WriteStatus(WriteState.FAILED, self._stopped))

    def _take(self, max_bytes: int) -> list[Write]:
        """The next writes that may go as one, and with them the turn. With the lock held."""
        self._is_taken = True
        writes = [self._queue.popleft()]
        total = writes[0].num_bytes
        while self._queue and writes[0].action is None and self._queue[0].action is None:
            total += self._queue[0].num_bytes
            if total > max_bytes:
                break
            writes.append(self._queue.popleft())
        return writes

    def _carry_out(self, writes: Sequence[Write], outgoing: Outgoing | None = None) -> None:
        """Have the turn until the writes are final. Without a live connection, make one."""
        try:
            try:
                self._end(writes, self._outcome(writes, outgoing))
            except WriteRefused:
                self._disconnect()
                for write in writes:
                    self._end([write], self._outcome([write]))
        finally:
            with self._ready:
                self._is_taken = False
                if self._queue or self._stopped:
                    self._ready.notify()

    def _end(self, writes: Sequence[Write], status: WriteStatus) -> None:
        if status.state is not WriteState.DONE:
            self._disconnect()
        for write in writes:
            self._finish(write.ticket, status)

    def _outcome(self, writes: Sequence[Write], outgoing: Outgoing | None = None) -> WriteStatus:
        """Raises WriteRefused where it cannot be told which of several writes is at fault."""
        deadline = Deadline(self._options.write_timeout)
        where = f"session {self._peer.session_id} at {self._peer.endpoint}"
        try:
            outgoing = outgoing or self._connect()
        except Exception as error:
            # Not a byte of these writes was sent.
            return WriteStatus(WriteState.FAILED, self._stopped or f"cannot connect to {where}: {_text(error)}")
        write = _joined(writes)
        try:
            write.carry_out(outgoing, deadline)
        except WriteRefused as refusal:
            if len(writes) > 1:
                raise
            return WriteStatus(WriteState.FAILED, self._stopped or f"{where} refused the write: {refusal}")
        except TimeoutError:
            late = f"{where} did not take a write of {write.num_bytes} bytes within {deadline.seconds:g} s"
            return WriteStatus(WriteState.LOST, self._stopped or late)
        except Exception as error:
            # Also of a library: whatever it was, nobody vouches for the rest of the write.
            return WriteStatus(WriteState.LOST, self._stopped or f"connection to {where} broke: {_text(error)}")
        return WriteStatus(WriteState.DONE)

    def _connect(self) -> Outgoing:
        if self._outgoing is not None and self._outgoing.is_alive():
            return self._outgoing
        self._disconnect()
        deadline = Deadline(self._options.connect_timeout)
        sock, welcome = knock(
            self._peer.endpoint, self._peer.session_id, self._options.token, deadline, lambda: self._stopped is not None
        )
        with self._ready:
            self._socket = sock
            if self._stopped:
                shut(sock)
        outgoing = self._backend.connect(sock, welcome, deadline)
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
