"""Which staging buffers the connections of a transport get, by where its memory lies and what the user wants.

memory on   `staging`   buffers
CPU         host        `Staging`
GPU         host        `PinnedStaging`
GPU         gpu         `DeviceStaging`; to receive, MAX_GPU_BUFFERS of them, then `PinnedStaging`

A buffer in which peers have written is never used for another connection: a late transfer might hit it. The host's
memory can go and leave its addresses behind. That of a GPU cannot, so it stays allocated until the process ends, and
their number is bounded. Imports torch, and what needs it, where memory lies on a GPU only.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from splitserve.core.layout import Region
from splitserve.disaggregation.transports.aux_data import AuxData, AuxDataCodec
from splitserve.disaggregation.transports.staging import Staging, StagingBuffer
from splitserve.errors import ConfigError

if TYPE_CHECKING:
    from splitserve.disaggregation.transports.device import Device
    from splitserve.disaggregation.transports.tensors import DeviceMemory

HOST, GPU = "host", "gpu"
STAGINGS = (HOST, GPU)
# Buffers on the GPU that one transport makes to receive in: at 12 MiB each, 768 MiB.
MAX_GPU_BUFFERS = 64

logger = logging.getLogger(__name__)

# The GPU on which some of the regions lie, if any.
FindDevice = Callable[[Sequence[Region]], "Device | None"]


def find_device(regions: Sequence[Region]) -> Device | None:
    # Memory on a GPU is allocated by torch: without it there is none, and loading it takes seconds.
    if "torch" not in sys.modules:
        return None
    from splitserve.disaggregation.transports import device

    return device.find_device(regions)


class StagingChoice:
    """Of one transport; for any thread."""

    def __init__(self, wanted: str, find_device: FindDevice = find_device) -> None:
        """`wanted`: one of STAGINGS. Raises ConfigError for anything else."""
        if wanted not in STAGINGS:
            raise ConfigError(f"--transfer-option staging={wanted}: choose one of {', '.join(STAGINGS)}")
        # Small writes to and from the registered memory.
        self.aux: AuxData = AuxDataCodec()
        self._wanted = wanted
        self._find_device = find_device
        self._device: tuple[Device, DeviceMemory] | None = None
        self._lock = threading.Lock()
        self._num_received_on_gpu = 0

    def register(self, regions: Sequence[Region]) -> None:
        """All of the transport's. Raises ConfigError where they cannot be staged as wanted."""
        device = self._find_device(regions)
        if device is not None:
            from splitserve.disaggregation.transports.device_aux_data import DeviceAuxDataCodec
            from splitserve.disaggregation.transports.tensors import DeviceMemory

            memory = DeviceMemory(device, regions)
            self._device, self.aux = (device, memory), DeviceAuxDataCodec(device, memory)
        elif self._wanted == GPU:
            raise ConfigError(
                "--transfer-option staging=gpu needs a KV pool on a GPU: start the worker with --device cuda, or leave "
                "it at staging=host"
            )

    def to_send(self, num_slots: int, slot_bytes: int) -> StagingBuffer:
        """A buffer that nobody else writes to. Raises OSError, and what the GPU says."""
        return self._make(num_slots, slot_bytes, is_on_gpu=self._wanted == GPU)

    def to_receive(self, num_slots: int, slot_bytes: int) -> StagingBuffer:
        """A buffer that a peer writes to: to be kept as long as an engine that knew it. Raises as `to_send`."""
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
            return Staging(num_slots, slot_bytes)
        from splitserve.disaggregation.transports.device_staging import DeviceStaging, PinnedStaging

        return (DeviceStaging if is_on_gpu else PinnedStaging)(*self._device, num_slots, slot_bytes)
