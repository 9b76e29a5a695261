"""`AuxDataCodec` for memory of a GPU and of its host: small writes as plain bytes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from splitserve.transfer.transports.aux_data import AuxDataCodec, check_fills
from splitserve.transfer.transports.device import Device
from splitserve.transfer.transports.tensors import DeviceMemory, Ranges


class DeviceAuxDataCodec:
    """Codec with a GPU stage for each call. Pieces on the CPU alone (a metadata row) are not staged there."""

    def __init__(self, device: Device, memory: DeviceMemory) -> None:
        self._device = device
        self._memory = memory

    def serialize_data_from_buffer(self, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> bytes:
        if not self._needs_device(addresses, lengths):
            return AuxDataCodec.serialize_data_from_buffer(addresses, lengths)
        ranges = Ranges(addresses, lengths)
        with self._device.stream().work():
            stage = self._memory.stage(ranges.num_bytes)
            return self._memory.gather(ranges, stage).cpu().numpy().tobytes()

    def deserialize_data_to_buffer(
        self, data: bytes, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]
    ) -> None:
        if not self._needs_device(addresses, lengths):
            AuxDataCodec.deserialize_data_to_buffer(data, addresses, lengths)
            return
        check_fills(data, lengths)
        ranges = Ranges(addresses, lengths)
        with self._device.stream().work():
            stage = self._memory.stage(ranges.num_bytes)
            stage.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            self._memory.scatter(stage, ranges)

    def _needs_device(self, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> bool:
        return bool(self._memory.on_device(addresses[lengths > 0]).any())
