"""Fake GPU in CPU memory for transports that gather on the device, for machines without a GPU.

It behaves as a real GPU in these points. The CPU cannot touch an address of its memory: a read or write there ends the
process. Only operations of the device reach the bytes. Memory that was not allocated here belongs to the host. Each
page-locked range must be unlocked once before the device is closed. Work completes when it is requested, so tests with
this device do not find a missing wait.

Every network library can reach the slots that a transport allocates here, as with GPUDirect RDMA.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from splitserve.core.layout import Region
from splitserve.core.machine import Arena
from splitserve.transfer.transports.base import TransportOptions
from splitserve.transfer.transports.device import CudaDevice, DeviceStream
from splitserve.transfer.transports.session import SessionTransport

# PROT_NONE of mmap(2), which Python does not export.
_NO_ACCESS = 0


class FakeDevice(CudaDevice):
    """Fake GPU with one allocation of each of `lengths` bytes."""

    def __init__(self, lengths: Sequence[int], gpu_id: int = 0) -> None:
        self.torch_device = torch.device("cpu")
        self.gpu_id = gpu_id
        # Number of stream synchronizations, and of flushes of remote writes.
        self.num_waits = 0
        self.num_flushes = 0
        # Page-locked ranges: address -> bytes.
        self.locked: dict[int, int] = {}
        room = sum(_whole_pages(length) for length in lengths)
        # `_forbidden` gives the device's addresses; `_backing` holds the bytes, at the same offsets.
        self._forbidden = mmap.mmap(
            -1, max(room, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=_NO_ACCESS
        )
        self._start = int(np.frombuffer(self._forbidden, dtype=np.uint8).ctypes.data)
        self._backing = Arena(room)
        self._bytes = np.frombuffer(self._backing.buffer, dtype=np.uint8)
        self.regions: list[Region] = []
        # Bytes of each region, for tests.
        self.memory: list[NDArray[np.uint8]] = []
        offset = 0
        for length in lengths:
            self.regions.append(Region(self._start + offset, length))
            self.memory.append(self._bytes[offset : offset + length])
            offset += _whole_pages(length)

    def holds(self, region: Region) -> bool:
        return self._start <= region.address < self._start + len(self._bytes)

    def bytes_at(self, address: int, length: int) -> torch.Tensor:
        offset = address - self._start
        assert 0 <= offset <= offset + length <= len(self._bytes), "no memory of this GPU"
        return torch.from_numpy(self._bytes[offset : offset + length])

    def synchronize(self) -> None:
        self.num_waits += 1

    def new_stream(self) -> DeviceStream:
        @contextlib.contextmanager
        def work() -> Iterator[None]:
            try:
                yield
            finally:
                self.synchronize()

        return work

    def page_lock(self, address: int, length: int) -> None:
        assert address not in self.locked
        # Touch the pages: a page that is not present cannot be locked.
        ctypes.memset(address, 0, length)
        self.locked[address] = length

    def page_unlock(self, address: int) -> None:
        del self.locked[address]

    def flush_remote_writes(self) -> None:
        self.num_flushes += 1


def _whole_pages(length: int) -> int:
    return -(-length // mmap.PAGESIZE) * mmap.PAGESIZE


def fake_mooncake_transport(options: TransportOptions, device: FakeDevice) -> SessionTransport:
    """Return a Mooncake transport with the real library, which may be a build without GPU support."""

    def find_device(regions: Sequence[Region]) -> CudaDevice | None:
        return device if any(device.holds(region) for region in regions) else None

    # Imported here, because most tests with this device run without Mooncake.
    from splitserve.transfer.transports.mooncake import MooncakeBackend

    return SessionTransport(MooncakeBackend(options, find_device), options)
