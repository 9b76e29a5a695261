"""A GPU for `cuda_ipc` that lies in the CPU's memory, so that its transport runs where there is none.

Allocations are shareable arenas, handles name their files, and copies are the CPU's. Honest in what counts: a handle
opens in another process only, what is opened must be closed, and memory that is none of its regions is the CPU's.
"""

from __future__ import annotations

import ctypes
import os

import msgspec
import numpy as np
from numpy.typing import NDArray

from splitserve.core.arena import Arena
from splitserve.core.layout import Region
from splitserve.disaggregation.transports.base import TransportOptions
from splitserve.disaggregation.transports.cuda_ipc import CudaIpcBackend, DeviceRegion
from splitserve.disaggregation.transports.local_files import FileRef, file_ref, open_file
from splitserve.disaggregation.transports.session import SessionTransport

# What `End` calls the transport.
FAKE_CUDA_IPC = "cuda_ipc on a fake GPU"


class FakeGpu:
    """`on_host`: addresses of regions that are the CPU's."""

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

    def copy(self, targets: NDArray[np.uint64], sources: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> None:
        self.num_copies += 1
        for target, source, length in zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True):
            ctypes.memmove(target, source, length)


def fake_cuda_ipc_transport(options: TransportOptions) -> SessionTransport:
    return SessionTransport(CudaIpcBackend(FakeGpu()), options)
