"""KV pages between processes with GPUs on one host: the sender maps the receiver's pool and copies into it directly.

1. The receiver's session info names its host, its process, a gate (`DeviceGate`) and its regions. Regions on a GPU are
   named by a handle of the driver, those of the CPU (the metadata rows) by their anonymous files, as with `shm`.
2. The sender maps each allocation and each file once.
3. The sender's GPU copies a write in bounded parts. While it copies, the host prepares the next launch. Each part is
   inside the gate until the GPU has finished it. After the last part, the write is DONE.
4. A drain closes the gate. The next part is refused, and the session is fenced when the part in progress has ended.

A sender killed inside a part loses the gate's lock, and its GPU work ends with its process. The gate waits for both.
The mark in the gate's file records it: a sender writes it with its process, and removes it when its GPU has finished.
If the lock is free but the mark is set, the session is fenced only when that process has ended.
The connection carries nothing after the session info. Independent of pages. GPU operations are passed in (`Gpu`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from splitserve._native.moves import ScatterCopy
from splitserve._native.tables import addresses
from splitserve.core.errors import ConfigError
from splitserve.core.layout import Region
from splitserve.transfer.copies import Copies, cut, num_bytes, select
from splitserve.transfer.transports import same_host
from splitserve.transfer.transports.backend import ConnectionBackend, Memory, decode_session_info
from splitserve.transfer.transports.base import TransportOptions, WriteRefused
from splitserve.transfer.transports.frames import ProtocolError
from splitserve.transfer.transports.session import SessionTransport
from splitserve.transfer.transports.sockets import Deadline

# Whether a sender is inside, its process id, and the start time of that process: process ids are reused.
_MARK = struct.Struct("<?qq")
_PLACE = 8


class DeviceGate(same_host.WriteGate):
    """Gate that also records a sender that left without waiting for its GPU."""

    def is_closed(self) -> bool:
        """Return whether the gate is closed and no GPU writes through it any more."""
        if not super().is_closed():
            return False
        mark = os.pread(self.fd, _MARK.size, _PLACE)
        if len(mark) < _MARK.size:
            return True
        is_inside, pid, began = _MARK.unpack(mark)
        return not is_inside or _began(pid) != began


class DeviceKey(same_host.GateKey):
    """Sender's key. The work inside `held` must have finished, on the GPU too, when the block ends without an error."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._process = (os.getpid(), _began(os.getpid()))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        with super().held():
            self._mark(True)
            yield
            self._mark(False)

    def _mark(self, is_inside: bool) -> None:
        os.pwrite(self._fd, _MARK.pack(is_inside, *self._process), _PLACE)


def _began(pid: int) -> int:
    """Return when a process started, in clock ticks since boot. -1 if it has ended, reaped or not."""
    try:
        # The name, in brackets, may contain any character.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])


# Maximum bytes of a row. One row is enough work for one program of the kernel. A few MiB have enough rows to occupy a
# GPU.
ROW_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class DeviceRows:
    # Target address, source address and number of words of each row, [3, number of rows].
    table: NDArray[np.int64]
    # Bytes per word: 8 or 1.
    word_bytes: int


def rows_of(pieces: Copies, ours: Memory, theirs: Memory) -> DeviceRows:
    """Return the rows that copy `pieces`, each of at most ROW_BYTES. All lie inside their regions."""
    table, bits = addresses(pieces, ours.bases, theirs.bases)
    word_bytes = 1 if bits % 8 else 8
    table[2] //= word_bytes
    return DeviceRows(table, word_bytes)


NAME = "cuda_ipc"
NEEDS_GPU = f"the transfer backend {NAME!r} needs memory on a GPU: start the worker with --device cuda"
# Rows per launch, and launches per entry: at most 1 GiB, a millisecond of a large GPU's time. A drain waits that long.
LAUNCH_ROWS = 16384
LAUNCHES = 2


class DeviceRegion(msgspec.Struct, frozen=True, tag="device"):
    """Part of an allocation on a GPU."""

    # The driver's handle of the allocation.
    handle: bytes
    # Size of the allocation in bytes.
    allocation: int
    offset: int
    length: int
    # Address in the process that sends this.
    address: int


class HostRegion(msgspec.Struct, frozen=True, tag="host"):
    """Part of an anonymous file."""

    file: same_host.FileRef
    offset: int
    length: int


class Gpu(Protocol):
    def describe(self, region: Region) -> DeviceRegion | None:
        """Describe a region. None for memory of the CPU. Raises ConfigError for memory that cannot be shared."""
        ...

    def open(self, handle: bytes, pid: int) -> int:
        """Map an allocation of process `pid`. Return its address here. Raises OSError, SplitserveError."""
        ...

    def close(self, address: int) -> None:
        """Unmap an allocation mapped by `open`."""
        ...

    def start(self, rows: DeviceRows) -> Callable[[], object]:
        """Start to copy all rows, each of at most ROW_BYTES. Return a function that waits until all are copied.

        Nothing is started if it raises.
        """
        ...


def cuda_ipc_transport(options: TransportOptions) -> SessionTransport:
    """Return a transport between GPUs of this host. Raises ConfigError if there is no GPU."""
    if sys.platform != "linux":
        raise ConfigError(f"the transfer backend {NAME!r} needs Linux, this is {sys.platform}: choose 'tcp'")
    from splitserve.transfer.transports.cuda_gpu import CudaGpu

    return SessionTransport(CudaIpcBackend(CudaGpu()), options)


class _SessionInfo(msgspec.Struct, frozen=True):
    host: same_host.KernelIdentity
    pid: int
    gate: same_host.FileRef
    # The receiver's regions, in order.
    regions: list[DeviceRegion | HostRegion]


_session_infos = msgspec.msgpack.Decoder(_SessionInfo)


class CudaIpcBackend(ConnectionBackend):
    # No write is brief: the GPU may have other work first.

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu
        # Descriptions of our regions, sent to peers.
        self.described: list[DeviceRegion | HostRegion] = []

    def register(self, memory: Memory) -> None:
        described = [self._describe(region) for region in memory.regions]
        if not any(isinstance(region, DeviceRegion) for region in described):
            raise ConfigError(NEEDS_GPU)
        self.memory, self.described = memory, described

    def _describe(self, region: Region) -> DeviceRegion | HostRegion:
        described = self.gpu.describe(region)
        if described is not None:
            return described
        same_host.check_shareable(region, NAME)
        return HostRegion(same_host.file_ref(region.fd), region.fd_offset, region.length)

    def receive(self) -> CudaIpcIncoming:
        return CudaIpcIncoming(self.described)

    def connect(self, sock: socket.socket, session_info: bytes, deadline: Deadline) -> CudaIpcOutgoing:
        return CudaIpcOutgoing(sock, self, decode_session_info(_session_infos, session_info))


class CudaIpcIncoming(same_host.GatedIncoming):
    def __init__(self, described: list[DeviceRegion | HostRegion]) -> None:
        super().__init__(DeviceGate())
        self._described = described

    def session_info(self) -> bytes:
        return msgspec.msgpack.encode(
            _SessionInfo(same_host.this_host(), os.getpid(), same_host.file_ref(self._gate.fd), self._described)
        )


class CudaIpcOutgoing(same_host.GatedOutgoing):
    """Sending end. It holds mappings of the receiver's memory, each allocation and file once, until it is closed."""

    def __init__(self, sock: socket.socket, backend: CudaIpcBackend, session_info: _SessionInfo) -> None:
        super().__init__(sock, NAME, session_info.host, session_info.pid)
        self._gpu, self._ours = backend.gpu, backend.memory
        self._ours_on_device = _on_device(backend.described)
        self._theirs_on_device = _on_device(session_info.regions)
        # Addresses of mapped allocations by handle.
        self._allocations: dict[bytes, int] = {}
        self._key: DeviceKey | None = None
        try:
            self._theirs = Memory([self._map(region) for region in session_info.regions])
            self._key = self._open_key(DeviceKey, session_info.gate)
        except BaseException:
            self.close()
            raise

    def write(self, ticket_id: int, copies: Copies, deadline: Deadline) -> None:
        assert self._key is not None
        self._theirs.check_targets(copies)
        from_device = self._ours_on_device[copies["src_region"]]
        if (from_device != self._theirs_on_device[copies["dst_region"]]).any():
            raise WriteRefused(f"a copy between a GPU and a CPU: {NAME!r} needs the same kind of region on both sides")
        # A copy of the table would take as long as the rest of the host's work.
        pieces = cut(copies if from_device.all() else select(copies, from_device), ROW_BYTES)
        launches = [pieces[first : first + LAUNCH_ROWS] for first in range(0, len(pieces), LAUNCH_ROWS)]
        for first in range(0, len(launches), LAUNCHES):
            self._check(deadline)
            self._copy_on_device(self._key, launches[first : first + LAUNCHES])
        rest = select(copies, ~from_device)
        copy = ScatterCopy(rest, num_bytes(rest), self._ours.bases, self._theirs.bases)
        self._copy_parts(copy, self._key, deadline)

    def _copy_on_device(self, key: DeviceKey, launches: Sequence[Copies]) -> None:
        """Copy inside the gate. The rows of a launch are computed while the GPU copies those before it."""
        waits: list[Callable[[], object]] = []
        failure: Exception | None = None
        with key.held():
            try:
                for pieces in launches:
                    waits.append(self._gpu.start(rows_of(pieces, self._ours, self._theirs)))
            except Exception as error:
                failure = error
            for wait in waits:
                wait()
        # Raised here, because the GPU has finished, so the gate need not wait for the end of this process.
        if failure is not None:
            raise failure

    def close(self) -> None:
        if self._key is not None:
            self._key.close()
        self._theirs = Memory()
        self._arenas.clear()
        while self._allocations:
            self._gpu.close(self._allocations.popitem()[1])

    def _map(self, region: DeviceRegion | HostRegion) -> Region:
        if isinstance(region, HostRegion):
            return self._map_file(region.file, region.offset, region.length)
        if min(region.offset, region.length) < 0 or region.offset + region.length > region.allocation:
            end = region.offset + region.length
            raise ProtocolError(f"a region of [{region.offset}, {end}) in an allocation of {region.allocation} bytes")
        if self._pid == os.getpid():
            # A process can not map its own allocations, and does not need to.
            return Region(region.address, region.length)
        if region.handle not in self._allocations:
            self._allocations[region.handle] = self._gpu.open(region.handle, self._pid)
        return Region(self._allocations[region.handle] + region.offset, region.length)


def _on_device(regions: list[DeviceRegion | HostRegion]) -> NDArray[np.bool_]:
    return np.array([isinstance(region, DeviceRegion) for region in regions], dtype=bool)
