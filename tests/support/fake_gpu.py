"""Fake GPU in CPU memory for the `cuda_ipc` transport, for machines without a GPU.

Allocations are shareable arenas, handles name their files, and the CPU copies. As with a real GPU, a handle can be
opened only in another process, and must be closed. Memory outside the GPU's regions belongs to the CPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import msgspec

from splitserve.core.layout import Region
from splitserve.core.machine import Arena
from splitserve.transfer.transports.base import TransportOptions
from splitserve.transfer.transports.cuda_ipc import CudaIpcBackend, DeviceRegion, DeviceRows
from splitserve.transfer.transports.same_host import FileRef, file_ref, open_file
from splitserve.transfer.transports.session import SessionTransport

# Name of the transport for `End`.
FAKE_CUDA_IPC = "cuda_ipc on a fake GPU"


class FakeGpu:
    """Fake GPU. `on_host`: addresses of regions in host memory."""

    def __init__(self, on_host: frozenset[int] = frozenset()) -> None:
        self._on_host = on_host
        self.opened: dict[int, Arena] = {}
        self.num_copies = 0

    def describe(self, region: Region) -> DeviceRegion | None:
        if region.address in self._on_host:
            return None
        handle = msgspec.msgpack.encode(file_ref(region.fd))
        size = os.fstat(region.fd).st_size
        return DeviceRegion(handle, size, region.fd_offset, region.length, region.address)

    def open(self, handle: bytes, pid: int) -> int:
        assert pid != os.getpid()
        arena = Arena.attach(open_file(pid, msgspec.msgpack.decode(handle, type=FileRef)))
        self.opened[arena.address] = arena
        return arena.address

    def close(self, address: int) -> None:
        del self.opened[address]

    def start(self, rows: DeviceRows) -> Callable[[], object]:
        self.num_copies += 1
        for target, source, num_words in rows.table.T.tolist():
            ctypes.memmove(target, source, num_words * rows.word_bytes)
        return lambda: None


def fake_cuda_ipc_transport(options: TransportOptions) -> SessionTransport:
    return SessionTransport(CudaIpcBackend(FakeGpu()), options)
