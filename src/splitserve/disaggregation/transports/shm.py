"""KV pages between processes of one host: the sender maps the receiver's memory and writes into it by itself.

1. Registered memory lies in anonymous files (`core/arena.py`). A session adds one more: its gate (`write_gate.py`).
2. The receiver's welcome names its host, its process and these files; the sender maps them through /proc.
3. A write is the sender's own copy, in bounded parts, each inside the gate; threads share the parts of a large one.
   When it is over, the write is DONE.
4. A drain closes the gate: the next part is refused, and the fence stands when the part under way is over.

Needs Linux, one host, one process namespace (containers: a shared one) and the same user on both sides, or root on the
sender's. The connection carries nothing after the welcome: while it stands, the other side lives. Knows nothing of
pages; a receiver that is stopped costs the sender nothing.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import Callable

import msgspec

from splitserve._native.moves import ScatterCopy
from splitserve.core.arena import Arena
from splitserve.disaggregation.copies import Copies
from splitserve.disaggregation.transports import sockets
from splitserve.disaggregation.transports.base import TransportOptions, WriteRefused
from splitserve.disaggregation.transports.handshake import ProtocolError
from splitserve.disaggregation.transports.local_files import FileRef, file_ref
from splitserve.disaggregation.transports.memory import Memory
from splitserve.disaggregation.transports.same_host import (
    GatedIncoming,
    Host,
    check_host,
    open_key,
    open_memory,
    region_in,
    this_host,
)
from splitserve.disaggregation.transports.session import SessionTransport
from splitserve.disaggregation.transports.sharing import run_together, threads_of
from splitserve.disaggregation.transports.sockets import Deadline
from splitserve.disaggregation.transports.write_gate import GateKey, WriteGate
from splitserve.errors import ConfigError

# Copied in one go inside the gate: about a millisecond, which is what a drain waits.
PART_BYTES = 8 << 20
# Copied by the caller itself, in about the time that waking a thread takes.
BRIEF_BYTES = 1 << 20
# Copied by several threads: one waits for the memory, most of all where pages are small, and does so for so long that
# starting others takes no time beside it. What is less is not worth a core that streams may run on.
SHARED_BYTES = 128 << 20


def shm_transport(options: TransportOptions) -> SessionTransport:
    """Raises ConfigError."""
    if sys.platform != "linux":
        raise ConfigError(f"the transfer backend 'shm' needs Linux, this is {sys.platform}: choose 'tcp'")
    return SessionTransport(ShmBackend(threads_of(options)), options)


class _Welcome(msgspec.Struct, frozen=True):
    host: Host
    pid: int
    gate: FileRef
    # The receiver's regions in order: (file, offset in it, length).
    regions: list[tuple[FileRef, int, int]]


# Made here: sessions open in threads, and two that make it at once end the process.
_welcomes = msgspec.msgpack.Decoder(_Welcome)


class ShmBackend:
    brief_bytes = BRIEF_BYTES
    joined_bytes = 8 << 20

    def __init__(self, num_threads: int = 1) -> None:
        """`num_threads`: of one large write."""
        self._num_threads = num_threads
        self._memory = Memory()

    def register(self, memory: Memory) -> None:
        if any(region.fd < 0 for region in memory.regions):
            raise ConfigError(
                "the transfer backend 'shm' needs memory that other processes can map, and a region was registered "
                "that is private: allocate it as Arena(..., shareable=True), or choose another backend"
            )
        self._memory = memory

    def receive(self) -> ShmIncoming:
        return ShmIncoming(self._memory)

    def connect(self, sock: socket.socket, welcome: bytes, deadline: Deadline) -> ShmOutgoing:
        try:
            return ShmOutgoing(sockets.end_of(sock), self._memory, _welcomes.decode(welcome), self._num_threads)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"malformed welcome: {error}") from error

    def close(self) -> None:
        """Nothing is held."""


class ShmIncoming(GatedIncoming):
    def __init__(self, memory: Memory) -> None:
        super().__init__(WriteGate())
        self._memory = memory

    def welcome(self) -> bytes:
        regions = [(file_ref(r.fd), r.fd_offset, r.length) for r in self._memory.regions]
        return msgspec.msgpack.encode(_Welcome(this_host(), os.getpid(), file_ref(self._gate.fd), regions))


class ShmOutgoing:
    """Holds mappings of the receiver's files, and with them their memory, until it is closed."""

    def __init__(self, is_broken: Callable[[], bool], ours: Memory, welcome: _Welcome, num_threads: int = 1) -> None:
        """`is_broken`: whether the connection is, and with it the receiver gone."""
        check_host(welcome.host, this_host(), "shm")
        self._is_broken = is_broken
        self._ours = ours
        self._interrupted = False
        # Many regions lie in one file: a pool is one.
        self._arenas = {
            f: Arena.attach(open_memory(welcome.pid, f, "shm")) for f in {file for file, _, _ in welcome.regions}
        }
        self._theirs = Memory([region_in(self._arenas[file], offset, n) for file, offset, n in welcome.regions])
        # One for each thread of a large write: a lock that two share falls when the first lets go.
        self._keys: list[GateKey] = []
        try:
            for _ in range(num_threads):
                self._keys.append(open_key(GateKey, welcome.pid, welcome.gate, "shm"))
        except BaseException:
            self.close()
            raise

    def write(self, ticket_id: int, copies: Copies, deadline: Deadline) -> None:
        self._check(deadline)
        with self._keys[0].held():
            # Of a larger one this is but the check.
            num_bytes = self._theirs.take_few(copies, self._ours, BRIEF_BYTES)
        if num_bytes <= BRIEF_BYTES:
            return
        copy = ScatterCopy(copies, num_bytes, self._ours.bases, self._theirs.bases)
        keys = self._keys if num_bytes >= SHARED_BYTES else self._keys[:1]
        run_together([functools.partial(self._carry_out, copy, key, deadline) for key in keys])

    def _carry_out(self, copy: ScatterCopy, key: GateKey, deadline: Deadline) -> None:
        """Part after part until none is left, alone or beside other threads."""
        while not copy.is_complete:
            self._check(deadline)
            with key.held():
                copy.advance(PART_BYTES)

    def _check(self, deadline: Deadline) -> None:
        deadline.remaining()
        if self._interrupted:
            raise WriteRefused("interrupted")

    def call(self, action: Callable[[], None]) -> None:
        with self._keys[0].held():
            try:
                action()
            except Exception as error:
                raise WriteRefused(str(error)) from error

    def is_alive(self) -> bool:
        return not self._is_broken()

    def interrupt(self) -> None:
        self._interrupted = True

    def close(self) -> None:
        for key in self._keys:
            key.close()
        self._theirs = Memory()
        self._arenas.clear()
