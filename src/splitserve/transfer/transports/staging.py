"""Staging buffer that turns scattered pieces of memory into one piece to send: gathered here, scattered there.

`StagingBuffer` is the common interface. `ProcessStaging` is for memory that the CPU reads and writes,
`device_staging.py` for memory of GPUs. The buffer is an anonymous file: its memory can be released while its addresses
stay reserved. Linux only. `StagingChoice` selects the buffers of a transport:

memory on   `staging`   buffers
CPU         host        `ProcessStaging`
GPU         host        `PinnedStaging`
GPU         gpu         `DeviceStaging`; to receive, MAX_GPU_BUFFERS of them, then `PinnedStaging`

A buffer that peers have written to is never used for another connection: a late transfer might write to it. Memory of
the host can be freed while its addresses stay reserved. Memory of a GPU cannot, so it stays allocated until the process
ends, and the number of such buffers is bounded. Torch is imported only if memory is on a GPU.

`AuxDataCodec` makes small writes plain bytes, for transports that take longer for them than a round trip over a socket.
A metadata row is a few KiB and is sent in the same frame that announces it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from splitserve._native.moves import gather_pieces, iovec_table, scatter_pieces
from splitserve.core.errors import OptionError
from splitserve.core.layout import Region
from splitserve.core.machine import advise, map_file

if TYPE_CHECKING:
    from splitserve.transfer.transports.device import CudaDevice
    from splitserve.transfer.transports.tensors import DeviceMemory

HOST, GPU = "host", "gpu"
STAGINGS = (HOST, GPU)
# Maximum number of receive buffers on the GPU per transport. At 12 MiB each, 768 MiB.
MAX_GPU_BUFFERS = 64

logger = logging.getLogger(__name__)


class AuxDataCodec:
    """Conversion of pieces of memory, given by address and length, to one string of bytes and back.

    This one is for memory that the CPU reads and writes.
    """

    def serialize_data_from_buffer(self, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> bytes:
        """Return the bytes of all pieces, in order. The caller has checked that the memory is its own."""
        pairs = zip(addresses.tolist(), lengths.tolist(), strict=True)
        return b"".join(ctypes.string_at(address, length) for address, length in pairs)

    def deserialize_data_to_buffer(
        self, data: bytes, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]
    ) -> None:
        """Write the bytes to the pieces. Raises ValueError, before it writes, unless `data` fills them exactly."""
        check_fills(data, lengths)
        ends = np.cumsum(lengths).tolist()
        first = 0
        for address, end in zip(addresses.tolist(), ends, strict=True):
            ctypes.memmove(address, data[first:end], end - first)
            first = end


def check_fills(data: bytes, lengths: NDArray[np.uint64]) -> None:
    """Check that `data` fills pieces of these lengths exactly. Raises ValueError."""
    if len(data) != (expected := int(lengths.sum())):
        raise ValueError(f"{len(data)} bytes for pieces of {expected}")


_libc = ctypes.CDLL(None)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Pieces:
    """Scattered memory as one stream of bytes, in the order of the pieces."""

    def __init__(self, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> None:
        self._table = iovec_table(addresses, lengths)
        self._ends = np.cumsum(self._table["length"])

    def between(self, first: int, end: int) -> NDArray[np.void]:
        """Return an iovec table of the bytes [first, end) of the stream, which is not empty."""
        i = int(np.searchsorted(self._ends, first, side="right"))
        j = int(np.searchsorted(self._ends, end, side="left")) + 1
        table: NDArray[np.void] = self._table[i:j].copy()
        ends = self._ends[i:j]
        # Cut the last piece before the first: they may be the same.
        table["length"][-1] -= np.uint64(int(ends[-1]) - end)
        skipped = np.uint64(first - (int(ends[0]) - int(self._table["length"][i])))
        table["base"][0] += skipped
        table["length"][0] -= skipped
        return table


class StagingBuffer:
    """`num_slots` slots of `slot_bytes` each. The user of the buffer assigns the slots."""

    # The GPU that has the slots in its memory. -1: memory of this process.
    gpu_id = -1
    # Address of the first slot. The others follow.
    address: int

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.num_bytes = num_slots * slot_bytes

    def slot_address(self, slot: int) -> int:
        return self.address + slot * self.slot_bytes

    def gather(self, slot: int, table: NDArray[np.void]) -> None:
        """Fill a slot, from its beginning, with the pieces of an iovec table. The slot may be read on return.

        Raises OSError, and errors of the GPU.
        """
        raise NotImplementedError

    def scatter(self, slot: int, table: NDArray[np.void]) -> None:
        """Fill the pieces from a slot's beginning. They are in place on return. Raises the errors of `gather`."""
        raise NotImplementedError

    def discard(self) -> None:
        """Free the memory that peers can no longer write to. The addresses stay reserved while this object exists.

        Call once, after the buffer was deregistered from all engines.
        """
        raise NotImplementedError


class ProcessStaging(StagingBuffer):
    """Staging buffer in this process's memory, for pieces there."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        super().__init__(num_slots, slot_bytes)
        fd = os.memfd_create("splitserve-staging", os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, self.num_bytes)
        # A second descriptor of the file could not be closed by `discard`.
        self.address = map_file(fd, self.num_bytes)
        unmap = weakref.finalize(self, _libc.munmap, self.address, self.num_bytes)
        # Do not unmap when the process exits: a library may still access the memory then.
        unmap.atexit = self._close.atexit = False

    def gather(self, slot: int, table: NDArray[np.void]) -> None:
        gather_pieces(table, self.slot_address(slot))

    def scatter(self, slot: int, table: NDArray[np.void]) -> None:
        scatter_pieces(self.slot_address(slot), table)

    def discard(self) -> None:
        """Release memory and file to the system, so that a late write changes no data in use."""
        advise(self.address, self.num_bytes, mmap.MADV_REMOVE)
        self._close()


# Returns the GPU that has some of the regions. None: all are on the CPU.
FindDevice = Callable[[Sequence[Region]], "CudaDevice | None"]


def find_device(regions: Sequence[Region]) -> CudaDevice | None:
    # Torch allocates all GPU memory. If it is not loaded there is none, and loading it takes seconds.
    if "torch" not in sys.modules:
        return None
    from splitserve.transfer.transports import device

    return device.find_device(regions)


class StagingChoice:
    """Staging buffers of one transport. For any thread."""

    def __init__(self, wanted: str, find_device: FindDevice = find_device) -> None:
        """`wanted`: one of STAGINGS. Raises ConfigError for anything else."""
        if wanted not in STAGINGS:
            raise OptionError("--transfer-option", f"staging={wanted}: choose one of {', '.join(STAGINGS)}")
        # Codec of small writes to and from the registered memory.
        self.aux = AuxDataCodec()
        self._wanted = wanted
        self._find_device = find_device
        self._device: tuple[CudaDevice, DeviceMemory] | None = None
        self._lock = threading.Lock()
        self._num_received_on_gpu = 0

    def register(self, regions: Sequence[Region]) -> None:
        """Register all regions of the transport. Raises ConfigError if they cannot be staged as requested."""
        device = self._find_device(regions)
        if device is not None:
            from splitserve.transfer.transports.device_staging import DeviceAuxDataCodec
            from splitserve.transfer.transports.tensors import DeviceMemory

            memory = DeviceMemory(device, regions)
            self._device, self.aux = (device, memory), DeviceAuxDataCodec(device, memory)
        elif self._wanted == GPU:
            raise OptionError(
                "--transfer-option",
                "staging=gpu needs a KV pool on a GPU: start the worker with --device cuda, or leave "
                "it at staging=host",
            )

    @property
    def has_gpu(self) -> bool:
        """Return whether registered memory is on a GPU."""
        return self._device is not None

    def to_send(self, num_slots: int, slot_bytes: int) -> StagingBuffer:
        """Return a buffer for sending, without other writers. Raises OSError, and errors of the GPU."""
        return self._make(num_slots, slot_bytes, is_on_gpu=self._wanted == GPU)

    def to_receive(self, num_slots: int, slot_bytes: int) -> StagingBuffer:
        """Return a buffer for a peer's writes. Keep it as long as an engine that registered it. Raises as `to_send`."""
        return self._make(num_slots, slot_bytes, is_on_gpu=self._wanted == GPU and self._take_place())

    def _take_place(self) -> bool:
        with self._lock:
            self._num_received_on_gpu += 1
            if self._num_received_on_gpu == MAX_GPU_BUFFERS + 1:
                logger.warning(
                    "%d connections have had a staging buffer on the GPU, which stays allocated: from now on they get "
                    "page-locked memory of the host, until this worker is started anew",
                    MAX_GPU_BUFFERS,
                )
            return self._num_received_on_gpu <= MAX_GPU_BUFFERS

    def _make(self, num_slots: int, slot_bytes: int, *, is_on_gpu: bool) -> StagingBuffer:
        if self._device is None:
            return ProcessStaging(num_slots, slot_bytes)
        from splitserve.transfer.transports.device_staging import DeviceStaging, PinnedStaging

        return (DeviceStaging if is_on_gpu else PinnedStaging)(*self._device, num_slots, slot_bytes)
