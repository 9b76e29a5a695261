"""A GPU for transports that gather on it, in the CPU's memory, so that they run where there is none.

Honest in what counts: an address of its memory is one that the CPU cannot touch (reading or writing there ends the
process, as it does with a real GPU's), only what goes through the device reaches the bytes; memory that was not
allocated here is the host's; what is page-locked must be unlocked once, before it goes. Work is done when it is asked
for, so a missing wait is not found here.

Slots that a transport allocates on it can be reached by every network library, as a GPU's by GPUDirect RDMA.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from splitserve.core.arena import Arena
from splitserve.core.layout import Region
from splitserve.disaggregation.transports.base import TransportOptions
from splitserve.disaggregation.transports.device import Device, Stream
from splitserve.disaggregation.transports.mooncake import MooncakeBackend
from splitserve.disaggregation.transports.session import SessionTransport

# PROT_NONE of mmap(2), which Python has no name for.
_NO_ACCESS = 0


class FakeDevice:
    """With room for allocations of `lengths` bytes."""

    def __init__(self, lengths: Sequence[int], gpu_id: int = 0) -> None:
        self.torch_device = torch.device("cpu")
        self.gpu_id = gpu_id
        # How often a stream was waited for, and remote writes were flushed.
        self.num_waits = 0
        self.num_flushes = 0
        # Address of each page-locked range, and its bytes.
        self.locked: dict[int, int] = {}
        room = sum(_whole_pages(length) for length in lengths)
        # What the GPU calls its memory, and where the bytes really lie: as far from each other in both.
        self._forbidden = mmap.mmap(
            -1, max(room, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=_NO_ACCESS
        )
        self._start = int(np.frombuffer(self._forbidden, dtype=np.uint8).ctypes.data)
        self._backing = Arena(room)
        self._bytes = np.frombuffer(self._backing.buffer, dtype=np.uint8)
        self.regions: list[Region] = []
        # The bytes of each region, for tests.
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

    def stream(self) -> Stream:
        return _FakeStream(self)

    def page_lock(self, address: int, length: int) -> None:
        assert address not in self.locked
        # A page that is not there cannot be locked.
        ctypes.memset(address, 0, length)
        self.locked[address] = length

    def page_unlock(self, address: int) -> None:
        del self.locked[address]

    def flush_remote_writes(self) -> None:
        self.num_flushes += 1


class _FakeStream:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._device.synchronize()


def _whole_pages(length: int) -> int:
    return -(-length // mmap.PAGESIZE) * mmap.PAGESIZE


def fake_mooncake_transport(options: TransportOptions, device: FakeDevice) -> SessionTransport:
    """Mooncake with its real library, whose build need not know GPUs."""

    def find_device(regions: Sequence[Region]) -> Device | None:
        return device if any(device.holds(region) for region in regions) else None

    return SessionTransport(MooncakeBackend(options, find_device), options)
