"""Mooncake from pool to pool: the library writes registered pages itself, without staging (`direct=true`).

Life of a large write:
1. The sender checks its ranges against the receiver's regions, joins adjacent ones and splits them into pieces.
2. It submits the pieces to the engine, WINDOW at a time, and polls each one until the receiver's library has it in
   memory. A batch of the library reports only its first piece, so every piece is a transfer of its own.

Small writes still travel over the authenticated connection (`mooncake_ends.is_inline`).

Life of a session:
1. The receiver opens an engine for each session and registers its pool there. So it can end one session alone.
2. To fence the session, it destroys that engine: the library's threads end, connections close, and the registration
   is removed. After that no late write is possible. `is_fenced` is true only once the engine is gone.
3. A sender with transfers in flight destroys its engine too, because the library would continue to read our pages.

Weaker than staging: the library writes pages without our checks, its ports do not authenticate, and the fence depends
on its destructor. That takes up to a second, in which this process runs no other Python code.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from splitserve.core.layout import Region
from splitserve.transfer.copies import Copies, coalesce, cut
from splitserve.transfer.transports import sockets
from splitserve.transfer.transports.backend import Memory
from splitserve.transfer.transports.frames import ProtocolError
from splitserve.transfer.transports.mooncake_ends import (
    POLL_SECONDS,
    MooncakeIncoming,
    MooncakeOutgoing,
    receive_write,
    send_reply,
    session_info,
)
from splitserve.transfer.transports.mooncake_engine import MooncakeError, MooncakeTransferEngine
from splitserve.transfer.transports.sockets import Deadline
from splitserve.transfer.transports.staging import ProcessStaging, StagingChoice

# Pieces in flight. The library queues 1,024 for a peer and refuses more.
WINDOW = 64
# Longest piece, bytes. Drains and deadlines are checked between two pieces.
PIECE_BYTES = 4 << 20
# Bytes of a session's memory for its first transfer, a probe. A probe must not write to a page.
PROBE_BYTES = 4096


class DirectOutgoing(MooncakeOutgoing):
    """Sending end that writes into the peer's pool."""

    def _registered_memory(self) -> list[tuple[int, int]]:
        return [*super()._registered_memory(), *((r.address, r.length) for r in self._memory.regions)]

    def _write_large(self, ticket_id: int, copies: Copies, deadline: Deadline) -> None:
        theirs = Memory([Region(*region) for region in self._peer.regions])
        theirs.check_targets(copies)
        pieces = cut(coalesce(copies), PIECE_BYTES)
        sources, targets = self._memory.sources(pieces).tolist(), theirs.targets(pieces).tolist()
        work = list(zip(sources, targets, pieces["length"].tolist(), strict=True))
        next_piece = 0
        while next_piece < len(work) or self._under_way:
            deadline.remaining()
            # The receiver sends nothing here: data means that it has ended the connection.
            if sockets.has_data(self._socket):
                raise ConnectionError("the receiver ended the session")
            while next_piece < len(work) and len(self._under_way) < WINDOW:
                self._under_way.append(self._engine.submit(self._peer.session_id, *work[next_piece]))
                next_piece += 1
            if not self._has_arrived():
                time.sleep(POLL_SECONDS)

    def _let_go(self, probe: threading.Thread | None = None) -> None:
        if probe is not None:
            probe.join()
        if not self._under_way:
            super()._let_go()
            return
        self._engine.destroy()
        self._under_way.clear()
        self._staging.discard()


class DirectIncoming(MooncakeIncoming):
    """Receiving end of one session, with an engine of its own. `open_engine` returns a new one."""

    def __init__(
        self, memory: Memory, stagings: StagingChoice, open_engine: Callable[[], MooncakeTransferEngine]
    ) -> None:
        super().__init__(memory, stagings, lambda gpu_id: open_engine())
        self._open_engine = open_engine
        # Set by the first connection, with the target of its probe.
        self._own: MooncakeTransferEngine | None = None
        self._probe_target: ProcessStaging | None = None

    def session_info(self) -> bytes:
        try:
            engine, probe = self._opened()
        except (MooncakeError, OSError) as error:
            raise ProtocolError(f"the pool cannot be registered with mooncake: {error}") from error
        return session_info(engine, probe, self._memory.regions)

    def serve(self, sock: socket.socket) -> None:
        while (write := receive_write(sock)) is not None:
            frame, data = write
            if data is None:
                send_reply(sock, frame.ticket_id, 0, "a staged write to a receiver with direct=true")
            else:
                self._take_inline(sock, frame, data)

    def revoke(self) -> None:
        if self._own is not None:
            self._own.destroy()

    def is_fenced(self) -> bool:
        return self._own is None or self._own.is_destroyed

    def _opened(self) -> tuple[MooncakeTransferEngine, ProcessStaging]:
        """Return the session's engine and the target of probes. All connections of the session use the same ones."""
        if self._own is None or self._probe_target is None:
            probe, engine = ProcessStaging(1, PROBE_BYTES), self._open_engine()
            # From here on `revoke` ends it, also after an error.
            self._own = engine
            engine.register(probe.address, PROBE_BYTES)
            for region in self._memory.regions:
                engine.register(region.address, region.length)
            self._probe_target = probe
        return self._own, self._probe_target
