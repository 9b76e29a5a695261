"""Receiving end of a mooncake session: one staging buffer per connection. Our own thread scatters (`mooncake.py`)."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

import msgspec

from splitserve.core.errors import SplitserveError
from splitserve.transfer.transports.handshake import ProtocolError
from splitserve.transfer.transports.memory import Memory
from splitserve.transfer.transports.mooncake_engine import MooncakeError, MooncakeTransferEngine, library_version
from splitserve.transfer.transports.mooncake_wire import MooncakeWelcome, receive_ready, receive_write, send_reply
from splitserve.transfer.transports.staging import Pieces, StagingBuffer
from splitserve.transfer.transports.staging_choice import StagingChoice

logger = logging.getLogger(__name__)

# One slot is being gathered, one is in flight, one is being scattered.
NUM_SLOTS = 3
SLOT_BYTES = 4 << 20


class MooncakeIncoming:
    """Receiving end. `engine_at`: returns the engine for buffers on a GPU, or with -1 in the host's memory."""

    def __init__(
        self, memory: Memory, stagings: StagingChoice, engine_at: Callable[[int], MooncakeTransferEngine]
    ) -> None:
        self._memory = memory
        self._stagings = stagings
        self._engine_at = engine_at
        # Buffer of the current connection, and the engine that registered it.
        self._staging: StagingBuffer | None = None
        self._engine: MooncakeTransferEngine | None = None

    def welcome(self) -> bytes:
        # Each connection gets a new buffer: transfers in flight of an earlier one must not write to its slots.
        self._retire()
        try:
            staging = self._stagings.to_receive(NUM_SLOTS, SLOT_BYTES)
            engine = self._engine_for(staging)
        except (MooncakeError, OSError, RuntimeError, SplitserveError) as error:
            # The last two are errors of a GPU, or of torch about it.
            raise ProtocolError(f"no staging buffer: {error}") from error
        self._staging, self._engine = staging, engine
        return msgspec.msgpack.encode(
            MooncakeWelcome(
                library_version(),
                engine.protocol,
                engine.get_session_id(),
                engine.incarnation,
                staging.address,
                staging.num_slots,
                staging.slot_bytes,
            )
        )

    def serve(self, sock: socket.socket) -> None:
        staging = self._staging
        try:
            while staging is not None and self._receive_write(sock, staging):
                pass
        except (RuntimeError, SplitserveError) as error:
            raise ProtocolError(f"the GPU failed: {error}") from error

    def revoke(self) -> None:
        """Retire the staging buffer. The only writer of pages was our own thread, which has ended."""
        self._retire()

    def is_fenced(self) -> bool:
        return True

    def _retire(self) -> None:
        """Deregister and discard the staging buffer. The engine keeps its addresses for transfers in flight."""
        staging, engine = self._staging, self._engine
        self._staging = self._engine = None
        if staging is not None and engine is not None:
            engine.kept.append(staging)
            try:
                engine.deregister(staging.address)
                staging.discard()
            except (MooncakeError, OSError, RuntimeError):
                # The session has ended in any case. The memory stays, because the library may still write there.
                logger.exception("the staging buffer of an ended connection was not given back")

    def _engine_for(self, staging: StagingBuffer) -> MooncakeTransferEngine:
        """Return the engine for this buffer, with the buffer registered. Raises MooncakeError, ConfigError."""
        try:
            engine = self._engine_at(staging.gpu_id)
            engine.register(staging.address, staging.num_bytes)
        except BaseException:
            staging.discard()
            raise
        return engine

    def _receive_write(self, sock: socket.socket, staging: StagingBuffer) -> bool:
        """Receive one write into place. Return False if the connection should end."""
        write = receive_write(sock)
        if write is None:
            return False
        frame = write.frame
        if refusal := frame.refusal(self._memory):
            # The sender ends the connection.
            send_reply(sock, frame.ticket_id, 0, refusal)
            return True
        addresses, lengths = self._memory.targets(frame.targets), frame.targets["length"]
        if write.data is None:
            _receive_staged(sock, frame.ticket_id, staging, Pieces(addresses, lengths), frame.length)
        else:
            self._stagings.aux.deserialize_data_to_buffer(write.data, addresses, lengths)
            send_reply(sock, frame.ticket_id, 1)
        return True


def _receive_staged(sock: socket.socket, ticket_id: int, staging: StagingBuffer, pieces: Pieces, length: int) -> None:
    send_reply(sock, ticket_id, 0)
    for chunk in range(-(-length // staging.slot_bytes)):
        receive_ready(sock, ticket_id, chunk)
        first = chunk * staging.slot_bytes
        staging.scatter(chunk % staging.num_slots, pieces.between(first, min(first + staging.slot_bytes, length)))
        send_reply(sock, ticket_id, chunk + 1)
