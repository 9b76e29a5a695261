"""KV pages between processes of one host: the sender maps the receiver's memory and writes into it directly.

1. Registered memory consists of anonymous files (`core/machine.py`). A session adds one: its gate (`same_host.py`).
2. The receiver's session info names its host, its process and these files. The sender maps them through /proc.
3. A write is a copy by the sender, in bounded parts, each inside the gate. Threads share the parts of a large write.
   When all parts are copied, the write is DONE.
4. A drain closes the gate. The next part is refused, and the session is fenced when the part in progress has ended.

Needs Linux, one host, one process namespace (containers: a shared one) and the same user on both sides, or root on the
sender's. The connection carries nothing after the session info; it only shows that the peer is alive.
A stopped receiver does not delay the sender. Independent of pages.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import Callable

import msgspec

from splitserve._native.moves import ScatterCopy
from splitserve.core.errors import ConfigError
from splitserve.transfer.copies import Copies
from splitserve.transfer.transports import same_host, sockets
from splitserve.transfer.transports.backend import ConnectionBackend, Memory, decode_session_info
from splitserve.transfer.transports.base import TransportOptions, WriteRefused, threads_of
from splitserve.transfer.transports.session import SessionTransport
from splitserve.transfer.transports.sockets import Deadline

# Up to this size the caller copies by itself, in about the time that waking a thread takes.
BRIEF_BYTES = 1 << 20
# From this size on several threads copy. One thread waits for memory, most of all with small pages, so long that
# starting others takes no noticeable time. Smaller writes do not justify another core, which streams may need.
SHARED_BYTES = 128 << 20


def shm_transport(options: TransportOptions) -> SessionTransport:
    """Return a transport over shared memory. Raises ConfigError."""
    if sys.platform != "linux":
        raise ConfigError(f"the transfer backend 'shm' needs Linux, this is {sys.platform}: choose 'tcp'")
    return SessionTransport(ShmBackend(threads_of(options)), options)


class SharedMemoryTarget(msgspec.Struct, frozen=True):
    """Description of a receiver's memory for senders that write to it."""

    host: same_host.KernelIdentity
    pid: int
    gate: same_host.FileRef
    # The receiver's regions in order: (file, offset in it, length).
    regions: list[tuple[same_host.FileRef, int, int]]


def describe(memory: Memory, gate: same_host.WriteGate) -> SharedMemoryTarget:
    """Describe shareable memory of this process, and the gate before it, to a sender."""
    regions = [(same_host.file_ref(r.fd), r.fd_offset, r.length) for r in memory.regions]
    return SharedMemoryTarget(same_host.this_host(), os.getpid(), same_host.file_ref(gate.fd), regions)


_session_infos = msgspec.msgpack.Decoder(SharedMemoryTarget)


class ShmBackend(ConnectionBackend):
    brief_bytes = BRIEF_BYTES

    def __init__(self, num_threads: int = 1) -> None:
        """`num_threads`: threads of one large write."""
        super().__init__()
        self._num_threads = num_threads

    def register(self, memory: Memory) -> None:
        for region in memory.regions:
            same_host.check_shareable(region, "shm")
        super().register(memory)

    def receive(self) -> ShmIncoming:
        return ShmIncoming(self.memory)

    def connect(self, sock: socket.socket, session_info: bytes, deadline: Deadline) -> ShmOutgoing:
        return ShmOutgoing(sock, self.memory, decode_session_info(_session_infos, session_info), self._num_threads)


class ShmIncoming(same_host.GatedIncoming):
    def __init__(self, memory: Memory) -> None:
        super().__init__(same_host.WriteGate())
        self._memory = memory

    def session_info(self) -> bytes:
        return msgspec.msgpack.encode(describe(self._memory, self._gate))


class ShmOutgoing(same_host.GatedOutgoing):
    """Sending end. Until closed, it holds mappings of the receiver's files and so keeps their memory alive."""

    def __init__(
        self,
        sock: socket.socket,
        ours: Memory,
        session_info: SharedMemoryTarget,
        num_threads: int = 1,
        *,
        anonymous: bool = False,
    ) -> None:
        """`anonymous`: refuse files with a name, such as a shared pool that the user has created."""
        super().__init__(sock, "shm", session_info.host, session_info.pid, anonymous=anonymous)
        # Called for each write. An idle connection has data when the receiver is gone.
        self._is_broken = sockets.data_poll(sock)
        self._ours = ours
        self._theirs = Memory([self._map_file(*region) for region in session_info.regions])
        # One key per thread of a large write: a lock shared by two threads would end with the first release.
        self._keys: list[same_host.GateKey] = []
        try:
            for _ in range(num_threads):
                self._keys.append(self._open_key(same_host.GateKey, session_info.gate))
        except BaseException:
            self.close()
            raise

    def write(self, ticket_id: int, copies: Copies, deadline: Deadline) -> None:
        self._check(deadline)
        with self._keys[0].held():
            # For a larger write this only checks it.
            num_bytes = self._theirs.take_few(copies, self._ours, BRIEF_BYTES)
        if num_bytes <= BRIEF_BYTES:
            return
        copy = ScatterCopy(copies, num_bytes, self._ours.bases, self._theirs.bases)
        keys = self._keys if num_bytes >= SHARED_BYTES else self._keys[:1]
        same_host.run_together([functools.partial(self._copy_parts, copy, key, deadline) for key in keys])

    def call(self, action: Callable[[], None]) -> None:
        with self._keys[0].held():
            try:
                action()
            except Exception as error:
                raise WriteRefused(str(error)) from error

    def is_alive(self) -> bool:
        return not self._is_broken()

    def close(self) -> None:
        for key in self._keys:
            key.close()
        self._theirs = Memory()
        self._arenas.clear()
