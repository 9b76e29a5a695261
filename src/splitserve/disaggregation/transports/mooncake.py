"""KV pages through Mooncake's TransferEngine: large pieces at its speed, whatever the pages look like.

Life of a write:
1. The sender says over the door's connection which ranges it will fill; the receiver checks all of them and agrees.
   A small write carries its bytes in the same frame (`aux_data.py`), and that is that: see INLINE_BYTES.
2. The sender gathers its pieces, slot by slot, into a staging buffer and has the engine write each slot into the same
   slot of the receiver's staging buffer. The engine needs large pieces: it moves 4 KiB ones at a tenth of its speed.
3. A slot that has arrived, acknowledged by the receiver's library, is announced over the connection. The receiver's
   own thread scatters it into place and says so; the slot is free again. When all are, the write is done.

  write   magic, number of ranges, ticket id, bytes in all, inline? | ranges | bytes, if inline    sender -> receiver
  ready   ticket id, number of the chunk                                                           sender -> receiver
  reply   ticket id, chunks in place so far, length of the refusal | refusal                       receiver -> sender

Why staging, and not straight into the pages: the library can shut out no peer, cannot cancel a transfer, and knows no
token (`mooncake_engine.py`). Here no page is registered. What peers and strangers can reach through the library is a
buffer of one connection that is never used again after it; only our own thread writes pages, for a peer that the door
has let in, and the fence is that this thread has ended. A late transfer lands in memory that nobody reads.

Where pages and staging buffers lie, on a GPU or not, `staging_choice.py` knows; both ends need not be alike.

The library's listening ports are open on every address of the machine, whatever `host` says: shield them.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque

import msgspec

from splitserve.disaggregation.copies import Copies, coalesce, num_bytes
from splitserve.disaggregation.transports import sockets
from splitserve.disaggregation.transports.backend import WriteRefused
from splitserve.disaggregation.transports.base import TransportOptions
from splitserve.disaggregation.transports.door import ProtocolError
from splitserve.disaggregation.transports.frames import MAX_TEXT_BYTES, WriteFrame
from splitserve.disaggregation.transports.memory import Memory
from splitserve.disaggregation.transports.mooncake_engine import (
    MooncakeError,
    MooncakeTransferEngine,
    Transfer,
    check_reaches_gpus,
    give_back,
    library_version,
    take_engine,
)
from splitserve.disaggregation.transports.ranges import MAX_RANGES, RANGE, decode_targets, encode_targets
from splitserve.disaggregation.transports.session import SessionTransport
from splitserve.disaggregation.transports.sockets import Deadline
from splitserve.disaggregation.transports.staging import Pieces, StagingBuffer
from splitserve.disaggregation.transports.staging_choice import GPU, HOST, FindDevice, StagingChoice, find_device
from splitserve.errors import SplitserveError

MAGIC = b"MOON"
# Writes up to here go inline: one round trip of the socket instead of two and one of the engine, a third of the time.
INLINE_BYTES = 256 << 10
INLINE_PIECES = 128
# One slot is gathered, one on its way, one being scattered.
NUM_SLOTS = 3
SLOT_BYTES = 4 << 20
# Seconds between two looks at a transfer: a slot takes some 2 ms.
POLL_SECONDS = 0.0002

_WRITE = struct.Struct("<4sIQQ?")
_READY = struct.Struct("<QI")
_REPLY = struct.Struct("<QIH")


class Welcome(msgspec.Struct, frozen=True):
    """What a sender must know."""

    # Version of the library, and how it moves bytes: both sides' must be equal.
    version: str
    protocol: str
    # The receiver's engine (see `MooncakeTransferEngine`), and the staging buffer of this connection.
    session_id: str
    incarnation: str
    address: int
    num_slots: int
    slot_bytes: int


# Made here: sessions open in threads, and two that make it at once end the process.
_welcomes = msgspec.msgpack.Decoder(Welcome)


def mooncake_transport(options: TransportOptions) -> SessionTransport:
    """Options: protocol (tcp, rdma), device (names of RDMA devices, by commas), staging (host, gpu: where the slots of
    a pool on a GPU lie). Raises ConfigError."""
    if options.extra.get("staging") == GPU:
        check_reaches_gpus()
    return SessionTransport(MooncakeBackend(options), options)


class MooncakeBackend:
    brief_bytes = 0
    # A slot's gathering, journey and scattering are its round trip: some 4 ms.
    joined_bytes = 32 << 20

    def __init__(self, options: TransportOptions, find_device: FindDevice = find_device) -> None:
        self.protocol = options.extra.get("protocol", "tcp")
        self.device = options.extra.get("device", "")
        self.host = options.host
        self.memory = Memory()
        self.stagings = StagingChoice(options.extra.get("staging", HOST), find_device)
        # Where all our sessions receive, by the place of their buffers (`gpu_id`). Those we write to have one each, as
        # one stopped peer can block an engine.
        self._engines = {-1: take_engine(self.host, self.device, self.protocol)}
        self._lock = threading.Lock()

    def register(self, memory: Memory) -> None:
        self.stagings.register(memory.regions)
        self.memory = memory

    def engine(self, gpu_id: int = -1) -> MooncakeTransferEngine:
        """The one that receives in buffers there. Raises ConfigError."""
        with self._lock:
            if gpu_id not in self._engines:
                self._engines[gpu_id] = take_engine(self.host, self.device, self.protocol, gpu_id=gpu_id)
            return self._engines[gpu_id]

    def receive(self) -> MooncakeIncoming:
        return MooncakeIncoming(self)

    def connect(self, sock: socket.socket, welcome: bytes, deadline: Deadline) -> MooncakeOutgoing:
        try:
            peer = _welcomes.decode(welcome)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"the other side's transfer backend is not mooncake: {error}") from error
        ours, theirs = (library_version(), self.protocol), (peer.version, peer.protocol)
        if ours != theirs:
            raise ProtocolError(f"mooncake {' over '.join(ours)} against {' over '.join(theirs)}: make them equal")
        staging = self.stagings.to_send(peer.num_slots, peer.slot_bytes)
        to = (peer.session_id, peer.incarnation)
        engine = take_engine(self.host, self.device, self.protocol, to, staging.gpu_id)
        outgoing = MooncakeOutgoing(sock, self, engine, peer, staging)
        try:
            outgoing.open()
            outgoing.probe(deadline)
        except BaseException:
            outgoing.close()
            raise
        return outgoing

    def close(self) -> None:
        with self._lock:
            engines = list(self._engines.values())
            self._engines.clear()
        for engine in engines:
            give_back(engine)


class MooncakeOutgoing:
    """Owns its engine and its staging buffer until it is closed, or rather until no transfer reads that any more."""

    def __init__(
        self,
        sock: socket.socket,
        backend: MooncakeBackend,
        engine: MooncakeTransferEngine,
        peer: Welcome,
        staging: StagingBuffer,
    ) -> None:
        self._socket = sock
        self._memory = backend.memory
        self._aux = backend.stagings.aux
        self._engine = engine
        self._peer = peer
        self._staging = staging
        self._is_registered = False
        self._under_way: deque[Transfer] = deque()
        # A probe that did not come back in time keeps the engine.
        self._probe: threading.Thread | None = None

    def open(self) -> None:
        """Raises MooncakeError."""
        # Over tcp the library reads what it is told to.
        if self._engine.protocol == "rdma":
            self._engine.register(self._staging.address, self._staging.num_bytes)
            self._is_registered = True

    def probe(self, deadline: Deadline) -> None:
        """Prove the engine's path, by eight bytes, before a write counts on it. The library's first contact has no
        deadline, so it gets a thread to itself. Raises TimeoutError, MooncakeError."""
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
        length = num_bytes(copies)
        addresses = self._memory.sources(copies)
        inline = length <= INLINE_BYTES and len(copies) <= INLINE_PIECES
        head = _WRITE.pack(MAGIC, len(copies), ticket_id, length, inline) + encode_targets(copies)
        if inline:
            data = self._aux.serialize_data_from_buffer(addresses, copies["length"])
            with sockets.timeouts_by_name():
                self._socket.sendall(head + data)
            self._receive_reply(ticket_id, deadline)
        else:
            with sockets.timeouts_by_name():
                self._socket.sendall(head)
            self._write_staged(ticket_id, Pieces(addresses, copies["length"]), length, deadline)

    def is_alive(self) -> bool:
        return not sockets.is_broken(self._socket)

    def interrupt(self) -> None:
        """The socket is shut, and `write` looks at it all the time."""

    def close(self) -> None:
        """Our pages were copied: what the engine may still read is the staging buffer, which waits for it."""
        if self._probe is not None and self._probe.is_alive():
            threading.Thread(target=self._let_go, args=(self._probe,), name="mooncake-probe", daemon=True).start()
        else:
            self._let_go()

    def _let_go(self, probe: threading.Thread | None = None) -> None:
        if probe is not None:
            probe.join()
        give_back(self._engine, self._under_way, self._release)

    def _release(self) -> None:
        """No transfer reads the staging buffer any more."""
        if self._is_registered:
            self._engine.deregister(self._staging.address)
        self._staging.discard()

    def _write_staged(self, ticket_id: int, pieces: Pieces, length: int, deadline: Deadline) -> None:
        num_chunks = -(-length // self._peer.slot_bytes)
        gathered = ready = 0
        # Agreed to, when not None; then how many chunks are in place.
        taken: int | None = None
        while taken != num_chunks:
            deadline.remaining()
            while gathered < num_chunks and gathered - (taken or 0) < self._peer.num_slots:
                self._send_chunk(gathered, pieces, length)
                gathered += 1
            # Not before it is agreed to: a receiver that refuses would take it for the next write.
            while taken is not None and self._has_arrived():
                with sockets.timeouts_by_name():
                    self._socket.sendall(_READY.pack(ticket_id, ready))
                ready += 1
            if not self._under_way or sockets.has_data(self._socket):
                taken = self._receive_reply(ticket_id, deadline)
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
        """Whether the oldest transfer has ended well. Raises MooncakeError where it has not."""
        if not self._under_way:
            return False
        oldest = self._under_way.popleft()
        # The library forgets a transfer that has failed, so it must not be asked about it again.
        if self._engine.is_done(oldest):
            return True
        self._under_way.appendleft(oldest)
        return False

    def _receive_reply(self, ticket_id: int, deadline: Deadline) -> int:
        sockets.set_receive_timeout(self._socket, deadline.remaining())
        replied, taken, length = _REPLY.unpack(sockets.receive_exactly(self._socket, _REPLY.size))
        if replied != ticket_id or length > MAX_TEXT_BYTES:
            raise ProtocolError(f"reply to write {replied} instead of {ticket_id}")
        if length:
            raise WriteRefused(sockets.receive_exactly(self._socket, length).decode(errors="replace"))
        return int(taken)


class MooncakeIncoming:
    def __init__(self, backend: MooncakeBackend) -> None:
        self._backend = backend
        # The present connection's.
        self._staging: StagingBuffer | None = None

    def welcome(self) -> bytes:
        # A buffer of its own for each connection: what an earlier one left under way must not hit this one's slots.
        self._retire()
        try:
            staging = self._backend.stagings.to_receive(NUM_SLOTS, SLOT_BYTES)
            engine = self._backend.engine(staging.gpu_id)
            try:
                engine.register(staging.address, staging.num_bytes)
            except MooncakeError:
                staging.discard()
                raise
        except (MooncakeError, OSError, RuntimeError, SplitserveError) as error:
            # The last two are a GPU's, or torch's of it.
            raise ProtocolError(f"no staging buffer: {error}") from error
        self._staging = staging
        return msgspec.msgpack.encode(
            Welcome(
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
        """Our own thread wrote, and it has ended."""
        self._retire()

    def is_fenced(self) -> bool:
        return True

    def _retire(self) -> None:
        """Transfers under way end in the addresses of the old buffer, which stay with the engine; of the host's memory
        nothing but these."""
        staging, self._staging = self._staging, None
        if staging is not None:
            engine = self._backend.engine(staging.gpu_id)
            engine.deregister(staging.address)
            engine.kept.append(staging)
            staging.discard()

    def _receive_write(self, sock: socket.socket, staging: StagingBuffer) -> bool:
        """Take one write into place. False when the connection should end."""
        try:
            header = sockets.receive_exactly(sock, _WRITE.size)
        except ConnectionError:
            return False
        magic, num_ranges, ticket_id, length, inline = _WRITE.unpack(header)
        if magic != MAGIC or num_ranges > MAX_RANGES or (inline and length > INLINE_BYTES):
            raise ProtocolError("not a write")
        targets = decode_targets(sockets.receive_exactly(sock, num_ranges * RANGE.itemsize))
        data = sockets.receive_exactly(sock, length) if inline else b""
        if refusal := WriteFrame(ticket_id, targets, length).refusal(self._backend.memory):
            # The sender ends the connection.
            _send_reply(sock, ticket_id, 0, refusal)
            return True
        addresses = self._backend.memory.targets(targets)
        if inline:
            self._backend.stagings.aux.deserialize_data_to_buffer(data, addresses, targets["length"])
            _send_reply(sock, ticket_id, 1)
        else:
            _receive_staged(sock, ticket_id, staging, Pieces(addresses, targets["length"]), length)
        return True


def _receive_staged(sock: socket.socket, ticket_id: int, staging: StagingBuffer, pieces: Pieces, length: int) -> None:
    _send_reply(sock, ticket_id, 0)
    for chunk in range(-(-length // staging.slot_bytes)):
        announced = _READY.unpack(sockets.receive_exactly(sock, _READY.size))
        if announced != (ticket_id, chunk):
            raise ProtocolError(f"chunk {announced} instead of {(ticket_id, chunk)}")
        first = chunk * staging.slot_bytes
        staging.scatter(chunk % staging.num_slots, pieces.between(first, min(first + staging.slot_bytes, length)))
        _send_reply(sock, ticket_id, chunk + 1)


def _send_reply(sock: socket.socket, ticket_id: int, taken: int, refusal: str = "") -> None:
    text = refusal.encode()[:MAX_TEXT_BYTES]
    sock.sendall(_REPLY.pack(ticket_id, taken, len(text)) + text)
