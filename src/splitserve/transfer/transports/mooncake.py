"""KV pages through Mooncake's TransferEngine, in large pieces at full speed for all page sizes.

Life of a write:
1. The sender announces over the data connection which ranges it will fill; the receiver checks and confirms them.
   A small write carries its bytes in the same frame (`AuxData`) and is then complete: see `is_inline`.
2. The sender gathers its pieces, slot by slot, into a staging buffer and has the engine write each slot into the same
   slot of the receiver's staging buffer. The engine needs large pieces: it moves 4 KiB ones at a tenth of its speed.
3. A slot that has arrived, acknowledged by the receiver's library, is announced over the connection. The receiver's
   own thread scatters it into place and confirms it, which frees the slot. The write ends with its last slot.

The two ends and their messages are in `mooncake_ends.py`.

Why staging buffers: the library cannot exclude a peer, cannot cancel a transfer, and has no authentication
(`mooncake_engine.py`). No page is registered with it. Peers, authenticated or not, can reach only the staging buffer
of one connection through the library, and that buffer is not used again after the connection. Only our thread
writes pages, for an authenticated peer, and the end of this thread is the fence. A late transfer writes to memory that
is not read any more.

`StagingChoice` decides where staging buffers are, on a GPU or not. The two ends may differ.

With `direct=true`, and over RDMA, the library writes from pool to pool instead: `mooncake_direct.py`.

The library's listening ports are open on every address of the machine, whatever `host` is: shield them.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Mapping

import msgspec

from splitserve.core.errors import OptionError
from splitserve.transfer.transports.backend import ConnectionBackend, Memory, decode_session_info
from splitserve.transfer.transports.base import TransportOptions, direct_option
from splitserve.transfer.transports.frames import ProtocolError
from splitserve.transfer.transports.mooncake_direct import DirectIncoming, DirectOutgoing
from splitserve.transfer.transports.mooncake_ends import MooncakeIncoming, MooncakeOutgoing, MooncakeSessionInfo
from splitserve.transfer.transports.mooncake_engine import (
    MooncakeTransferEngine,
    check_reaches_gpus,
    give_back,
    library_version,
    take_engine,
)
from splitserve.transfer.transports.session import SessionTransport
from splitserve.transfer.transports.sockets import Deadline
from splitserve.transfer.transports.staging import GPU, HOST, FindDevice, StagingChoice, find_device

logger = logging.getLogger(__name__)
_session_infos = msgspec.msgpack.Decoder(MooncakeSessionInfo)


def mooncake_transport(options: TransportOptions) -> SessionTransport:
    """Return a transport over mooncake. Raises ConfigError.

    Options: protocol (tcp, rdma), device (names of RDMA devices, separated by commas), staging (host, gpu: location of
    the slots for a pool on a GPU), direct (true, false: write from pool to pool; default: only over rdma, if there is
    no `staging`).
    """
    if options.extra.get("staging") == GPU:
        check_reaches_gpus()
    backend = MooncakeBackend(options)
    if backend.is_direct:
        logger.warning(
            "mooncake is direct: peers write to the registered KV pool through ports that do not authenticate. "
            "Restrict these ports with a firewall"
        )
    return SessionTransport(backend, options)


def _wants_direct(options: Mapping[str, str], protocol: str) -> bool:
    """Return whether to write from pool to pool. Raises OptionError."""
    direct = options.get("direct")
    if direct is None:
        return protocol == "rdma" and "staging" not in options
    if direct_option(direct) and "staging" in options:
        raise OptionError("--transfer-option", "direct=true uses no slots, so it excludes staging=: leave one out")
    return direct_option(direct)


class MooncakeBackend(ConnectionBackend):
    # The round trip of a slot is its gathering, transfer and scattering: about 4 ms.
    joined_bytes = 32 << 20

    def __init__(self, options: TransportOptions, find_device: FindDevice = find_device) -> None:
        super().__init__()
        self.protocol = options.extra.get("protocol", "tcp")
        self.device = options.extra.get("device", "")
        self.host = options.host
        self.stagings = StagingChoice(options.extra.get("staging", HOST), find_device)
        # Whether the library writes from pool to pool.
        self.is_direct = _wants_direct(options.extra, self.protocol)
        self._must_be_direct = "direct" in options.extra
        # Engines that receive for all our sessions, by location of their buffers (`gpu_id`). Each sending connection
        # has its own engine, because one stopped peer can block an engine.
        self._engines = {-1: take_engine(self.host, self.device, self.protocol)}
        self._lock = threading.Lock()

    def register(self, memory: Memory) -> None:
        self.stagings.register(memory.regions)
        if self.is_direct and self.stagings.has_gpu:
            if self._must_be_direct:
                raise OptionError("--transfer-option", "direct=true is for KV pools on the CPU: leave it out")
            self.is_direct = False
        super().register(memory)

    def engine(self, gpu_id: int = -1) -> MooncakeTransferEngine:
        """Return the engine that receives in buffers on that GPU. Raises ConfigError."""
        with self._lock:
            if gpu_id not in self._engines:
                self._engines[gpu_id] = take_engine(self.host, self.device, self.protocol, gpu_id=gpu_id)
            return self._engines[gpu_id]

    def receive(self) -> MooncakeIncoming:
        if self.is_direct:
            return DirectIncoming(self.memory, self.stagings, self._new_engine)
        return MooncakeIncoming(self.memory, self.stagings, self.engine)

    def connect(self, sock: socket.socket, session_info: bytes, deadline: Deadline) -> MooncakeOutgoing:
        peer = decode_session_info(_session_infos, session_info)
        ours, theirs = (library_version(), self.protocol), (peer.version, peer.protocol)
        if ours != theirs:
            raise ProtocolError(f"mooncake {' over '.join(ours)} against {' over '.join(theirs)}: make them equal")
        if self.is_direct != bool(peer.regions):
            here, there = ("direct", "staged") if self.is_direct else ("staged", "direct")
            raise ProtocolError(f"mooncake is {here} here and {there} at the peer: give both the same direct=")
        staging = self.stagings.to_send(peer.num_slots, peer.slot_bytes)
        to = (peer.session_id, peer.incarnation)
        try:
            engine = take_engine(self.host, self.device, self.protocol, to, staging.gpu_id)
        except BaseException:
            staging.discard()
            raise
        outgoing_type = DirectOutgoing if self.is_direct else MooncakeOutgoing
        outgoing = outgoing_type(sock, self.memory, self.stagings.aux, engine, peer, staging)
        try:
            outgoing.open(deadline)
        except BaseException:
            outgoing.close()
            raise
        return outgoing

    def _new_engine(self) -> MooncakeTransferEngine:
        engine = MooncakeTransferEngine(self.host, ib_device=self.device, protocol=self.protocol)
        engine.initialize()
        return engine

    def close(self) -> None:
        with self._lock:
            engines = list(self._engines.values())
            self._engines.clear()
        for engine in engines:
            give_back(engine)
