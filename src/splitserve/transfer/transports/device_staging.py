"""Staging buffers for memory of a GPU: slots in the host's memory, or on the GPU itself.

`PinnedStaging`: the GPU gathers a slot's pieces into a stage of its own and copies that into a page-locked slot of the
host, from which any engine sends; the same in reverse to receive. `DeviceStaging`: the slots are on the GPU, for
engines with a network device that reaches it (GPUDirect RDMA). Pieces on the CPU (metadata rows) may be among those on
the GPU.

Each buffer has a stream of its own. Calls return after their work is done. One thread at a time.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from splitserve.transfer.transports.device import CudaDevice, host_bytes
from splitserve.transfer.transports.staging import AuxDataCodec, ProcessStaging, StagingBuffer, check_fills
from splitserve.transfer.transports.tensors import DeviceMemory, Ranges


class DeviceAuxDataCodec(AuxDataCodec):
    """Codec with a GPU stage for each call. Pieces on the CPU alone (a metadata row) are not staged there."""

    def __init__(self, device: CudaDevice, memory: DeviceMemory) -> None:
        self._device = device
        self._memory = memory

    def serialize_data_from_buffer(self, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> bytes:
        if not self._needs_device(addresses, lengths):
            return super().serialize_data_from_buffer(addresses, lengths)
        ranges = Ranges(addresses, lengths)
        with self._device.new_stream()():
            stage = self._memory.stage(ranges.num_bytes)
            return self._memory.gather(ranges, stage).cpu().numpy().tobytes()

    def deserialize_data_to_buffer(
        self, data: bytes, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]
    ) -> None:
        if not self._needs_device(addresses, lengths):
            super().deserialize_data_to_buffer(data, addresses, lengths)
            return
        check_fills(data, lengths)
        ranges = Ranges(addresses, lengths)
        with self._device.new_stream()():
            stage = self._memory.stage(ranges.num_bytes)
            stage.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            self._memory.scatter(stage, ranges)

    def _needs_device(self, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> bool:
        return bool(self._memory.on_device(addresses[lengths > 0]).any())


class PinnedStaging(ProcessStaging):
    """Slots in page-locked memory of the host."""

    def __init__(self, device: CudaDevice, memory: DeviceMemory, num_slots: int, slot_bytes: int) -> None:
        """Raises OSError if memory cannot be allocated or locked; torch.OutOfMemoryError if the GPU is full."""
        super().__init__(num_slots, slot_bytes)
        self._device = device
        self._memory = memory
        self._stream = device.new_stream()
        with self._stream():
            self._stage: torch.Tensor | None = memory.stage(slot_bytes)
        device.page_lock(self.address, self.num_bytes)

    def gather(self, slot: int, table: NDArray[np.void]) -> None:
        with self._stream():
            part = self._memory.gather(_ranges(table), self._on_device())
            self._slot(slot, part.numel()).copy_(part, non_blocking=True)

    def scatter(self, slot: int, table: NDArray[np.void]) -> None:
        ranges, stage = _ranges(table), self._on_device()
        with self._stream():
            stage[: ranges.num_bytes].copy_(self._slot(slot, ranges.num_bytes), non_blocking=True)
            self._memory.scatter(stage, ranges)

    def discard(self) -> None:
        """Unlock and free the pages, see `StagingBuffer.discard`. Also free the GPU stage, which has no other user."""
        self._stage = None
        try:
            self._device.page_unlock(self.address)
        finally:
            super().discard()

    def _on_device(self) -> torch.Tensor:
        assert self._stage is not None, "a staging buffer was used after it was discarded"
        return self._stage

    def _slot(self, slot: int, num_bytes: int) -> torch.Tensor:
        return torch.from_numpy(host_bytes(self.slot_address(slot), num_bytes))


class DeviceStaging(StagingBuffer):
    """Slots on the GPU. They stay allocated while this object exists, also after `discard`."""

    def __init__(self, device: CudaDevice, memory: DeviceMemory, num_slots: int, slot_bytes: int) -> None:
        """Raises torch.OutOfMemoryError if the GPU is full, SplitserveError if it cannot receive this way."""
        super().__init__(num_slots, slot_bytes)
        self.gpu_id = device.gpu_id
        self._device = device
        self._memory = memory
        self._stream = device.new_stream()
        # Raises here instead of at the first write if the GPU does not support it.
        device.flush_remote_writes()
        with self._stream():
            self._slots = memory.stage(self.num_bytes)
        self.address = self._slots.data_ptr()

    def gather(self, slot: int, table: NDArray[np.void]) -> None:
        with self._stream():
            self._memory.gather(_ranges(table), self._slot(slot))

    def scatter(self, slot: int, table: NDArray[np.void]) -> None:
        self._device.flush_remote_writes()
        with self._stream():
            self._memory.scatter(self._slot(slot), _ranges(table))

    def discard(self) -> None:
        """Do nothing: memory of a GPU cannot be freed while its addresses stay reserved."""

    def _slot(self, slot: int) -> torch.Tensor:
        return self._slots[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]


def _ranges(table: NDArray[np.void]) -> Ranges:
    return Ranges(table["base"], table["length"])
