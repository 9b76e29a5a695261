"""Sending end of a mooncake connection: gathers into slots and transfers them by the engine. See `mooncake.py`."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque

from splitserve.transfer.copies import Copies, coalesce, num_bytes
from splitserve.transfer.transports import sockets
from splitserve.transfer.transports.aux_data import AuxData
from splitserve.transfer.transports.base import WriteRefused
from splitserve.transfer.transports.memory import Memory
from splitserve.transfer.transports.mooncake_engine import MooncakeError, MooncakeTransferEngine, Transfer, give_back
from splitserve.transfer.transports.mooncake_wire import (
    MooncakeWelcome,
    is_inline,
    receive_reply,
    send_ready,
    write_frame,
)
from splitserve.transfer.transports.ranges import MAX_RANGES
from splitserve.transfer.transports.sockets import Deadline
from splitserve.transfer.transports.staging import Pieces, StagingBuffer

# Seconds between two polls of a transfer: a slot takes some 2 ms.
POLL_SECONDS = 0.0002


class MooncakeOutgoing:
    """Sending end. It owns its engine and its staging buffer until it is closed and no transfer reads the buffer."""

    def __init__(
        self,
        sock: socket.socket,
        memory: Memory,
        aux: AuxData,
        engine: MooncakeTransferEngine,
        peer: MooncakeWelcome,
        staging: StagingBuffer,
    ) -> None:
        self._socket = sock
        self._memory = memory
        self._aux = aux
        self._engine = engine
        self._peer = peer
        self._staging = staging
        self._is_registered = False
        self._under_way: deque[Transfer] = deque()
        # The thread of a probe that exceeded its deadline. It keeps the engine in use.
        self._probe: threading.Thread | None = None

    def open(self) -> None:
        """Register the staging buffer if the protocol needs it. Raises MooncakeError."""
        # Over tcp the library reads any memory without registration.
        if self._engine.protocol == "rdma":
            self._engine.register(self._staging.address, self._staging.num_bytes)
            self._is_registered = True

    def probe(self, deadline: Deadline) -> None:
        """Transfer eight bytes to prove the engine's path before the first write. Raises TimeoutError, MooncakeError.

        The library's first contact has no timeout, so it runs in a thread of its own.
        """
        failures: list[MooncakeError] = []

        def contact() -> None:
            try:
                self._engine.transfer_sync(self._peer.session_id, self._staging.address, self._peer.address, 8)
            except MooncakeError as error:
                failures.append(error)

        self._probe = threading.Thread(target=contact, name="mooncake-probe", daemon=True)
        self._probe.start()
        while self._probe.is_alive():
            self._probe.join(min(0.05, deadline.remaining()))
            if sockets.is_broken(self._socket):
                raise ConnectionError(f"connection ended before mooncake's engine at {self._peer.session_id} answered")
        if failures:
            raise failures[0]

    def write(self, ticket_id: int, copies: Copies, deadline: Deadline) -> None:
        copies = coalesce(copies)
        if len(copies) > MAX_RANGES:
            raise WriteRefused(f"{len(copies)} copies in one write: at most {MAX_RANGES}")
        sockets.set_send_timeout(self._socket, deadline.remaining())
        head, addresses = write_frame(ticket_id, copies), self._memory.sources(copies)
        if is_inline(copies):
            data = self._aux.serialize_data_from_buffer(addresses, copies["length"])
            with sockets.timeouts_by_name():
                self._socket.sendall(head + data)
            receive_reply(self._socket, ticket_id, deadline)
        else:
            with sockets.timeouts_by_name():
                self._socket.sendall(head)
            self._write_staged(ticket_id, Pieces(addresses, copies["length"]), num_bytes(copies), deadline)

    def is_alive(self) -> bool:
        return not sockets.is_broken(self._socket)

    def interrupt(self) -> None:
        """Do nothing: `write` polls the socket, and ends when the caller has shut it."""

    def close(self) -> None:
        """Release the engine. The staging buffer, a copy of our pages, is released after the last transfer from it."""
        if self._probe is not None and self._probe.is_alive():
            threading.Thread(target=self._let_go, args=(self._probe,), name="mooncake-probe", daemon=True).start()
        else:
            self._let_go()

    def _let_go(self, probe: threading.Thread | None = None) -> None:
        if probe is not None:
            probe.join()
        give_back(self._engine, self._under_way, self._release)

    def _release(self) -> None:
        """Release the staging buffer after the last transfer from it."""
        if self._is_registered:
            try:
                self._engine.deregister(self._staging.address)
            except MooncakeError:
                # The library may still read the buffer.
                self._engine.kept.append(self._staging)
                raise
        self._staging.discard()

    def _write_staged(self, ticket_id: int, pieces: Pieces, length: int, deadline: Deadline) -> None:
        num_chunks = -(-length // self._peer.slot_bytes)
        gathered = ready = 0
        # Number of chunks in place. None: the receiver has not accepted the write yet.
        taken: int | None = None
        while taken != num_chunks:
            deadline.remaining()
            while gathered < num_chunks and gathered - (taken or 0) < self._peer.num_slots:
                self._send_chunk(gathered, pieces, length)
                gathered += 1
            # Announce chunks only after acceptance: a receiver that refuses the write would read the message as its
            # next write.
            while taken is not None and self._has_arrived():
                with sockets.timeouts_by_name():
                    send_ready(self._socket, ticket_id, ready)
                ready += 1
            if not self._under_way or sockets.has_data(self._socket):
                taken = receive_reply(self._socket, ticket_id, deadline)
            else:
                time.sleep(POLL_SECONDS)

    def _send_chunk(self, chunk: int, pieces: Pieces, length: int) -> None:
        first = chunk * self._peer.slot_bytes
        end = min(first + self._peer.slot_bytes, length)
        slot = chunk % self._peer.num_slots
        self._staging.gather(slot, pieces.between(first, end))
        target = self._peer.address + slot * self._peer.slot_bytes
        self._under_way.append(
            self._engine.submit(self._peer.session_id, self._staging.slot_address(slot), target, end - first)
        )

    def _has_arrived(self) -> bool:
        """Return whether the oldest transfer has succeeded. Raises MooncakeError if it failed."""
        if not self._under_way:
            return False
        oldest = self._under_way.popleft()
        # The library forgets a failed transfer, so it must not be polled again.
        if self._engine.is_done(oldest):
            return True
        self._under_way.appendleft(oldest)
        return False
