"""Choice of the staging buffers for the connections of a transport, by the location of its memory and an option.

memory on   `staging`   buffers
CPU         host        `ProcessStaging`
GPU         host        `PinnedStaging`
GPU         gpu         `DeviceStaging`; to receive, MAX_GPU_BUFFERS of them, then `PinnedStaging`

A buffer that peers have written to is never used for another connection: a late transfer might write to it. Memory of
the host can be freed while its addresses stay reserved. Memory of a GPU cannot, so it stays allocated until the process
ends, and the number of such buffers is bounded. Torch is imported only if memory is on a GPU.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from splitserve.core.errors import OptionError
from splitserve.core.layout import Region
from splitserve.transfer.transports.aux_data import AuxData, AuxDataCodec
from splitserve.transfer.transports.staging import ProcessStaging, StagingBuffer

if TYPE_CHECKING:
    from splitserve.transfer.transports.device import Device
    from splitserve.transfer.transports.tensors import DeviceMemory

HOST, GPU = "host", "gpu"
STAGINGS = (HOST, GPU)
# Maximum number of receive buffers on the GPU per transport. At 12 MiB each, 768 MiB.
MAX_GPU_BUFFERS = 64

logger = logging.getLogger(__name__)

# Returns the GPU that has some of the regions. None: all are on the CPU.
FindDevice = Callable[[Sequence[Region]], "Device | None"]


def find_device(regions: Sequence[Region]) -> Device | None:
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
        self.aux: AuxData = AuxDataCodec()
        self._wanted = wanted
        self._find_device = find_device
        self._device: tuple[Device, DeviceMemory] | None = None
        self._lock = threading.Lock()
        self._num_received_on_gpu = 0

    def register(self, regions: Sequence[Region]) -> None:
        """Register all regions of the transport. Raises ConfigError if they cannot be staged as requested."""
        device = self._find_device(regions)
        if device is not None:
            from splitserve.transfer.transports.device_aux_data import DeviceAuxDataCodec
            from splitserve.transfer.transports.tensors import DeviceMemory

            memory = DeviceMemory(device, regions)
            self._device, self.aux = (device, memory), DeviceAuxDataCodec(device, memory)
        elif self._wanted == GPU:
            raise OptionError(
                "--transfer-option",
                "staging=gpu needs a KV pool on a GPU: start the worker with --device cuda, or leave "
                "it at staging=host",
            )

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
