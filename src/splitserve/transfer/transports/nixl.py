"""KV pages through NIXL: one-sided writes of UCX over RDMA, sockets or the kernel.

1. A session has its own receiving agent. The session info carries its metadata, our regions and the session's gate.
2. A connection has its own sending agent, which has that one peer (`Lane`). If a call copies by itself (same
   host), it has several: threads share large writes, each with its agent.
3. A write is posted in batches, one after another in each thread. On one host, a batch that the library reports as done
   is in place.
4. The first contact and some links also need work by the receiver's agent. An agent with a thread of its own would use
   a whole core all the time. So if a transfer is not done soon, the sender requests help on the connection. The
   receiver's thread then drives its agent until the mark at the write's end.
5. Over a network the last batch carries a note, which NIXL delivers after the bytes. The mark at the end names the
   note, and the receiver answers once it has received it. Only that makes the ticket DONE.
6. A failed connection destroys its agents. The next write adds the peer again.

The fence has two halves, because UCX writes in two ways. Over a network (tcp, RDMA) the receiver's agent moves the
bytes into place: once it is destroyed nothing lands. Between processes of one host the sender writes by a system call
(process_vm_writev), but only while it holds the session's gate (`same_host.py`). After a failure it holds the gate
until its agent is destroyed. A sender that cannot open the gate does not use these links.

UCX reads its settings from the environment (UCX_TLS, UCX_NET_DEVICES, ...). Its own ports do not authenticate. If the
host is not the loopback address, keep them on a trusted network.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import ipaddress
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from contextlib import ExitStack
from typing import Any

import msgspec

from splitserve.core.errors import ConfigError
from splitserve.core.layout import Region
from splitserve.transfer.copies import Copies
from splitserve.transfer.transports import sockets
from splitserve.transfer.transports.backend import ConnectionBackend, Memory, SendingEnd, decode_session_info
from splitserve.transfer.transports.base import TransportOptions, threads_of
from splitserve.transfer.transports.frames import ProtocolError
from splitserve.transfer.transports.listener import GRACE_SECONDS
from splitserve.transfer.transports.nixl_requests import Lane, requests_of
from splitserve.transfer.transports.same_host import (
    FileRef,
    GatedIncoming,
    GateKey,
    WriteGate,
    boot_id,
    file_ref,
    open_file,
    path_of,
    run_together,
)
from splitserve.transfer.transports.session import SessionTransport
from splitserve.transfer.transports.sockets import Deadline

try:
    # This package selects the build for the installed CUDA. The build for CUDA 12 also runs without CUDA.
    import nixl as library
except ImportError:
    import nixl_cu12 as library

logger = logging.getLogger(__name__)
# The library's logging setup reports each agent on standard output.
logging.getLogger("nixl").setLevel(logging.WARNING)

# Seconds between two polls of a transfer in flight.
POLL_INTERVAL = 50e-6
# Seconds after which the sender of an unfinished transfer requests the receiver's help.
HELP_AFTER = 200e-6
# On one host a call copies in its own thread. From this size on several threads copy, in two thirds of the time.
SHARED_BYTES = 16 << 20

# Ticket id: the note on the last batch of a write over a network, and the receiver's answer.
_NOTE = struct.Struct("<Q")


class _Mark(enum.IntEnum):
    """Mark that a sender sends on the connection, with the ticket's id if the receiver must answer."""

    # A write in flight takes long: the receiver shall drive its agent.
    HELP = 0
    # The write has ended after HELP. The receiver sends no answer.
    END = 1
    # The write has ended at the sender, with or without HELP. The receiver answers after the note.
    END_AND_CONFIRM = 2


_MARK = struct.Struct("<BQ")


def nixl_transport(options: TransportOptions) -> SessionTransport:
    """Return a transport over NIXL. Raises ConfigError if the library cannot work on this machine."""
    try:
        # The first agent loads plugins for half a second. Do that now, not within the timeout of a connection.
        new_agent(options.host, Memory())
    except Exception as error:
        raise ConfigError(f"the transfer backend 'nixl' cannot start: {error}") from error
    return SessionTransport(NixlBackend(options.host, threads_of(options)), options)


def new_agent(host: str, memory: Memory, *, same_host_links: bool = True) -> Any:
    """Return an agent with `memory` registered and without a thread: it serves its peers only during calls."""
    settings = []
    if ipaddress.ip_address(host).is_loopback:
        settings.append("NET_DEVICES=lo")
    if not same_host_links:
        settings.append("TLS=^sm")
    config = library.nixl_agent_config(enable_prog_thread=False, backends=[])
    agent = library.nixl_agent(secrets.token_hex(16), config)
    agent.create_backend("UCX", {"engine_config": ",".join(settings)} if settings else {})
    rows = [(r.address, r.length, 0, "") for r in memory.regions if r.length]
    if rows:
        agent.register_memory(rows, "DRAM")
    return agent


class NixlSessionInfo(msgspec.Struct, frozen=True, array_like=True):
    """Data for a sender."""

    # Metadata of the receiving agent, in the library's format.
    metadata: bytes
    # (address, length) of the receiver's regions, by region number.
    regions: list[tuple[int, int]]
    # Id of the boot of the receiver's machine.
    boot_id: str
    # File with the session's gate.
    gate: FileRef
    # Process that has the file open.
    pid: int


_session_infos = msgspec.msgpack.Decoder(NixlSessionInfo)


class NixlBackend(ConnectionBackend):
    joined_bytes = 32 << 20

    def __init__(self, host: str, num_threads: int) -> None:
        """`num_threads`: threads of one large write on this host."""
        super().__init__()
        self._host = host
        self._num_threads = num_threads

    def receive(self) -> NixlIncoming:
        return NixlIncoming(self._host, self.memory)

    def connect(self, sock: socket.socket, session_info: bytes, deadline: Deadline) -> NixlOutgoing:
        info = decode_session_info(_session_infos, session_info)
        return NixlOutgoing(sock, self._host, self.memory, info, self._num_threads)


class NixlIncoming(GatedIncoming):
    def __init__(self, host: str, memory: Memory) -> None:
        super().__init__(WriteGate())
        self._host = host
        self._memory = memory
        # Created for the first sender, by its connection's thread.
        self._agent: Any = None

    def session_info(self) -> bytes:
        if self._agent is None:
            self._agent = new_agent(self._host, self._memory)
        info = NixlSessionInfo(
            self._agent.get_agent_metadata(),
            [(r.address, r.length) for r in self._memory.regions],
            boot_id(),
            file_ref(self._gate.fd),
            os.getpid(),
        )
        return msgspec.msgpack.encode(info)

    def serve(self, sock: socket.socket) -> None:
        """Drive the agent while a write needs help, and confirm writes by their notes."""
        # Notes of the current write, of a write that broke before its confirmation, and of broken connections.
        notes: set[bytes] = set()
        while (mark := _receive_mark(sock)) is not None:
            kind, ticket_id = mark
            if kind is _Mark.HELP:
                notes = set()
                while not sockets.has_data(sock):
                    notes |= self._drive()
            elif kind is _Mark.END_AND_CONFIRM:
                note, deadline = _NOTE.pack(ticket_id), Deadline(GRACE_SECONDS)
                while note not in notes:
                    deadline.remaining()
                    if sockets.has_data(sock):
                        return
                    notes |= self._drive()
                notes.discard(note)
                sock.sendall(note)

    def _drive(self) -> set[bytes]:
        """Let the library work, which it does only during calls. Return the received notes."""
        notes = {note for of_peer in self._agent.get_new_notifs().values() for note in of_peer}
        time.sleep(POLL_INTERVAL)
        return notes

    def revoke(self) -> None:
        super().revoke()
        self._agent = None


class NixlOutgoing(SendingEnd):
    def __init__(self, sock: socket.socket, host: str, memory: Memory, info: NixlSessionInfo, num_threads: int) -> None:
        super().__init__(sock)
        self._host = host
        self._memory = memory
        self._metadata = info.metadata
        self._targets = Memory([Region(address, length) for address, length in info.regions])
        self._key = _reach(info)
        # Over a network a call copies nothing.
        self._num_threads = num_threads if self._key is not None else 1
        self._gate = ExitStack()
        self._interrupted = False
        # Whether the receiver's help was requested for the current write. `_help_lock`: threads may share a write.
        self._is_helped = False
        self._help_lock = threading.Lock()
        self._lanes: list[Lane] = []
        try:
            self._lanes.append(self._new_lane())
        except BaseException:
            self.close()
            raise

    def write(self, ticket_id: int, copies: Copies, deadline: Deadline) -> None:
        num_bytes = self._targets.check_targets(copies)
        lanes = self._lanes_for(num_bytes)
        parts = deque(requests_of(copies, num_bytes, self._memory, len(lanes)))
        if not parts:
            return
        is_confirmed = self._key is None
        note = _NOTE.pack(ticket_id) if is_confirmed else b""
        self._is_helped = False
        if self._key is not None:
            self._gate.enter_context(self._key.held())
        run_together([functools.partial(self._carry_out, lane, parts, note, deadline) for lane in lanes])
        # Close the gate only after success: a failed write may be half-way until `close` has destroyed the agents.
        self._gate.close()
        if is_confirmed:
            self._say(_Mark.END_AND_CONFIRM, deadline, ticket_id)
            if sockets.receive_exactly(self._socket, _NOTE.size, deadline) != note:
                raise ProtocolError("the receiver confirms another write")
        elif self._is_helped:
            self._say(_Mark.END, deadline)

    def interrupt(self) -> None:
        self._interrupted = True

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()
        self._gate.close()
        if self._key is not None:
            self._key.close()

    def _new_lane(self) -> Lane:
        # Only our own calls move bytes, so under the gate no thread of the agent can be inside a write either.
        agent = new_agent(self._host, self._memory, same_host_links=self._key is not None)
        return Lane(agent, self._metadata, self._memory, self._targets)

    def _lanes_for(self, num_bytes: int) -> list[Lane]:
        """Return the lanes that share a write of this size. Create them for the first such write."""
        if num_bytes < SHARED_BYTES:
            return self._lanes[:1]
        while len(self._lanes) < self._num_threads:
            try:
                self._lanes.append(self._new_lane())
            except Exception as error:
                # If the session has ended, that is the cause: the receiver's agent was destroyed with it.
                self._check()
                self._num_threads = len(self._lanes)
                logger.warning("large writes go by %d thread(s), for want of an agent: %s", self._num_threads, error)
        return self._lanes

    def _carry_out(self, lane: Lane, parts: deque[Copies], note: bytes, deadline: Deadline) -> None:
        """Transfer part after part until none is left, alone or in parallel to other threads.

        The note is sent with the last part. Writes with a note use one thread.
        """
        try:
            while True:
                try:
                    part = parts.popleft()
                except IndexError:
                    return
                self._transfer(lane, part, b"" if parts else note, deadline)
        except BaseException:
            parts.clear()
            raise

    def _transfer(self, lane: Lane, part: Copies, note: bytes, deadline: Deadline) -> None:
        self._check()
        state = lane.post(part, note)
        began = time.monotonic()
        while state == "PROC":
            deadline.remaining()
            self._check()
            if time.monotonic() - began > HELP_AFTER:
                self._call_for_help(deadline)
            # Under the gate only our own library calls move the bytes.
            time.sleep(0 if self._key is not None else POLL_INTERVAL)
            state = lane.state()
        if state != "DONE":
            raise ConnectionError(f"the library ended a transfer with {state}")
        lane.release()

    def _check(self) -> None:
        if self._interrupted or not self.is_alive():
            raise ConnectionError("the connection was closed")

    def _call_for_help(self, deadline: Deadline) -> None:
        """Request the receiver's help, once per write."""
        with self._help_lock:
            if not self._is_helped:
                self._is_helped = True
                self._say(_Mark.HELP, deadline)

    def _say(self, mark: _Mark, deadline: Deadline, ticket_id: int = 0) -> None:
        sockets.send_all(self._socket, _MARK.pack(mark, ticket_id), deadline)


def _receive_mark(sock: socket.socket) -> tuple[_Mark, int] | None:
    """Receive a mark. None if the connection has ended."""
    try:
        kind, ticket_id = _MARK.unpack(sockets.receive_exactly(sock, _MARK.size))
        return _Mark(kind), ticket_id
    except ConnectionError:
        return None
    except ValueError as error:
        raise ProtocolError(f"neither the beginning nor the end of a write: {error}") from error


def _reach(info: NixlSessionInfo) -> GateKey | None:
    """Open the session's gate. None if the receiver is on another host or its files are not accessible."""
    if info.boot_id != boot_id():
        return None
    with contextlib.suppress(OSError):
        fd = open_file(info.pid, info.gate)
        try:
            return GateKey(fd)
        finally:
            os.close(fd)
    if "UCX_TLS" in os.environ:
        raise ProtocolError(
            f"{path_of(info.pid, info.gate)} of a receiver on this host cannot be opened, and UCX_TLS forbids to leave "
            "out the links that need it: unset UCX_TLS, or run both workers as one user in one PID namespace"
        )
    return None
